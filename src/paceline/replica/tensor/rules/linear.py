"""Linear layers: x·Wᵀ + b, and x·W + b as GPT-2 writes it."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import GraphEmitter, Offers, OpCall, OpRule, OpStrategy, offered, register
from paceline.replica.tensor.placements import PARTIAL, SHARED, Layout, OnRank, Shard

aten = torch.ops.aten

FIRST = OnRank(0)
"""A bias that is added once, by shard 0."""


def summable(call: OpCall, bias: int) -> bool:
    """Whether all shards' terms have a gradient, or none; not so where only the bias has one: shard 0 alone would send.

    Args:
        call: an operator with a bias.
        bias: its place among the tensors that the operator takes.
    """
    others = (value.differentiable for place, value in enumerate(call.takes) if place != bias)
    return any(others) or not any(value.differentiable for value in call.takes)


def inputs(call: OpCall, offers: Iterable[Layout], length: int, dim: int = -1) -> Iterator[Shard]:
    """How the dim of x that is summed over may be divided: evenly, or as x is there, in blocks of tensors put together
    say.
    """
    there = (split for split in offered(offers) if split.dim == dim and split.length == length)
    yield from dict.fromkeys((*call.splits(length, dim), *there))


@final
class Linear(OpRule):
    """y = x·Wᵀ + b, with W of m × n.

    column: S_p = rows of W and elements of b; x is everyone's, and y_p is a part of y.
    row: S_p = columns of W; x_p is a part of x, and y is the sum of all x_p·W_pᵀ, to which shard 0 adds b.
    samples: S_p = everything; x_p are some of the rows of x, and so is y_p.
    """

    targets: ClassVar = (aten.linear.default,)

    def ways(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        _, weight, *bias = call.takes
        for rows in call.splits(weight.shape[0], -2):
            made = rows.at(-1)
            yield OpStrategy((SHARED, rows, *(made for _ in bias)), (made,), "column", share=made.share)
        for columns in inputs(call, offers[0], weight.shape[1]) if summable(call, 2) else ():
            yield OpStrategy((columns, columns, *(FIRST for _ in bias)), (PARTIAL,), "row", _row, columns.share)
        for split in offered(offers[0]):
            if split.dim < -1:
                yield OpStrategy((split, SHARED, *(SHARED for _ in bias)), (split,), "samples", share=split.share)


def _row(write: GraphEmitter, call: OpCall) -> Node:
    return write.same(call) if write.shards.rank == FIRST.shard else write.same(call, bias=None)


@final
class Addmm(OpRule):
    """y = b + x·W, with W of n × m: S_p as of :class:`Linear`, with rows and columns of W exchanged."""

    targets: ClassVar = (aten.addmm.default,)

    def ways(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        bias, _, weight = call.takes
        if bias.dims != 1 or any(call.argument(i, n, 1) != 1 for i, n in ((3, "beta"), (4, "alpha"))):
            return
        for columns in call.splits(weight.shape[1], -1):
            yield OpStrategy((columns, SHARED, columns), (columns,), "column", share=columns.share)
        for columns in inputs(call, offers[1], weight.shape[0]) if summable(call, 0) else ():
            rows = columns.at(-2)
            yield OpStrategy((FIRST, columns, rows), (PARTIAL,), "row", _row_of_addmm, rows.share)
        for split in offered(offers[1]):
            if split.dim < -1:
                yield OpStrategy((SHARED, split, SHARED), (split,), "samples", share=split.share)


def _row_of_addmm(write: GraphEmitter, call: OpCall) -> Node:
    if write.shards.rank == FIRST.shard:
        return write.same(call)
    _, x, weight = call.takes
    return write.call(aten.mm.default, write.new(x.node), write.new(weight.node))


register(Linear())
register(Addmm())
