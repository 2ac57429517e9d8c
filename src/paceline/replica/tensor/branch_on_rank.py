"""Branches that one rank computes alone: its operators, what the other ranks hold in their place, and the join.

Operators of a branch that one shard works on, and what the other shards have in their place.

The owner runs the operator itself. The others run nothing: where the branch ends they have a *stand-in*, a tensor of
the right shape that nobody reads, through which autograd finds its way back to the trunk on all shards alike. Only what
draws random numbers they run as well, so that all go on from the same ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import GraphEmitter, GraphTensor, OpCall, OpStrategy, replicated
from paceline.replica.tensor.branches import (
    BRANCH,
    PlacedRegion,
    StandIn,
    belongs_to,
    captured_result,
    draws_random,
    model_inputs,
    result_extent,
)
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.redistribute import with_memory_order
from paceline.replica.tensor.tp_group import TPCollectives


@final
class Join(nn.Module):
    """forward(*tensors) -> torch.cat(tensors, dim) on each shard; those that are on another one only have their shape.

    Args:
        shards: who join.
        name: of the result, for those who wait.
        owners: of each tensor; None: all shards have it.
        dim: along which.
        shared: whether each shard has a term of the result's gradient, rather than all of it.
    """

    def __init__(
        self, shards: TPCollectives, name: str, owners: Sequence[int | None], dim: int, *, shared: bool
    ) -> None:
        super().__init__()
        self.shards, self.name, self.shared = shards, name, shared
        self._owners, self._dim = list(owners), dim

    def forward(self, *tensors: Tensor) -> Tensor:
        """The whole."""
        made: Tensor = _Joined.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return made

    def there(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of values."""
        mine = self._of(tensors, self.shards.rank)
        shapes = [self._shape(tensors, shard) for shard in range(self.shards.count)]
        own = torch.cat(mine, self._dim) if mine else tensors[0].new_empty(shapes[self.shards.rank])
        parts = self.shards.all_gather(own, shapes, self.name)
        pieces = [self._pieces(part, tensors, shard) for shard, part in enumerate(parts)]
        found = [tensors[i] if owner is None else pieces[owner].pop(0) for i, owner in enumerate(self._owners)]
        return with_memory_order(torch.cat(found, self._dim), tensors[0])

    def back(self, gradient: Tensor, lengths: Sequence[int]) -> list[Tensor | None]:
        """Of a gradient; None for what is on another shard."""
        rank, count = self.shards.rank, self.shards.count
        terms = list(torch.split(gradient, list(lengths), self._dim))
        if self.shared:
            parts = [self._cat(terms, gradient, shard) for shard in range(count)]
            own = self.shards.reduce_scatter(parts, f"the gradient of {self.name}")
            mine = self._pieces(own, terms, rank)
            terms = [mine.pop(0) if owner == rank else term for owner, term in zip(self._owners, terms, strict=True)]
        return [t if owner in (None, rank) else None for owner, t in zip(self._owners, terms, strict=True)]

    def extra_repr(self) -> str:
        return f"{self.name}, on shards {', '.join(map(str, self._owners))}"

    def _of(self, tensors: Sequence[Tensor], shard: int) -> list[Tensor]:
        """Those that a shard has alone."""
        return [tensor for tensor, owner in zip(tensors, self._owners, strict=True) if owner == shard]

    def _shape(self, tensors: Sequence[Tensor], shard: int) -> tuple[int, ...]:
        """Of all that a shard has."""
        shape = list(tensors[0].shape)
        shape[self._dim] = sum(tensor.shape[self._dim] for tensor in self._of(tensors, shard))
        return tuple(shape)

    def _pieces(self, part: Tensor, tensors: Sequence[Tensor], shard: int) -> list[Tensor]:
        lengths = [tensor.shape[self._dim] for tensor in self._of(tensors, shard)]
        return list(torch.split(part, lengths, self._dim)) if lengths else []

    def _cat(self, terms: Sequence[Tensor], whole: Tensor, shard: int) -> Tensor:
        theirs = self._of(terms, shard)
        return torch.cat(theirs, self._dim) if theirs else whole.narrow(self._dim, 0, 0)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, join: Join, *tensors: Tensor) -> Tensor:
        ctx.join, ctx.lengths = join, [tensor.shape[join._dim] for tensor in tensors]
        return join.there(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.join.back(gradients[0], ctx.lengths)


_STANDS_FOR = "stands_for"
"""Where the node of a stand-in has those of the trunk that its branch is computed from."""


def branch_strategy(call: OpCall, placed: PlacedRegion) -> OpStrategy:
    """An operator of a branch, done by the branch's owner."""
    index = placed.branch(call.node)
    assert index is not None, "it is in a branch"
    mine, owner = placed.region.branches[index], placed.owners[index]
    inputs = tuple(owner if belongs_to(value, mine) else replicated(value) for value in call.inputs)
    return OpStrategy(inputs, tuple(owner for _ in call.outputs), BRANCH, _Alone(owner, inputs), placed.share)


@final
class _Alone:
    """Writes it: the operator itself on its owner, a stand-in elsewhere."""

    def __init__(self, owner: OnRank, inputs: Sequence[Placement]) -> None:
        self._owner, self._takes = owner, inputs

    def __call__(self, emitter: GraphEmitter, call: OpCall) -> Node:
        if emitter.shards.rank == self._owner.shard or not call.outputs:
            return emitter.copy(call)
        if draws_random(call):
            emitter.copy(call)
        return self._stand_in(emitter, call)

    def _stand_in(self, emitter: GraphEmitter, call: OpCall) -> Node:
        given = [
            emitter.local(value.node)
            for value, layout in zip(call.inputs, self._takes, strict=True)
            if value.differentiable and not (value.parameter is not None and layout == self._owner)
        ]
        trunk = tuple(dict.fromkeys(each for node in given for each in node.meta.get(_STANDS_FOR, (node,))))
        size, placeholders = result_extent(call), model_inputs(call.node)
        wanted = (emitter.local(placeholders[index]) for index in size.inputs)
        module = StandIn(size, captured_result(call), differentiable=call.outputs[0].differentiable)
        made = emitter.module(module, *wanted, *trunk)
        made.meta[_STANDS_FOR] = trunk
        return made


def is_stand_in(node: Node) -> bool:
    """Of the graph of a shard: whether it can be left out where nobody takes it."""
    return _STANDS_FOR in node.meta


def join_strategies(call: OpCall, placed: PlacedRegion) -> Iterator[OpStrategy]:
    """A join that puts its branches' tensors one after the other.

    Each shard sends its own, and has the whole; or keeps them as its part, where they are next to each other. Other
    joins have the ways of their rules: a sum is one of terms of which each shard has its own.
    """
    if call.target is not torch.ops.aten.cat.default or call.repeats:
        return
    branches = [placed.branch(value.node) for value in call.inputs]
    owners = [None if index is None else placed.owners[index] for index in branches]
    if not any(owners):
        return
    (made,) = call.outputs
    dim = call.argument(1, "dim", 0) % made.dims
    part = _kept(owners, [value.shape[dim] for value in call.inputs], dim - made.dims, call.shards)
    if part is not None:
        yield OpStrategy(tuple(owner for owner in owners if owner), (part,), "join", _part(owners, dim), part.share)
    sent = (
        sum(v.nbytes for v, owner in zip(call.inputs, owners, strict=True) if owner) * (call.shards - 1) / call.shards
    )
    for layout in (REPLICATE, PARTIAL_GRAD) if made.differentiable else (REPLICATE,):
        everyones_ = layout if made.differentiable else REPLICATE
        inputs = tuple(_or_whole(owner or everyones_, v) for owner, v in zip(owners, call.inputs, strict=True))
        rounds = 2 if layout == PARTIAL_GRAD else 1
        yield OpStrategy(
            inputs, (layout,), "join", _join(owners, dim, shared=layout == PARTIAL_GRAD), 1.0, rounds * sent, rounds
        )


def _kept(owners: Sequence[OnRank | None], lengths: Sequence[int], dim: int, shards: int) -> Shard | None:
    """How the result is divided where each shard keeps its own; None: they are apart, or some have none.

    >>> _kept([OnRank(0), OnRank(0), OnRank(1)], [2, 3, 4], -1, 2)
    Shard(dim=-1, sizes=(5, 4), blocks=1)
    """
    shard_of = [owner.shard for owner in owners if owner is not None]
    if len(shard_of) < len(owners) or shard_of != sorted(shard_of) or set(shard_of) != set(range(shards)):
        return None
    each = list(zip(shard_of, lengths, strict=True))
    return Shard(dim, tuple(sum(length for owner, length in each if owner == shard) for shard in range(shards)))


def _part(owners: Sequence[OnRank | None], dim: int) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        pairs = zip(owners, call.inputs, strict=True)
        own = [emitter.local(value.node) for owner, value in pairs if owner == OnRank(emitter.shards.rank)]
        return emitter.call(torch.ops.aten.cat.default, own, dim)

    return emit


def _or_whole(layout: Placement, value: GraphTensor) -> Placement:
    return layout if value.differentiable or isinstance(layout, OnRank) else REPLICATE


def _join(owners: Sequence[OnRank | None], dim: int, *, shared: bool) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        of = [None if owner is None else owner.shard for owner in owners]
        module = Join(emitter.shards, call.node.name, of, dim, shared=shared)
        return emitter.module(module, *(emitter.local(value.node) for value in call.inputs))

    return emit
