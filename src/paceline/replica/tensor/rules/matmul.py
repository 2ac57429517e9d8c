"""Products of two tensors that may both be computed, as of queries and keys, of weights and values."""

from collections.abc import Iterator
from typing import ClassVar, final

import torch

from paceline.replica.tensor.base import (
    Available,
    GraphTensor,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    replicated,
    shards_among,
)
from paceline.replica.tensor.placements import PARTIAL, Shard
from paceline.replica.tensor.rules.elementwise import inputs_along

aten = torch.ops.aten


@final
class Product(OpRule):
    """z = x·y over the last two dims.

    heads: of a dim before them S_p = a part of both. Others are as in a linear layer: column, S_p = columns of y; row,
    S_p = rows of y, and z is the sum; samples, S_p = everything of y, where that is a parameter.
    """

    targets: ClassVar = (aten.matmul.default, aten.bmm.default, aten.mm.default, aten.baddbmm.default)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len(call.inputs) != 2 or min(value.dims for value in call.inputs) < 2:
            return
        x, y = call.inputs
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            if split.dim < -2:
                inputs = inputs_along(call, split)
                if inputs is not None:
                    yield OpStrategy(inputs, (split,), "heads", share=split.share)
        for split in dict.fromkeys((*(s.at(-1) for s in _of_weight(call, y, -2)), *shards_among(available[0]))):
            if split.dim == -2:
                yield OpStrategy((split, replicated(y)), (split,), "samples", share=split.share)
            elif split.dim == -1 and y.shape[-2] == split.length:
                yield OpStrategy((split, split.at(-2)), (PARTIAL,), "row", share=split.share)
        for split in dict.fromkeys((*_of_weight(call, y, -1), *shards_among(available[1]))):
            if split.dim == -1:
                yield OpStrategy((replicated(x), split), (split,), "column", share=split.share)


def _of_weight(call: OpCall, y: GraphTensor, dim: int) -> Iterator[Shard]:
    """A parameter is divided as the product likes it."""
    if y.parameter is not None and y.dims == 2:
        yield from call.shardings(y.shape[dim], dim)


register(Product())
