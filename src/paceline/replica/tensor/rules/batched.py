"""Operators that mix elements along some dims, and treat those along the other dims independently."""

from collections.abc import Iterator

import torch

from paceline.replica.tensor.base import Available, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, Shard

_TRIANGLES = (aten.triu.default, aten.tril.default)
# Operators of which terms of a sum stay terms.
_LINEAR = (aten.roll.default, aten.flip.default, aten.cumsum.default, *_TRIANGLES)


@op_rule(
    *_LINEAR, aten.cumprod.default, aten.glu.default, aten.sort.default, aten.topk.default, redistributes=False
)  # fmt: skip
def batched(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """f along some dims, whose results have as many: S_p is a part along another dim."""
    if len(call.inputs) != 1:  # a number that is a tensor is among its arguments
        return
    dims = call.inputs[0].dims
    mixed = {dims - 2, dims - 1} if call.target in _TRIANGLES else call.dims_named("dim", "dims")
    for split in shards_among(available[0]):
        if split.dim % dims not in mixed:
            yield OpStrategy((split,), tuple(split for _ in call.outputs), share=split.share)
    if call.target in _LINEAR:
        yield from call.partial_strategies(available)


@op_rule(aten.repeat.default, redistributes=False)
def repeat(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """x, again and again: S_p is the part that was sharded, in as many more blocks as it is repeated."""
    times = call.argument(1, "repeats")[call.outputs[0].dims - call.inputs[0].dims :]
    for split in shards_among(available[0]):
        count = times[split.dim]
        if isinstance(count, int):
            yield OpStrategy((split,), (Shard(split.dim, split.sizes, split.blocks * count),), share=split.share)
    yield from call.partial_strategies(available)


@op_rule(aten.stack.default, redistributes=False, handles_repeats=True)
def stack(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Tensors along a dim of their own: S_p is the same part of each."""
    (output,) = call.outputs
    dim = call.argument(1, "dim", 0) % output.dims
    for split in shards_among(*available):
        place = split.dim % (output.dims - 1)
        stacked = split.at(place + (dim <= place) - output.dims)
        yield OpStrategy(tuple(split for _ in call.inputs), (stacked,), share=split.share)
    if all(PARTIAL in each for each in available):
        yield OpStrategy(tuple(PARTIAL for _ in call.inputs), (PARTIAL,))


@op_rule(aten.index_select.default, aten.index.Tensor)
def indexing(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Rows that indices name: S_p is a part along another dim, columns of a table where it is a parameter."""
    value, *indices = call.inputs
    if any(index.differentiable or index.dtype not in (torch.int64, torch.int32) for index in indices):
        return
    if call.target is aten.index_select.default:
        first = last = call.argument(1, "dim") % value.dims
    else:
        places = [place for place, index in enumerate(call.argument(1, "indices")) if index is not None]
        if not places or places[-1] - places[0] != len(places) - 1:  # the dims are not next to each other
            return
        first, last = places[0], places[-1]
    columns = range(last + 1, value.dims) if value.parameter is not None else ()
    even = (split for dim in columns for split in call.shardings(value.shape[dim], dim - value.dims))
    for split in dict.fromkeys((*shards_among(available[0]), *even)):
        place = split.dim % value.dims
        if first <= place <= last or (value.parameter and place < first):
            continue
        output = split.at(place - call.outputs[0].dims) if place < first else split
        name = "column" if value.parameter else ""
        yield OpStrategy((split, *(value.replicated for value in indices)), (output,), name, share=split.share)
    yield from call.partial_strategies(available)


@op_rule(aten.gather.default)
def gather(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y[i, j] = x[i, index[i, j]]: S_p is the same part of x and of index, along another dim than that of j."""
    value, index = call.inputs
    dim = call.argument(1, "dim") % max(value.dims, 1)
    for split in shards_among(*available):
        same = split.length == value.shape[split.dim] == index.shape[split.dim]
        if same and split.dim % value.dims != dim:
            yield OpStrategy((split, split), (split,), share=split.share)
    yield from call.partial_strategies(available)


@op_rule(aten.prelu.default)
def prelu(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = max(0, x) + w·min(0, x), with a w for each channel or for all: S_p is a part of x, and of w by channels."""
    x, weight = call.inputs
    channels = min(1, x.dims - 1) - x.dims
    for split in shards_among(available[0]):
        own = split.dim == channels and torch.Size(weight.shape).numel() > 1
        yield OpStrategy((split, split.at(-1) if own else weight.replicated), (split,), share=split.share)
