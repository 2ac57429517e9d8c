"""Split the traced graph of a part's forward and backward: into both, and backward into its halves (zero-bubble)."""

from collections.abc import Sequence, Set
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError

_CONVOLUTION = torch.ops.aten.convolution_backward.default


def split_forward(
    traced: GraphModule, count: int, differentiable: Sequence[bool]
) -> tuple[GraphModule, GraphModule, list[int]]:
    """Split a graph at the gradients of its outputs.

    Args:
        traced: its last inputs are a gradient of each output.
        count: of outputs, which its first results are; the others are gradients.
        differentiable: which of the outputs' gradients backward is given.

    Returns:
        Forward, which has what backward needs after its outputs; backward; and which of forward's inputs backward takes
        before that.
    """
    *nodes, end = traced.graph.nodes
    places = [node for node in nodes if node.op == "placeholder"]
    inputs, upstream = places[:-count], places[-count:]
    results: list[Node] = list(end.args[0])
    later = set(upstream)
    for node in nodes:
        if any(each in later for each in node.all_input_nodes):
            later.add(node)
    needed = {each for node in later for each in node.all_input_nodes} | set(results[count:])
    kept = [node for node in nodes if node in needed and node not in later]
    if any(not isinstance(node.meta.get("val"), Tensor) for node in kept):
        raise InputError("backward needs of forward what is no tensor")
    given = [index for index, node in enumerate(inputs) if node in needed]
    made = [node for node in kept if node.op != "placeholder"]
    before = [node for node in nodes if node not in later and node.op != "placeholder"]
    after = [node for node in nodes if node in later and node.op != "placeholder"]
    upstream = [node for node, needs in zip(upstream, differentiable, strict=True) if needs]
    return (
        _part(traced, inputs, before, [*results[:count], *made]),
        _part(traced, [*(inputs[index] for index in given), *made, *upstream], after, results[count:]),
        given,
    )


def split_weights(backward: GraphModule, values: int, late: Set[int]) -> tuple[GraphModule, GraphModule]:
    """Split a graph's backward: into what gradients of values and of some parameters are computed of, and the rest.

    In a first part, which has no values, what several gradients are computed of is in the first half, as it is in later
    parts.

    Args:
        backward: its first results are gradients of values, the others of parameters.
        values: number of the first ones.
        late: which results the second half has.

    Returns:
        The first half, whose last results are the second one's inputs; and the second half.
    """
    _split_convolutions(backward)
    *nodes, end = backward.graph.nodes
    results: list[Node] = list(end.args[0])
    reached: dict[Node, set[int]] = {node: set() for node in nodes}
    for number, node in enumerate(results):
        reached[node].add(number)
    for node in reversed(nodes):
        for source in node.all_input_nodes:
            reached[source] |= reached[node]
    second = set[Node]()
    for node in nodes:
        with_source = node.target is not getitem or node.args[0] in second
        if node.op != "placeholder" and with_source and reached[node] <= late and (values or len(reached[node]) == 1):
            second.add(node)
    crossing = [node for node in nodes if node not in second and any(user in second for user in node.users)]
    if any(not isinstance(node.meta.get("val"), Tensor) for node in crossing):
        raise InputError("gradients of weights need what is no tensor")
    if {number for number, node in enumerate(results) if node in second} != late:
        raise InputError("a gradient of a weight is one of a value, too")
    places = [node for node in nodes if node.op == "placeholder"]
    before = [node for node in nodes if node not in second and node.op != "placeholder"]
    early = [node for node in results if node not in second]
    return (
        _part(backward, places, before, [*early, *crossing]),
        _part(backward, crossing, [node for node in nodes if node in second], [results[n] for n in sorted(late)]),
    )


def _split_convolutions(backward: GraphModule) -> None:
    """Let each backward of a convolution be two: for its input, and for its weight and bias."""
    graph = backward.graph
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        needs_input, *of_weights = node.args[-1]
        if not needs_input or not any(of_weights):
            continue
        with graph.inserting_after(node):
            weights = graph.call_function(_CONVOLUTION, (*node.args[:-1], [False, *of_weights]))
        weights.meta = dict(node.meta)
        node.args = (*node.args[:-1], [True, False, False])
        for result in list(node.users):
            if result.args[1] != 0:
                result.args = (weights, result.args[1])
                weights.append(result)  # after both


def _part(traced: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Return those nodes of a graph as a graph of their own."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(traced, graph)
