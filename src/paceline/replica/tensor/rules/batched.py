"""Operators that mix elements along some dims, and treat what lies along the others apart."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch

from paceline.replica.tensor.base import Available, OpCall, OpRule, OpStrategy, register, replicated, shards_among
from paceline.replica.tensor.placements import PARTIAL, Shard

aten = torch.ops.aten


def _named(place: int, name: str, default: Any = None) -> Callable[[OpCall], set[int]]:
    """The dims that an argument names; all, where it names none."""

    def mixed(call: OpCall) -> set[int]:
        dims, asked = call.inputs[0].dims, call.argument(place, name, default)
        listed = asked if isinstance(asked, (list, tuple)) else [asked]
        return {dim % dims for dim in listed} if listed and None not in listed else set(range(dims))

    return mixed


def _last_two(call: OpCall) -> set[int]:
    return {call.inputs[0].dims - 2, call.inputs[0].dims - 1}


_LINEAR: Mapping[Any, Callable[[OpCall], set[int]]] = {
    aten.roll.default: _named(2, "dims", ()),
    aten.flip.default: _named(1, "dims"),
    aten.cumsum.default: _named(1, "dim"),
    aten.triu.default: _last_two,
    aten.tril.default: _last_two,
}
"""Operator that makes of a sum the sum of what it makes of the terms -> the dims that it mixes."""

_OTHERS: Mapping[Any, Callable[[OpCall], set[int]]] = {
    aten.cumprod.default: _named(1, "dim"),
    aten.glu.default: _named(1, "dim", -1),
    aten.sort.default: _named(1, "dim", -1),
    aten.topk.default: _named(2, "dim", -1),
}


@final
class Apart(OpRule):
    """f along some dims, whose results have as many: S_p is a part along another dim."""

    targets: ClassVar = (*_LINEAR, *_OTHERS)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len(call.inputs) != 1:  # a number that is a tensor is among its arguments
            return
        mixed = (_LINEAR.get(call.target) or _OTHERS[call.target])(call)
        for split in shards_among(available[0]):
            if split.dim % call.inputs[0].dims not in mixed:
                yield OpStrategy((split,), tuple(split for _ in call.outputs), share=split.share)
        if PARTIAL in available[0] and call.target in _LINEAR:
            yield OpStrategy((PARTIAL,), (PARTIAL,))


@final
class Repeat(OpRule):
    """x, again and again: S_p is the part that was divided, in as many more blocks as it is repeated."""

    targets: ClassVar = (aten.repeat.default,)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        times = call.argument(1, "repeats")[call.outputs[0].dims - call.inputs[0].dims :]
        for split in shards_among(available[0]):
            again = times[split.dim]
            if isinstance(again, int):
                yield OpStrategy((split,), (Shard(split.dim, split.sizes, split.blocks * again),), share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL,), (PARTIAL,))


@final
class Stack(OpRule):
    """Tensors along a dim of their own: S_p is the same part of each."""

    targets: ClassVar = (aten.stack.default,)
    converts, repeats = False, True

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (made,) = call.outputs
        dim = call.argument(1, "dim", 0) % made.dims
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            where = split.dim % (made.dims - 1)
            stacked = split.at(where + (dim <= where) - made.dims)
            yield OpStrategy(tuple(split for _ in call.inputs), (stacked,), share=split.share)
        if all(PARTIAL in each for each in available):
            yield OpStrategy(tuple(PARTIAL for _ in call.inputs), (PARTIAL,))


@final
class Picked(OpRule):
    """Rows that indices name: S_p is a part along another dim, columns of a table where it is a parameter."""

    targets: ClassVar = (aten.index_select.default, aten.index.Tensor)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        value, *indices = call.inputs
        if any(index.differentiable or not _counts(index.dtype) for index in indices):
            return
        first, last = _picked(call)
        if first > last:
            return
        for split in dict.fromkeys((*shards_among(available[0]), *_columns(call, last + 1))):
            where = split.dim % value.dims
            if first <= where <= last or (value.parameter and where < first):
                continue
            made = split.at(where - call.outputs[0].dims) if where < first else split
            yield OpStrategy(
                (split, *map(replicated, indices)), (made,), "column" * bool(value.parameter), share=split.share
            )
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL, *map(replicated, indices)), (PARTIAL,))


def _counts(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.int32)


def _picked(call: OpCall) -> tuple[int, int]:
    """First and last of the dims that indices replace; they lie side by side, or it is an empty range."""
    if call.target is aten.index_select.default:
        dim = call.argument(1, "dim") % call.inputs[0].dims
        return dim, dim
    places = [place for place, index in enumerate(call.argument(1, "indices")) if index is not None]
    beside = places and places[-1] - places[0] == len(places) - 1
    return (places[0], places[-1]) if beside else (1, 0)


def _columns(call: OpCall, first: int) -> Iterator[Shard]:
    value = call.inputs[0]
    if value.parameter is not None:
        for dim in range(first, value.dims):
            yield from call.shardings(value.shape[dim], dim - value.dims)


@final
class Gathered(OpRule):
    """y[i, j] = x[i, index[i, j]]: S_p is the same part of x and of index, along another dim than that of j."""

    targets: ClassVar = (aten.gather.default,)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        value, index = call.inputs
        dim = call.argument(1, "dim") % max(value.dims, 1)
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            alike = split.length == value.shape[split.dim] == index.shape[split.dim]
            if alike and split.dim % value.dims != dim:
                yield OpStrategy((split, split), (split,), share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL, replicated(index)), (PARTIAL,))


@final
class PReLU(OpRule):
    """y = max(0, x) + w·min(0, x), with a w for each channel or for all: S_p is a part of x, and of w by channels."""

    targets: ClassVar = (aten.prelu.default,)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, weight = call.inputs
        channels = min(1, x.dims - 1) - x.dims
        for split in shards_among(available[0]):
            own = split.dim == channels and torch.Size(weight.shape).numel() > 1
            yield OpStrategy((split, split.at(-1) if own else replicated(weight)), (split,), share=split.share)


for _rule in (Apart(), Repeat(), Stack(), Picked(), Gathered(), PReLU()):
    register(_rule)
