"""Norms, variances, extremes and the like of a tensor along some dims, the divided one too."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import (
    Available,
    Emit,
    GraphEmitter,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    shards_among,
)
from paceline.replica.tensor.placements import REPLICATE, Shard
from paceline.replica.tensor.tp_group import TPCollectives

aten = torch.ops.aten


@final
class Statistic(OpRule):
    """One number of all elements along some dims.

    Along other dims than the divided one: S_p is a part of the numbers. Along the divided one: S_p is a part of the
    elements; each shard makes what it can of its own, and of that, which is as small as the result, all make the
    number. In backward a shard makes the gradient of its own elements from the number, and nothing more is sent but by
    extremes, to count those that share in one.
    """

    targets: ClassVar = (
        aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.var.default, aten.var.dim,
        aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction, aten.amax.default, aten.amin.default,
        aten.max.default, aten.min.default, aten.logsumexp.default, aten.max.dim, aten.min.dim, aten.argmax.default,
        aten.argmin.default, aten.prod.dim_int, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default,
        aten.all.dim, aten.all.dims, aten.median.dim, aten.mode.default,
    )  # fmt: skip
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,) = call.inputs
        over, keeps = _over(call), bool(_asked(call, "keepdim", False))
        kind = _KINDS.get(_name(call))
        for split in shards_among(available[0]):
            where = split.dim % value.dims
            if where not in over:
                left = where if keeps else where - sum(dim < where for dim in over)
                made = split.at(left - call.outputs[0].dims)
                yield OpStrategy((split,), tuple(made for _ in call.outputs), share=split.share)
            elif kind is not None and len(call.outputs) == 1 and _known(call):
                counts = kind.forward + kind.backward * value.differentiable
                sent_bytes = counts * 2 * (call.shards - 1) / call.shards * call.outputs[0].nbytes
                yield OpStrategy((split,), (REPLICATE,), "across", _emit(split), split.share, sent_bytes, counts)


def _name(call: OpCall) -> str:
    return str(call.target._schema.name).removeprefix("aten::")


def _asked(call: OpCall, name: str, default: Any) -> Any:
    """An argument that not all of these operators have, by its name."""
    names = [argument.name for argument in call.target._schema.arguments]
    return call.argument(names.index(name), name, default) if name in names else default


def _over(call: OpCall) -> set[int]:
    dims, asked = call.inputs[0].dims, _asked(call, "dim", None)
    listed = asked if isinstance(asked, (list, tuple)) else [] if asked is None else [asked]
    return {dim % dims for dim in listed} or set(range(dims))


def _known(call: OpCall) -> bool:
    """Whether it is one of those that are written here."""
    name, (value,), (made,) = _name(call), call.inputs, call.outputs
    if not value.dtype.is_floating_point or made.dtype != value.dtype or not isinstance(_order(call), (int, float)):
        return False
    return name not in ("norm", "linalg_vector_norm") or _order(call) in (1, 2)


def _order(call: OpCall) -> Any:
    found = _asked(call, "ord", _asked(call, "p", 2))
    return 2 if found is None else found


def _correction(call: OpCall) -> float:
    """What is taken off the number of elements that a variance is divided by."""
    found = _asked(call, "correction", None)
    return float(_asked(call, "unbiased", True) if found is None else found)


def _emit(split: Shard) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        dims, keeps = sorted(_over(call)), bool(_asked(call, "keepdim", False))
        made = ShardedReduction(emitter.shards, call.node.name, split, dims, _KINDS[_name(call)], keeps=keeps)
        made.order, made.correction = _order(call), _correction(call)
        return emitter.module(made, emitter.local(call.inputs[0].node))

    return emit


@final
class ShardedReduction(nn.Module):
    """A number of all elements along some dims, one of which is divided.

    Args:
        shards: who have the parts.
        name: of the result, for those who wait.
        split: how it is divided.
        dims: that are gone, or of one element where ``keeps``.
        kind: of number.
    """

    order: float = 2
    """Of a norm."""
    correction: float = 1
    """Of a variance."""

    def __init__(
        self, shards: TPCollectives, name: str, split: Shard, dims: list[int], kind: "_Kind", *, keeps: bool
    ) -> None:
        super().__init__()
        self.shards, self.name, self.split, self.dims = shards, name, split, dims
        self.kind, self.keeps = kind, keeps

    def forward(self, part: Tensor) -> Tensor:
        """The whole result."""
        exact = part.to(torch.promote_types(part.dtype, torch.float32))
        made: Tensor = _Across.apply(exact, self)  # type: ignore[no-untyped-call]
        return (made if self.keeps else made.squeeze(tuple(self.dims))).to(part.dtype)

    def sum(self, terms: Tensor, what: str) -> Tensor:
        """Of all elements along the dims, those of other shards included."""
        return self.shards.all_reduce(terms.sum(self.dims, keepdim=True), f"{what} of {self.name}")

    def largest(self, part: Tensor) -> Tensor:
        """Of all elements along the dims."""
        own = part.amax(self.dims, keepdim=True)
        return self.shards.all_reduce(own, f"the maximum of {self.name}", largest=True)

    def count(self, part: Tensor) -> int:
        """How many elements there are for a number."""
        own = prod(part.shape[dim] for dim in self.dims)
        return own // self.split.sizes[self.shards.rank] * self.split.block_size

    def extra_repr(self) -> str:
        return f"{self.name}, dims {self.dims}"


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, across: ShardedReduction) -> Tensor:
        made, beside = across.kind.there(part, across)
        ctx.across = across
        ctx.save_for_backward(part, made, *beside)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), across = gradients, ctx.across
        part, made, *beside = ctx.saved_tensors
        return across.kind.back(gradient, part, made, beside, across), None


class _Kind:
    """Of number: how it is made, dims kept, with what backward needs beside it; how its gradient is one of the part."""

    forward: ClassVar[int] = 1
    """Collectives."""
    backward: ClassVar[int] = 0

    def there(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def back(
        self, gradient: Tensor, part: Tensor, made: Tensor, beside: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        raise NotImplementedError


@final
class _Norm(_Kind):
    """(Σ x²)^½, whose gradient is x/y, or Σ |x|; 0 where the norm is."""

    def there(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        if across.order == 1:
            return across.sum(part.abs(), "the sum"), ()
        return across.sum(part * part, "the sum of squares").sqrt(), ()

    def back(
        self, gradient: Tensor, part: Tensor, made: Tensor, beside: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del beside
        if across.order == 1:
            return gradient * part.sign()
        return (gradient * part / made).masked_fill(made == 0, 0)


@final
class _Variance(_Kind):
    """Σ (x - m)²/(n - c) with m the mean, whose gradient is 2(x - m)/(n - c); or its root y, whose is that over 2y."""

    forward = 2

    def __init__(self, *, root: bool) -> None:
        self._root = root

    def there(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        count = across.count(part)
        mean = across.sum(part, "the mean") / count
        made = across.sum((part - mean) ** 2, "the variance") / max(count - across.correction, 0)
        return made.sqrt() if self._root else made, (mean,)

    def back(
        self, gradient: Tensor, part: Tensor, made: Tensor, beside: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        freedom = max(across.count(part) - across.correction, 0)
        if not self._root:
            return gradient * 2 * (part - beside[0]) / freedom
        return gradient * ((part - beside[0]) / (freedom * made)).masked_fill(made == 0, 0)


@final
class _Extreme(_Kind):
    """The largest element or the smallest; those that are equally large have equal parts of its gradient."""

    backward = 1

    def __init__(self, sign: int) -> None:
        self._sign = sign

    def there(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._sign * across.largest(self._sign * part), ()

    def back(
        self, gradient: Tensor, part: Tensor, made: Tensor, beside: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del beside
        found = (part == made).to(part.dtype)
        return gradient * found / across.sum(found, "the number of those")


@final
class _LogSumExp(_Kind):
    """m + log Σ exp(x - m) with m the largest, or 0 where that is infinite; its gradient is exp(x - y)."""

    forward = 2

    def there(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        largest = across.largest(part)
        largest = largest.masked_fill(largest.isinf(), 0)
        return across.sum((part - largest).exp(), "the sum").log() + largest, ()

    def back(
        self, gradient: Tensor, part: Tensor, made: Tensor, beside: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del beside, across
        return gradient * (part - made).exp()


_KINDS: Mapping[str, _Kind] = {
    "norm": _Norm(),
    "linalg_vector_norm": _Norm(),
    "var": _Variance(root=False),
    "std": _Variance(root=True),
    "amax": _Extreme(1),
    "amin": _Extreme(-1),
    "max": _Extreme(1),
    "min": _Extreme(-1),
    "logsumexp": _LogSumExp(),
}


register(Statistic())
