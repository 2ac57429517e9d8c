"""What a node does besides making a value: what it writes in place, and whose memory it hands on."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from paceline.replica.pipeline.kinds import attribute, child, is_item, is_mark, schema_name, unmarked

_RUNNING = ("running_mean", "running_var")
"""Arguments that normalisations write although their schemas don't say so (torch 2.13)."""


def roots(graph: GraphModule) -> dict[Node, frozenset[Node]]:
    """Node -> those in whose memory its result may lie: itself and what it hands on; of one tensor one node."""
    found: dict[Node, frozenset[Node]] = {}
    holders: dict[int, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found[node] = frozenset({holders.setdefault(id(attribute(node, graph)), node)})
        else:
            found[node] = frozenset({node}).union(*(found[each] for each in handed_on(node, graph)))
    return found


def written(node: Node, root: nn.Module) -> list[Node]:
    """The arguments that a node writes in place, as far as can be seen without running it."""
    if isinstance(node.target, OpOverload):
        if schema_name(node) == "aten::detach_" and schema_name(node.all_input_nodes[0]) == "aten::lift_fresh_copy":
            return []  # how torch.export (2.13) writes torch.tensor(2.0): it writes a history, and there is none
        return [
            given
            for argument, given in _arguments(node)
            if argument.name in _RUNNING or (argument.alias_info is not None and argument.alias_info.is_write)
        ]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=True)
    module = child(node, root)
    return list(node.all_input_nodes) if module is not None and _in_place(module) else []


def handed_on(node: Node, root: nn.Module) -> list[Node]:
    """The arguments whose memory the result may share."""
    if is_item(node):
        return [unmarked(node)] if is_mark(node) else list(node.all_input_nodes)
    if isinstance(node.target, OpOverload):
        maybe = torch.Tag.maybe_aliasing_or_mutating in node.target.tags
        maybe = maybe and not any(argument.name in _RUNNING for argument in node.target._schema.arguments)
        return [given for argument, given in _arguments(node) if maybe or argument.alias_info is not None]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=False)
    module = child(node, root)
    # A child without parameters may be a Flatten or an Identity; one that has some makes something new of its input.
    return list(node.all_input_nodes) if module is not None and not has_parameters(module) else []


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything to train in it."""
    return next(module.parameters(), None) is not None


def _in_place(module: nn.Module) -> bool:
    """Whether any module in it has been asked to work in place."""
    return any(getattr(each, "inplace", False) is True for each in module.modules())


def _of_block(node: Node, root: nn.Module, *, writes: bool) -> list[Node]:
    """What a block under no_grad or autocast writes, or hands on, of the arguments that it is called with."""
    blocks = [n for n in node.args if isinstance(n, Node) and isinstance(_got(n, root), GraphModule)]
    given = list(node.args[node.args.index(blocks[0]) + 1 :]) if blocks else []
    block = _got(blocks[0], root) if blocks else None
    leaves = block.graph.find_nodes(op="placeholder") if isinstance(block, GraphModule) else []
    if not isinstance(block, GraphModule) or len(blocks) > 1 or len(leaves) != len(given):
        return list(node.all_input_nodes)  # another operator that calls graphs: of those nothing is known
    lies_in = roots(block)
    ends = next(iter(reversed(block.graph.nodes))).all_input_nodes
    touched = [w for n in block.graph.nodes for w in written(n, block)] if writes else ends
    inside = frozenset[Node]().union(*(lies_in[each] for each in touched))
    return [each for each, leaf in zip(given, leaves, strict=True) if leaf in inside and isinstance(each, Node)]


def _got(node: Node, root: nn.Module) -> object:
    return attribute(node, root) if node.op == "get_attr" else None


def _arguments(node: Node) -> Iterator[tuple[torch.Argument, Node]]:
    """Each argument of an operator's schema with the nodes given for it."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, Iterable) and not isinstance(given, str) else (given,):
            if isinstance(each, Node):
                yield argument, each
