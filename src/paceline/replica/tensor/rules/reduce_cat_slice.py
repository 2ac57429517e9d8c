"""Operators that work along one or some dims, and treat what lies along the others apart."""

from collections.abc import Iterator
from typing import ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import (
    Available,
    Emit,
    GraphEmitter,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    replicated,
    shards_among,
)
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


@final
class Reduction(OpRule):
    """A sum or mean: over the divided dim every shard has a term of it, over others S_p is a part of what is left.

    Of terms each shard sums its own.
    """

    targets: ClassVar = (aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,), (made,) = call.inputs, call.outputs
        dims = value.dims
        over = call.argument(1, "dim") if "dim" in call.target._overloadname else None
        reduced = {dim % dims for dim in over} if over else set(range(dims))
        keeps = bool(call.argument(2, "keepdim", False)) if over else False
        for split in shards_among(available[0]):
            where = split.dim % dims
            if where in reduced:
                yield OpStrategy((split,), (PARTIAL,), emit=_term(call, split), share=split.share)
                continue
            left = where if keeps else where - sum(dim < where for dim in reduced)
            yield OpStrategy((split,), (split.at(left - made.dims),), share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL,), (PARTIAL,))


def _term(call: OpCall, split: Shard) -> Emit | None:
    """A mean over parts: of this shard's elements, weighed by how many of all they are."""
    if call.target not in (aten.mean.dim, aten.mean.default):
        return None

    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        share = split.sizes[emitter.shards.rank] / split.block_size
        return emitter.call(aten.mul.Tensor, emitter.same(call), share)

    return emit


@final
class Concatenation(OpRule):
    """Along another dim than the divided one: S_p is that part of each; what has no elements is everyone's.

    Along the divided one, where all are divided in blocks of the same length and shares: S_p is those parts, and the
    result has the blocks of all of them.
    """

    targets: ClassVar = (aten.cat.default,)
    converts, repeats = False, True

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (made,) = call.outputs
        dim = call.argument(1, "dim", 0) % made.dims
        empty = [value.shape == (0,) for value in call.inputs]
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            if split.dim % made.dims != dim:
                yield OpStrategy(_filled(call, split), (split,), share=split.share)
            elif blocks := _blocks(call, available, split):
                joined = Shard(split.dim, split.sizes, made.shape[dim] // split.block_size)
                yield OpStrategy(blocks, (joined,), share=split.share)
        if all(PARTIAL in each or void for each, void in zip(available, empty, strict=True)):
            yield OpStrategy(_filled(call, PARTIAL), (PARTIAL,))


def _blocks(call: OpCall, available: Available, split: Shard) -> tuple[Placement, ...]:
    """How each tensor lies in blocks as this split has them; none where one can't be had so."""
    found: list[Placement] = []
    for value, each in zip(call.inputs, available, strict=True):
        own = Shard(split.dim, split.sizes, value.shape[split.dim] // split.block_size if value.shape != (0,) else 0)
        if value.shape != (0,) and own not in each:
            return ()
        found.append(own if own.blocks else replicated(value))
    return tuple(found)


def _filled(call: OpCall, layout: Placement) -> tuple[Placement, ...]:
    return tuple(replicated(value) if value.shape == (0,) else layout for value in call.inputs)


@final
class Slice(OpRule):
    """Along another dim than the divided one, or all of a dim: S_p is the part that was divided."""

    targets: ClassVar = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,), (made,) = call.inputs, call.outputs
        dim = call.argument(1, "dim", 0) % value.dims
        gone = call.target is aten.select.int
        for split in shards_among(available[0]):
            where = split.dim % value.dims
            if where == dim:
                if not gone and made.shape == value.shape and call.argument(3, "end") == 2**63 - 1:
                    yield OpStrategy((split,), (split,), share=split.share)
                continue
            left = where - (gone and dim < where)
            yield OpStrategy((split,), (split.at(left - made.dims),), share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL,), (PARTIAL,))


for _rule in (Reduction(), Concatenation(), Slice()):
    register(_rule)
