"""The operators of a captured graph as rules see them, and in what units their dims can be divided.

The operators of a captured graph, as rules look at them.

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

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.tensor.base import Cuts, GraphTensor, OpCall

aten = torch.ops.aten

Grain = tuple[int, int]
"""(blocks, elements that stay together)."""

_PIECES = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int)


def dim_divisions(graph: Graph, values: Mapping[Node, tuple[GraphTensor, ...]]) -> Cuts:
    """What a graph says of the dims of its tensors, by their length."""
    grains: dict[int, set[Grain]] = defaultdict(lambda: {(1, 1)})
    factors = {factor for node in graph.nodes for factor in _factors(node, values)}
    for length, unit in (found for node in graph.nodes for found in _grouped(node, values)):
        grains[length].add((1, unit))
    before = -1
    while before != (before := sum(map(len, grains.values()))):  # each round says more of longer dims
        for length, blocks, inner in factors:
            grains[length] |= {(1, inner)} if blocks == 1 else set()
            grains[length] |= {(o, u * inner) for o, u in grains[blocks]} if inner > 1 else set()
            grains[length] |= {(blocks * o, u) for o, u in grains[inner]} if blocks > 1 else set()
    return {length: _coarsest(length, found) for length, found in grains.items()}


def _factors(node: Node, values: Mapping[Node, tuple[GraphTensor, ...]]) -> Iterator[tuple[int, int, int]]:
    """Lengths that are products of two others: (length, slower, quicker)."""
    if node.op != "call_function":
        return
    sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
    made = values.get(node, ())
    if node.target in _PIECES and sources:
        dim_lengths = {(a, b) for a, b in zip(sources[0].shape, made[0].shape, strict=False) if a != b}
        yield from ((whole, whole // part, part) for whole, part in dim_lengths if part and whole % part == 0)
    elif _reshapes(node.target) and sources:
        for longer, shorter in ((sources[0].shape, made[0].shape), (made[0].shape, sources[0].shape)):
            yield from _merged(longer, shorter)


def _grouped(node: Node, values: Mapping[Node, tuple[GraphTensor, ...]]) -> Iterator[tuple[int, int]]:
    """Channels of which some stay together: (length, unit)."""
    sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
    if node.target is aten.group_norm.default:
        channels, groups = sources[0].shape[1], node.args[1]
        lengths = [channels]
    elif "conv" in str(node.target) and len(sources) > 1 and len(node.args) > 6:
        groups = node.args[6]
        lengths = [value.shape[1] for value in (sources[0], *values[node]) if value.dims == sources[1].dims]
    elif node.target is aten.scaled_dot_product_attention.default and len(sources) > 1:
        lengths, groups = [sources[0].shape[-3]] if sources[0].dims > 2 else [], sources[1].shape[-3:][0]
    else:
        return
    if isinstance(groups, int) and groups > 1:
        yield from ((length, length // groups) for length in lengths if length > groups and not length % groups)


def _reshapes(target: Any) -> bool:
    return target in (
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int
    )  # fmt: skip


def _merged(apart: Sequence[int], together: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Dims of ``together`` that are two or more of ``apart``."""
    for length, group in matching_dims(apart, together):
        lengths = [apart[i] for i in group]
        whole = [together[j] for j in length]
        if len(whole) != 1 or len(lengths) < 2:
            continue
        quicker = 1
        for each in reversed(lengths[1:]):
            quicker *= each
            yield whole[0], whole[0] // quicker, quicker


