"""Products of two tensors that may both be computed, as of queries and keys, of weights and values."""

from collections.abc import Iterator

from paceline.replica.tensor.base import Available, OpCall, OpStrategy, aten, op_rule, parameter_shardings, shards_among
from paceline.replica.tensor.placements import PARTIAL, Shard
from paceline.replica.tensor.rules.elementwise import broadcast_inputs


@op_rule(aten.matmul.default, aten.bmm.default, aten.mm.default, aten.baddbmm.default)
def matmul(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """z = x·y over the last two dims.

    heads: of a dim before them S_p = a part of both. Others are as in a linear layer: column, S_p = columns of y; row,
    S_p = rows of y, and z is the sum; samples, S_p = everything of y, and rows of x, which may be a parameter too.
    """
    if len(call.inputs) != 2 or min(value.dims for value in call.inputs) < 2:
        return
    x, y = call.inputs
    for split in shards_among(*available):
        inputs = broadcast_inputs(call, split) if split.dim < -2 else None
        if inputs is not None:
            yield OpStrategy(inputs, (split,), "heads", share=split.share)
    # A parameter is sharded as the product takes it.
    own = parameter_shardings(call, x) if x.dims == 2 else ()
    rows, columns = [split for split in shards_among(available[1]) if (y.dims, split.dim) == (2, -2)], list[Shard]()
    if y.parameter is not None and y.dims == 2:
        rows, columns = (list(call.shardings(y.shape[dim], dim)) for dim in (-2, -1))
    for split in dict.fromkeys((*(row.at(-1) for row in rows), *shards_among(available[0]), *own)):
        if split.dim == -2:
            yield OpStrategy((split, y.replicated), (split,), "samples", share=split.share)
        elif split.dim == -1 and y.shape[-2] == split.length:
            yield OpStrategy((split, split.at(-2)), (PARTIAL,), "row", share=split.share)
    for split in dict.fromkeys((*columns, *shards_among(available[1]))):
        if split.dim == -1:
            yield OpStrategy((x.replicated, split), (split,), "column", share=split.share)
