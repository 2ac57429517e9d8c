"""Products of two tensors that may both be computed, as of queries and keys, of weights and values."""

from collections.abc import Iterator

from paceline.replica.tensor.base import Available, OpCall, OpStrategy, aten, op_rule, parameter_shardings, shards_among
from paceline.replica.tensor.placements import PARTIAL
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
    of_x, of_y = (
        dict.fromkeys((*(parameter_shardings(call, value) if value.dims == 2 else ()), *shards_among(present)))
        for value, present in zip(call.inputs, available, strict=True)
    )
    rows = (split.at(-1) for split in of_y if (y.dims, split.dim) == (2, -2))
    for split in dict.fromkeys((*rows, *of_x)):
        if split.dim == -2:
            yield OpStrategy((split, y.replicated), (split,), "samples", share=split.share)
        elif split.dim == -1 and y.shape[-2] == split.length:
            yield OpStrategy((split, split.at(-2)), (PARTIAL,), "row", share=split.share)
    for split in of_y:
        if split.dim == -1:
            yield OpStrategy((x.replicated, split), (split,), "column", share=split.share)
