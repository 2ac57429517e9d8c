"""Operators of a branch that one shard works on, and what the other shards have in their place.

The owner runs the operator itself. The others run nothing: where the branch ends they have a *stand-in*, a tensor of
the right shape that nobody reads, through which autograd finds its way back to the trunk on all shards alike. Only what
draws random numbers they run as well, so that all go on from the same ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Call, Value, Way, Writer, everyones
from paceline.replica.tensor.branches import BRANCH, Placed
from paceline.replica.tensor.join import Join
from paceline.replica.tensor.layouts import SHARED, WHOLE, Layout, Owned, Split
from paceline.replica.tensor.movable import belongs, draws, extent, inputs, result
from paceline.replica.tensor.stand_in import StandIn

_STANDS_FOR = "stands_for"
"""Where the node of a stand-in has those of the trunk that its branch is computed from."""


def on_one_shard(call: Call, placed: Placed) -> Way:
    """An operator of a branch, done by the branch's owner."""
    index = placed.branch(call.node)
    assert index is not None, "it is in a branch"
    mine, owner = placed.region.branches[index], placed.owners[index]
    takes = tuple(owner if belongs(value, mine) else everyones(value) for value in call.takes)
    return Way(takes, tuple(owner for _ in call.gives), BRANCH, _Alone(owner, takes), placed.share)


@final
class _Alone:
    """Writes it: the operator itself on its owner, a stand-in elsewhere."""

    def __init__(self, owner: Owned, takes: Sequence[Layout]) -> None:
        self._owner, self._takes = owner, takes

    def __call__(self, writer: Writer, call: Call) -> Node:
        if writer.shards.rank == self._owner.shard or not call.gives:
            return writer.copy(call)
        if draws(call):
            writer.copy(call)
        return self._stand_in(writer, call)

    def _stand_in(self, writer: Writer, call: Call) -> Node:
        given = [
            writer.new(value.node)
            for value, layout in zip(call.takes, self._takes, strict=True)
            if value.differentiable and not (value.parameter is not None and layout == self._owner)
        ]
        trunk = tuple(dict.fromkeys(each for node in given for each in node.meta.get(_STANDS_FOR, (node,))))
        size, placeholders = extent(call), inputs(call.node)
        wanted = (writer.new(placeholders[index]) for index in size.inputs)
        module = StandIn(size, result(call), differentiable=call.gives[0].differentiable)
        made = writer.module(module, *wanted, *trunk)
        made.meta[_STANDS_FOR] = trunk
        return made


def is_stand_in(node: Node) -> bool:
    """Of the graph of a shard: whether it can be left out where nobody takes it."""
    return _STANDS_FOR in node.meta


def joined(call: Call, placed: Placed) -> Iterator[Way]:
    """A join that puts its branches' tensors one after the other.

    Each shard sends its own, and has the whole; or keeps them as its part, where they are next to each other. Other
    joins have the ways of their rules: a sum is one of terms of which each shard has its own.
    """
    if call.target is not torch.ops.aten.cat.default or call.repeats:
        return
    branches = [placed.branch(value.node) for value in call.takes]
    owners = [None if index is None else placed.owners[index] for index in branches]
    if not any(owners):
        return
    (made,) = call.gives
    dim = call.argument(1, "dim", 0) % made.dims
    part = _kept(owners, [value.shape[dim] for value in call.takes], dim - made.dims, call.shards)
    if part is not None:
        yield Way(tuple(owner for owner in owners if owner), (part,), "join", _part(owners, dim), part.share)
    sent = sum(v.nbytes for v, owner in zip(call.takes, owners, strict=True) if owner) * (call.shards - 1) / call.shards
    for layout in (WHOLE, SHARED) if made.differentiable else (WHOLE,):
        everyones_ = layout if made.differentiable else WHOLE
        takes = tuple(_or_whole(owner or everyones_, v) for owner, v in zip(owners, call.takes, strict=True))
        rounds = 2 if layout == SHARED else 1
        yield Way(takes, (layout,), "join", _join(owners, dim, shared=layout == SHARED), 1.0, rounds * sent, rounds)


def _kept(owners: Sequence[Owned | None], lengths: Sequence[int], dim: int, shards: int) -> Split | None:
    """How the result is divided where each shard keeps its own; None: they are apart, or some have none.

    >>> _kept([Owned(0), Owned(0), Owned(1)], [2, 3, 4], -1, 2)
    Split(dim=-1, sizes=(5, 4), outer=1)
    """
    shard_of = [owner.shard for owner in owners if owner is not None]
    if len(shard_of) < len(owners) or shard_of != sorted(shard_of) or set(shard_of) != set(range(shards)):
        return None
    each = list(zip(shard_of, lengths, strict=True))
    return Split(dim, tuple(sum(length for owner, length in each if owner == shard) for shard in range(shards)))


def _part(owners: Sequence[Owned | None], dim: int) -> Any:
    def write(writer: Writer, call: Call) -> Node:
        pairs = zip(owners, call.takes, strict=True)
        own = [writer.new(value.node) for owner, value in pairs if owner == Owned(writer.shards.rank)]
        return writer.call(torch.ops.aten.cat.default, own, dim)

    return write


def _or_whole(layout: Layout, value: Value) -> Layout:
    return layout if value.differentiable or isinstance(layout, Owned) else WHOLE


def _join(owners: Sequence[Owned | None], dim: int, *, shared: bool) -> Any:
    def write(writer: Writer, call: Call) -> Node:
        of = [None if owner is None else owner.shard for owner in owners]
        module = Join(writer.shards, call.node.name, of, dim, shared=shared)
        return writer.module(module, *(writer.new(value.node) for value in call.takes))

    return write
