"""Sums and means, concatenation and slices: along some dims, with the others independent."""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, final

import torch

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpRule, OpStrategy, register, shards_among
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


@final
class SumMean(OpRule):
    """A sum or mean: over the sharded dim every shard has a term of it, over others S_p is a part of what is left.

    Of terms each shard sums its own.
    """

    targets: ClassVar = (aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default)
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,), (output,) = call.inputs, call.outputs
        over = call.argument(1, "dim") if "dim" in call.target._overloadname else None
        reduced = {dim % value.dims for dim in over} if over else set(range(value.dims))
        keepdim = bool(call.argument(2, "keepdim", False)) if over else False
        for split in shards_among(available[0]):
            place = split.dim % value.dims
            if place in reduced:
                mean = call.target in (aten.mean.dim, aten.mean.default)
                emit = partial(GraphEmitter.weighed_mean, split=split) if mean else None
                yield OpStrategy((split,), (PARTIAL,), emit=emit, share=split.share)
                continue
            left = place if keepdim else place - sum(dim < place for dim in reduced)
            yield OpStrategy((split,), (split.at(left - output.dims),), share=split.share)
        yield from call.partial_strategies(available)


@final
class Concatenation(OpRule):
    """Along another dim than the sharded one: S_p is that part of each; what has no elements is replicated.

    Along the sharded one, where all are sharded in blocks of the same length and shares: S_p is those parts, and the
    result has the blocks of all of them.
    """

    targets: ClassVar = (aten.cat.default,)
    redistributes, handles_repeats = False, True

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (output,) = call.outputs
        dim = call.argument(1, "dim", 0) % output.dims
        empty = [value.shape == (0,) for value in call.inputs]
        pairs = list(zip(call.inputs, empty, strict=True))
        for split in shards_among(*available):
            if split.dim % output.dims != dim:
                inputs: tuple[Placement, ...] = tuple(value.replicated if void else split for value, void in pairs)
                yield OpStrategy(inputs, (split,), share=split.share)
                continue
            blocks = [0 if void else value.shape[split.dim] // split.block_size for value, void in pairs]
            shards = [Shard(split.dim, split.sizes, count) for count in blocks]
            if all(void or shard in each for shard, void, each in zip(shards, empty, available, strict=True)):
                inputs = tuple(
                    shard if shard.blocks else value.replicated
                    for value, shard in zip(call.inputs, shards, strict=True)
                )
                joined = Shard(split.dim, split.sizes, output.shape[dim] // split.block_size)
                yield OpStrategy(inputs, (joined,), share=split.share)
        if all(PARTIAL in each or void for each, void in zip(available, empty, strict=True)):
            yield OpStrategy(tuple(value.replicated if void else PARTIAL for value, void in pairs), (PARTIAL,))


@final
class Slice(OpRule):
    """Along another dim than the sharded one, or all of a dim: S_p is the part that was sharded."""

    targets: ClassVar = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,), (output,) = call.inputs, call.outputs
        dim = call.argument(1, "dim", 0) % value.dims
        drops_dim = call.target is aten.select.int
        for split in shards_among(available[0]):
            place = split.dim % value.dims
            if place == dim:
                whole = output.shape == value.shape and call.argument(3, "end") == 2**63 - 1
                if whole and not drops_dim:
                    yield OpStrategy((split,), (split,), share=split.share)
                continue
            left = place - (drops_dim and dim < place)
            yield OpStrategy((split,), (split.at(left - output.dims),), share=split.share)
        yield from call.partial_strategies(available)


register(SumMean(), Concatenation(), Slice())
