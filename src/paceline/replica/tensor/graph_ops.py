"""Operators of a captured graph as rules see them, and the units in which their dims can be divided.

A layer that makes queries, keys and values of 2 heads of 8 features in one product gives 48 of them: 3 blocks, one
after the other, of 2 units of 8. The layer does not say so; the operators after it do, and what they show of a dim
holds for every dim of that length::

    split   48 -> 16 + 16 + 16      a dim of 48 has 3 blocks of 16
    view    16 -> 2 × 8             a dim of 16 has units of 8           so 48: 3 blocks, units of 8
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.tensor.base import Divisions, GraphTensor, OpCall, aten

PIECES = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int)
RESHAPES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int
)  # fmt: skip
_WITHOUT_GRADIENT = (aten.detach.default, aten.detach_.default)


@dataclass(frozen=True)
class OperatorGraph:
    """A captured graph, operator by operator."""

    captured: Captured
    values: Mapping[Node, tuple[GraphTensor, ...]]
    """Results of each node that has tensors."""
    calls: Mapping[Node, OpCall]
    """Nodes that call something and have tensors as inputs or outputs, in order."""

    def outputs(self) -> list[GraphTensor]:
        """Return the tensors that the graph returns."""
        output = next(iter(reversed(self.captured.module.graph.nodes)))
        return [value for node in output.all_input_nodes for value in self.values.get(node, ())]


def operator_graph(
    captured: Captured, shards: int, leaves: Sequence[Any] = (), flowing: Collection[Node] = ()
) -> OperatorGraph:
    """Build the operators of a captured graph for ``shards`` shards.

    Args:
        captured: the graph.
        shards: k.
        leaves: leaves of the input that is planned for; empty: those that were captured with.
        flowing: inputs that have a gradient, which has to be whole on every shard.

    Raises:
        InputError: the size of a tensor depends on values.
    """
    module, values = captured.module, dict[Node, tuple[GraphTensor, ...]]()
    sizes: dict[Any, int] = {}  # of the symbols of the graph's sizes, for the input that is planned for
    for node, leaf in zip((node for node in module.graph.nodes if node.op == "placeholder"), leaves, strict=False):
        if isinstance(leaf, Tensor):
            for size, length in zip(node.meta["val"].shape, leaf.shape, strict=False):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    sizes[size.node.expr] = length
    for node in module.graph.nodes:
        results = _results(module, node, values, sizes, flowing)
        if results:
            values[node] = results
    divisions = dim_divisions(module.graph, values)
    calls = dict[Node, OpCall]()
    for node in module.graph.nodes:
        inputs = list[GraphTensor]()
        for source in node.all_input_nodes:
            results = values.get(source, ())
            # Of a tuple with several tensors an item is one of them.
            if node.target is getitem and isinstance(index := node.args[1], int) and len(results) > 1:
                results = results[index : index + 1]
            inputs += results
        if node.op in ("call_function", "call_module") and (inputs or node in values):
            calls[node] = OpCall(node, tuple(inputs), values.get(node, ()), shards, divisions)
    return OperatorGraph(captured, values, calls)


def _results(
    module: GraphModule,
    node: Node,
    values: Mapping[Node, tuple[GraphTensor, ...]],
    sizes: Mapping[Any, int],
    flowing: Collection[Node],
) -> tuple[GraphTensor, ...]:
    """Return the tensors that a node gives."""
    if node.op == "get_attr":
        constant: Any = attrgetter(str(node.target))(module)
        if not isinstance(constant, Tensor):
            return ()
        name = str(node.target)
        return (GraphTensor(node, tuple(constant.shape), constant.dtype, constant.requires_grad, name),)
    # A result has a gradient if an input has one, unless the operator takes it away.
    linked = node.op != "placeholder" and node.target not in _WITHOUT_GRADIENT
    sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
    differentiable = node in flowing or (linked and any(value.differentiable for value in sources))
    fake = node.meta.get("val")
    candidates = [fake] if isinstance(fake, Tensor) else fake if isinstance(fake, (list, tuple)) else []
    results = list[GraphTensor]()
    for tensor in (each for each in candidates if isinstance(each, Tensor)):
        flows = differentiable and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        lengths = [_lengths(node, size, sizes) for size in tensor.shape]
        shape, elements = tuple(captured for captured, _ in lengths), prod(planned for _, planned in lengths)
        results.append(GraphTensor(node, shape, tensor.dtype, flows, index=len(results), elements=elements))
    return tuple(results)


def _lengths(node: Node, size: Any, sizes: Mapping[Any, int]) -> tuple[int, int]:
    """Return a size with the batch that was captured, and with the input that is planned for, if that determines it."""
    if isinstance(size, int):
        return size, size
    if size.node.hint is None:
        raise InputError(
            f"{node.name} makes a tensor whose size depends on values ({size}), so the model can't be divided; write "
            f"a mask in its place, or {WAYS_OUT}"
        )
    captured, planned = int(size.node.hint), size.node.expr.subs(sizes)
    return captured, int(planned) if planned.is_number else captured


def dim_divisions(graph: Graph, values: Mapping[Node, tuple[GraphTensor, ...]]) -> Divisions:
    """Return in which (blocks, units) dims can be divided, by their length: as reshapes and groups say.

    A dim of 3·12 elements that is reshaped to 3 × 4 × 3 for 4 heads can be divided in 3 blocks of 4 units of 3.
    """
    grains: dict[int, set[tuple[int, int]]] = defaultdict(lambda: {(1, 1)})
    factors = set[tuple[int, int, int]]()
    for node in graph.nodes:
        sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
        factors |= set(_factors(node, sources, values.get(node, ())))
        for length, unit in _grouped_channels(node, sources, values.get(node, ())):
            grains[length].add((1, unit))
    before = -1
    while before != (before := sum(map(len, grains.values()))):  # each round says more of longer dims
        for length, outer, inner in factors:
            grains[length] |= {(1, inner)} if outer == 1 else set()
            grains[length] |= {(blocks, unit * inner) for blocks, unit in grains[outer]} if inner > 1 else set()
            grains[length] |= {(outer * blocks, unit) for blocks, unit in grains[inner]} if outer > 1 else set()
    divisions = dict[int, Sequence[tuple[int, int]]]()
    for length, pairs in grains.items():  # of each number of blocks the coarsest units first
        possible = [(blocks, unit) for blocks, unit in pairs if length % (blocks * unit) == 0]
        divisions[length] = sorted(possible, key=lambda grain: (grain[0], -grain[1]))
    return divisions


def _factors(
    node: Node, sources: Sequence[GraphTensor], results: Sequence[GraphTensor]
) -> Iterator[tuple[int, int, int]]:
    """Yield lengths that are products of two others: (length, slower, faster)."""
    if node.op != "call_function" or not sources:
        return
    if node.target in PIECES:
        pairs = {(a, b) for a, b in zip(sources[0].shape, results[0].shape, strict=False) if a != b}
        yield from ((whole, whole // part, part) for whole, part in pairs if part and whole % part == 0)
    elif node.target in RESHAPES:
        before, after = sources[0].shape, results[0].shape
        for apart, together in ((before, after), (after, before)):
            for joined, dims in matching_dims(apart, together):
                if len(joined) == 1 and len(dims) > 1:  # one dim here is several there
                    length, faster = together[joined[0]], 1
                    for dim in reversed(dims[1:]):
                        faster *= apart[dim]
                        yield length, length // faster, faster


def _grouped_channels(
    node: Node, sources: Sequence[GraphTensor], results: Sequence[GraphTensor]
) -> Iterator[tuple[int, int]]:
    """Yield channels or heads of which some stay together: (length, unit)."""
    lengths: list[int]
    if node.target is aten.group_norm.default:
        lengths, groups = [sources[0].shape[1]], node.args[1]
    elif "conv" in str(node.target) and len(sources) > 1 and len(node.args) > 6:
        lengths = [value.shape[1] for value in (sources[0], *results) if value.dims == sources[1].dims]
        groups = node.args[6]
    elif node.target is aten.scaled_dot_product_attention.default and len(sources) > 1:
        lengths = [sources[0].shape[-3]] if sources[0].dims > 2 else []
        groups = sources[1].shape[-3:][0]
    else:
        return
    if isinstance(groups, int) and groups > 1:
        yield from ((length, length // groups) for length in lengths if length > groups and not length % groups)


def matching_dims(apart: Sequence[int], together: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return dims of two shapes of a tensor that have the same elements: (dims of ``together``, dims of ``apart``).

    >>> matching_dims((2, 3, 4, 5), (6, 4, 5))
    [([0], [0, 1]), ([1], [2]), ([2], [3])]
    """
    pairs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(apart) or j < len(together):
        # One dim of each, then more of the one whose product is smaller until the products are equal.
        start, first = i, j
        a, i = (apart[i], i + 1) if i < len(apart) else (1, i)
        b, j = (together[j], j + 1) if j < len(together) else (1, j)
        while a != b:
            if a < b and i < len(apart):
                a, i = a * apart[i], i + 1
            elif j < len(together):
                b, j = b * together[j], j + 1
            else:
                return pairs
        pairs.append((list(range(first, j)), list(range(start, i))))
    return pairs
