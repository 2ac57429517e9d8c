"""In what units the dims of a model's tensors can be divided: heads, not single features, where there are heads.

A layer that makes queries, keys and values of 2 heads of 8 features in one product gives 48 of them: 3 blocks, one
after the other, of 2 units of 8. Nobody says so at the layer; the operators after it do, and what they say of a dim
holds for every dim of that length::

    split   48 -> 16 + 16 + 16      a dim of 48 has 3 blocks of 16
    view    16 -> 2 × 8             a dim of 16 has units of 8           so 48: 3 blocks, units of 8
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.replica.tensor.base import Cuts, Value

aten = torch.ops.aten

Grain = tuple[int, int]
"""(blocks, elements that stay together)."""

_PIECES = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int)


def cuts(graph: Graph, values: Mapping[Node, tuple[Value, ...]]) -> Cuts:
    """What a graph says of the dims of its tensors, by their length."""
    grains: dict[int, set[Grain]] = defaultdict(lambda: {(1, 1)})
    factors = {factor for node in graph.nodes for factor in _factors(node, values)}
    for length, unit in (found for node in graph.nodes for found in _grouped(node, values)):
        grains[length].add((1, unit))
    before = -1
    while before != (before := sum(map(len, grains.values()))):  # each round says more of longer dims
        for length, outer, inner in factors:
            grains[length] |= {(1, inner)} if outer == 1 else set()
            grains[length] |= {(o, u * inner) for o, u in grains[outer]} if inner > 1 else set()
            grains[length] |= {(outer * o, u) for o, u in grains[inner]} if outer > 1 else set()
    return {length: _coarsest(length, found) for length, found in grains.items()}


def _factors(node: Node, values: Mapping[Node, tuple[Value, ...]]) -> Iterator[tuple[int, int, int]]:
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


def _grouped(node: Node, values: Mapping[Node, tuple[Value, ...]]) -> Iterator[tuple[int, int]]:
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
    for length, group in groups(apart, together):
        lengths = [apart[i] for i in group]
        whole = [together[j] for j in length]
        if len(whole) != 1 or len(lengths) < 2:
            continue
        quicker = 1
        for each in reversed(lengths[1:]):
            quicker *= each
            yield whole[0], whole[0] // quicker, quicker


def groups(apart: Sequence[int], together: Sequence[int]) -> list[tuple[list[int], list[int]]]:
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
    possible = [(outer, unit) for outer, unit in found if length % (outer * unit) == 0]
    return sorted(possible, key=lambda grain: (grain[0], -grain[1]))