def matching_dims(apart: Sequence[int], together: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims of two shapes of the same tensor that have the same elements: (dims of ``together``, dims of ``apart``).

    >>> groups((2, 3, 4, 5), (6, 4, 5))
    [([0], [0, 1]), ([1], [2]), ([2], [3])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(apart) or j < len(together):
        ours: list[int] = []
        theirs: list[int] = []
        a = b = 1
        if i < len(apart):
            theirs.append(i)
            a, i = apart[i], i + 1
        if j < len(together):
            ours.append(j)
            b, j = together[j], j + 1
        while a != b:
            if a < b and i < len(apart):
                theirs.append(i)
                a, i = a * apart[i], i + 1
            elif j < len(together):
                ours.append(j)
                b, j = b * together[j], j + 1
            else:
                return found
        found.append((ours, theirs))
    return found


def _coarsest(length: int, found: set[Grain]) -> Sequence[Grain]:
    """All that are possible, of each number of blocks the coarsest first."""
    possible = [(blocks, unit) for blocks, unit in found if length % (blocks * unit) == 0]
    return sorted(possible, key=lambda grain: (grain[0], -grain[1]))


_UNLINKED = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


@dataclass(frozen=True)
class OperatorGraph:
    """A captured graph, operator by operator."""

    captured: Captured
    values: Mapping[Node, tuple[GraphTensor, ...]]
    """Of each node that has tensors: what it gives."""
    calls: Mapping[Node, OpCall]
    """Of each node that calls something and takes or gives a tensor, in order."""

    def outputs(self) -> list[GraphTensor]:
        """The tensors that the graph returns."""
        output = next(iter(reversed(self.captured.module.graph.nodes)))
        return [value for node in output.all_input_nodes for value in self.values.get(node, ())]


def operator_graph(
    captured: Captured, shards: int, leaves: Sequence[Any] = (), flowing: Collection[Node] = ()
) -> OperatorGraph:
    """Look at a graph of operators, for so many shards.

    Args:
        captured: the graph.
        shards: k.
        leaves: of the input that is planned for; empty: the one that was captured with.
        flowing: inputs that have a gradient, which has to be whole on every shard.

    Raises:
        InputError: an operator's sizes are not known before it runs.
    """
    graph, values = captured.module, dict[Node, tuple[GraphTensor, ...]]()
    sizes = _sizes(graph.graph, leaves)
    for node in graph.graph.nodes:
        given = _gives(graph, node, values, sizes, flowing)
        if given:
            values[node] = given
    divisible = dim_divisions(graph.graph, values)
    calls = dict[Node, OpCall]()
    for node in graph.graph.nodes:
        inputs = tuple(value for source in node.all_input_nodes for value in _taken(values, source, node))
        if node.op in ("call_function", "call_module") and (inputs or node in values):
            calls[node] = OpCall(node, inputs, values.get(node, ()), shards, divisible)
    return OperatorGraph(captured, values, calls)


def _taken(values: Mapping[Node, tuple[GraphTensor, ...]], source: Node, user: Node) -> Iterator[GraphTensor]:
    """Of a tuple, the one element that is named."""
    given = values.get(source, ())
    if user.target is getitem and isinstance(index := user.args[1], int) and len(given) > 1:
        given = given[index : index + 1]
    yield from given


def _sizes(graph: Graph, leaves: Sequence[Any]) -> dict[Any, int]:
    """Of an input: what the symbols of the graph's sizes stand for."""
    found: dict[Any, int] = {}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(places, leaves, strict=False):
        if not isinstance(leaf, Tensor):
            continue
        for size, length in zip(node.meta["val"].shape, leaf.shape, strict=False):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                found[size.node.expr] = length
    return found


def _gives(
    graph: GraphModule,
    node: Node,
    values: Mapping[Node, tuple[GraphTensor, ...]],
    sizes: Mapping[Any, int],
    flowing: Collection[Node],
) -> tuple[GraphTensor, ...]:
    if node.op == "get_attr":
        held: Any = attrgetter(str(node.target))(graph)
        if not isinstance(held, Tensor):
            return ()
        return (GraphTensor(node, tuple(held.shape), held.dtype, held.requires_grad, str(node.target)),)
    made = node.meta.get("val")
    found = [made] if isinstance(made, Tensor) else made if isinstance(made, (list, tuple)) else []
    tensors = [each for each in found if isinstance(each, Tensor)]
    flows = node in flowing
    return tuple(_value(node, index, each, values, sizes, flows=flows) for index, each in enumerate(tensors))


def _value(
    node: Node,
    index: int,
    made: Tensor,
    values: Mapping[Node, tuple[GraphTensor, ...]],
    sizes: Mapping[Any, int],
    *,
    flows: bool,
) -> GraphTensor:
    linked = node.op != "placeholder" and node.target not in _UNLINKED
    sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
    differentiable = flows or (linked and any(value.differentiable for value in sources))
    differentiable = differentiable and made.dtype.is_floating_point
    shape = tuple(_size(node, size) for size in made.shape)
    elements = prod(_actual(size, sizes) for size in made.shape) if sizes else None
    return GraphTensor(node, shape, made.dtype, differentiable, index=index, elements=elements)


def _actual(size: Any, sizes: Mapping[Any, int]) -> int:
    """With the input that is planned for; a size that it does not say is that of what was captured with."""
    if isinstance(size, int):
        return size
    found = size.node.expr.subs(sizes)
    return int(found) if found.is_number else int(size.node.hint)


def _size(node: Node, size: Any) -> int:
    """With the batch that was captured."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise InputError(
            f"{node.name} makes a tensor whose size depends on values ({size}), so the model can't be divided; write "
            f"a mask in its place, or {WAYS_OUT}"
        )
    return int(hint)
