"""Sums and means, concatenation and slices: along some dims, with the others independent."""

from collections.abc import Iterator
from functools import partial

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard


@op_rule(aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default, redistributes=False)
def sum_mean(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """A sum or mean: over the sharded dim every shard has a term of it, over others S_p is a part of what is left.

    Of terms each shard sums its own.
    """
    dims, reduced = call.inputs[0].dims, call.dims_named("dim")
    for split in shards_among(available[0]):
        if split.dim % dims in reduced:
            mean = call.op_name == "mean"
            emit = partial(GraphEmitter.weighed_mean, split=split) if mean else None
            yield OpStrategy((split,), (PARTIAL,), emit=emit, share=split.share)
        else:
            output = split.without(() if call.argument_named("keepdim") else reduced, dims)
            yield OpStrategy((split,), (output,), share=split.share)
    yield from call.partial_strategies(available)


@op_rule(aten.cat.default, redistributes=False, handles_repeats=True)
def concatenation(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Along another dim than the sharded one: S_p is that part of each; what has no elements is replicated.

    Along the sharded one, where all are sharded in blocks of the same length and shares: S_p is those parts, and the
    result has the blocks of all of them.
    """
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
                shard if shard.blocks else value.replicated for value, shard in zip(call.inputs, shards, strict=True)
            )
            joined = Shard(split.dim, split.sizes, output.shape[dim] // split.block_size)
            yield OpStrategy(inputs, (joined,), share=split.share)
    if all(PARTIAL in each or void for each, void in zip(available, empty, strict=True)):
        yield OpStrategy(tuple(value.replicated if void else PARTIAL for value, void in pairs), (PARTIAL,))


@op_rule(aten.slice.Tensor, aten.select.int, aten.narrow.default, redistributes=False)
def slice_dim(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Along another dim than the sharded one, or all of a dim: S_p is the part that was sharded."""
    (value,), (output,) = call.inputs, call.outputs
    dim = call.argument(1, "dim", 0) % value.dims
    removed = {dim} if call.target is aten.select.int else set[int]()
    whole = not removed and output.shape == value.shape and call.argument(3, "end") == 2**63 - 1
    for split in shards_among(available[0]):
        if whole or split.dim % value.dims != dim:
            yield OpStrategy((split,), (split.without(removed, value.dims),), share=split.share)
    yield from call.partial_strategies(available)
