"""Operators that mix elements along some dims, and treat those along the other dims independently."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch

from paceline.replica.tensor.base import Available, OpCall, OpRule, OpStrategy, register, shards_among
from paceline.replica.tensor.placements import PARTIAL, Shard

aten = torch.ops.aten


def _named(place: int, name: str, default: Any = None) -> Callable[[OpCall], set[int]]:
    """Return what computes the dims that an argument names; all, if it names none."""

    def mixed_dims(call: OpCall) -> set[int]:
        dims, value = call.inputs[0].dims, call.argument(place, name, default)
        listed = value if isinstance(value, (list, tuple)) else [value]
        return {dim % dims for dim in listed} if listed and None not in listed else set(range(dims))

    return mixed_dims


def _last_two(call: OpCall) -> set[int]:
    return {call.inputs[0].dims - 2, call.inputs[0].dims - 1}


_LINEAR: Mapping[Any, Callable[[OpCall], set[int]]] = {
    aten.roll.default: _named(2, "dims", ()),
    aten.flip.default: _named(1, "dims"),
    aten.cumsum.default: _named(1, "dim"),
    aten.triu.default: _last_two,
    aten.tril.default: _last_two,
}
"""Operator that is linear, so that terms of a sum stay terms -> the dims that it mixes."""

_OTHERS: Mapping[Any, Callable[[OpCall], set[int]]] = {
    aten.cumprod.default: _named(1, "dim"),
    aten.glu.default: _named(1, "dim", -1),
    aten.sort.default: _named(1, "dim", -1),
    aten.topk.default: _named(2, "dim", -1),
}


@final
class Batched(OpRule):
    """f along some dims, whose results have as many: S_p is a part along another dim."""

    targets: ClassVar = (*_LINEAR, *_OTHERS)
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len(call.inputs) != 1:  # a number that is a tensor is among its arguments
            return
        mixed = (_LINEAR.get(call.target) or _OTHERS[call.target])(call)
        for split in shards_among(available[0]):
            if split.dim % call.inputs[0].dims not in mixed:
                yield OpStrategy((split,), tuple(split for _ in call.outputs), share=split.share)
        if call.target in _LINEAR:
            yield from call.partial_strategies(available)


@final
class Repeat(OpRule):
    """x, again and again: S_p is the part that was sharded, in as many more blocks as it is repeated."""

    targets: ClassVar = (aten.repeat.default,)
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        times = call.argument(1, "repeats")[call.outputs[0].dims - call.inputs[0].dims :]
        for split in shards_among(available[0]):
            count = times[split.dim]
            if isinstance(count, int):
                yield OpStrategy((split,), (Shard(split.dim, split.sizes, split.blocks * count),), share=split.share)
        yield from call.partial_strategies(available)


@final
class Stack(OpRule):
    """Tensors along a dim of their own: S_p is the same part of each."""

    targets: ClassVar = (aten.stack.default,)
    redistributes, handles_repeats = False, True

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (output,) = call.outputs
        dim = call.argument(1, "dim", 0) % output.dims
        for split in shards_among(*available):
            place = split.dim % (output.dims - 1)
            stacked = split.at(place + (dim <= place) - output.dims)
            yield OpStrategy(tuple(split for _ in call.inputs), (stacked,), share=split.share)
        if all(PARTIAL in each for each in available):
            yield OpStrategy(tuple(PARTIAL for _ in call.inputs), (PARTIAL,))


@final
class Indexing(OpRule):
    """Rows that indices name: S_p is a part along another dim, columns of a table where it is a parameter."""

    targets: ClassVar = (aten.index_select.default, aten.index.Tensor)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
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


@final
class Gather(OpRule):
    """y[i, j] = x[i, index[i, j]]: S_p is the same part of x and of index, along another dim than that of j."""

    targets: ClassVar = (aten.gather.default,)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        value, index = call.inputs
        dim = call.argument(1, "dim") % max(value.dims, 1)
        for split in shards_among(*available):
            same = split.length == value.shape[split.dim] == index.shape[split.dim]
            if same and split.dim % value.dims != dim:
                yield OpStrategy((split, split), (split,), share=split.share)
        yield from call.partial_strategies(available)


@final
class PReLU(OpRule):
    """y = max(0, x) + w·min(0, x), with a w for each channel or for all: S_p is a part of x, and of w by channels."""

    targets: ClassVar = (aten.prelu.default,)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, weight = call.inputs
        channels = min(1, x.dims - 1) - x.dims
        for split in shards_among(available[0]):
            own = split.dim == channels and torch.Size(weight.shape).numel() > 1
            yield OpStrategy((split, split.at(-1) if own else weight.replicated), (split,), share=split.share)


register(Batched(), Repeat(), Stack(), Indexing(), Gather(), PReLU())
