"""Norms, variances, extremes and the like of a tensor along some dims, the sharded one too."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpRule, OpStrategy, register, shards_among
from paceline.replica.tensor.placements import REPLICATE, Shard
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

aten = torch.ops.aten


@final
class Statistic(OpRule):
    """One number of all elements along some dims.

    Along other dims than the sharded one: S_p is a part of the numbers. Along the sharded one: S_p is a part of the
    elements; each shard reduces its own, and the numbers of all shards, as small as the result, are combined to the
    number. In backward a shard makes the gradient of its own elements from the number, and nothing more is sent but by
    extremes, to count the elements that are equally large.
    """

    targets: ClassVar = (
        aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.var.default, aten.var.dim,
        aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction, aten.amax.default, aten.amin.default,
        aten.max.default, aten.min.default, aten.logsumexp.default, aten.max.dim, aten.min.dim, aten.argmax.default,
        aten.argmin.default, aten.prod.dim_int, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default,
        aten.all.dim, aten.all.dims, aten.median.dim, aten.mode.default,
    )  # fmt: skip
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (value,) = call.inputs
        dims, keepdim = _reduced_dims(call), bool(call.argument_named("keepdim", False))
        kind = _kind(call)
        for split in shards_among(available[0]):
            place = split.dim % value.dims
            if place not in dims:
                left = place if keepdim else place - sum(dim < place for dim in dims)
                output = split.at(left - call.outputs[0].dims)
                yield OpStrategy((split,), tuple(output for _ in call.outputs), share=split.share)
            elif kind is not None:
                collectives = kind.forward_collectives + kind.backward_collectives * value.differentiable
                sent = collectives * 2 * (call.shards - 1) / call.shards * call.outputs[0].nbytes
                yield OpStrategy(
                    (split,), (REPLICATE,), "across", partial(emit_across, split, kind), split.share, sent, collectives
                )


def _reduced_dims(call: OpCall) -> set[int]:
    dims, value = call.inputs[0].dims, call.argument_named("dim")
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return {dim % dims for dim in listed} or set(range(dims))


def emit_across(split: Shard, kind: "ReductionKind", emitter: GraphEmitter, call: OpCall) -> Node:
    dims, keepdim = sorted(_reduced_dims(call)), bool(call.argument_named("keepdim", False))
    module = ShardedReduction(emitter.shards, call.node.name, split, dims, kind, keepdim=keepdim)
    return emitter.module(module, emitter.local(call.inputs[0].node))


@final
class ShardedReduction(CollectiveModule):
    """Reduction of all elements along some dims, one of which is sharded.

    Args:
        shards: the group.
        name: name of the result, for messages of ranks that wait.
        split: sharding of the input.
        dims: dims that are reduced.
        kind: kind of reduction.
        keepdim: keep them with one element.
    """

    def __init__(
        self, shards: TPCollectives, name: str, split: Shard, dims: list[int], kind: "ReductionKind", *, keepdim: bool
    ) -> None:
        super().__init__(shards, name)
        self.split, self.dims, self.kind, self.keepdim = split, dims, kind, keepdim

    def forward(self, part: Tensor) -> Tensor:
        """Return the whole result."""
        # Statistics in at least float32, as torch's kernels accumulate them.
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        result: Tensor = _ReductionFunction.apply(wide, self)  # type: ignore[no-untyped-call]
        return (result if self.keepdim else result.squeeze(tuple(self.dims))).to(part.dtype)

    def sum(self, terms: Tensor, what: str) -> Tensor:
        """Return the sum along the dims, over all shards."""
        return self.shards.all_reduce(terms.sum(self.dims, keepdim=True), f"{what} of {self.name}")

    def largest(self, part: Tensor) -> Tensor:
        """Return the maximum along the dims, over all shards."""
        local = part.amax(self.dims, keepdim=True)
        return self.shards.all_reduce(local, f"the maximum of {self.name}", largest=True)

    def count(self, part: Tensor) -> int:
        """Return the number of elements that are reduced to one."""
        own = prod(part.shape[dim] for dim in self.dims)
        return own // self.split.sizes[self.shards.rank] * self.split.block_size


class _ReductionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, module: ShardedReduction) -> Tensor:
        result, saved = module.kind.reduce(part, module)
        ctx.module = module
        ctx.save_for_backward(part, result, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        part, result, *saved = ctx.saved_tensors
        return ctx.module.kind.gradient(gradients[0], part, result, saved, ctx.module), None


class ReductionKind:
    """Kind of reduction, forward and backward; both keep the reduced dims."""

    forward_collectives: ClassVar[int] = 1
    backward_collectives: ClassVar[int] = 0

    def reduce(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result, and what else backward needs."""
        raise NotImplementedError

    def gradient(
        self, gradient: Tensor, part: Tensor, result: Tensor, saved: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        """Return the gradient of the part from that of the result."""
        raise NotImplementedError


@final
class Norm(ReductionKind):
    """(Σ x²)^½, whose gradient is x/y, or Σ |x|; 0 where the norm is."""

    def __init__(self, order: float) -> None:
        self._order = order

    def reduce(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._order == 1:
            return across.sum(part.abs(), "the sum"), ()
        return across.sum(part * part, "the sum of squares").sqrt(), ()

    def gradient(
        self, gradient: Tensor, part: Tensor, result: Tensor, saved: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del saved, across
        if self._order == 1:
            return gradient * part.sign()
        return (gradient * part / result).masked_fill(result == 0, 0)


@final
class Variance(ReductionKind):
    """Σ (x - m)²/(n - c) with m the mean, whose gradient is 2(x - m)/(n - c); or its root y, whose is that over 2y."""

    forward_collectives = 2

    def __init__(self, correction: float, *, root: bool) -> None:
        self._correction, self._root = correction, root

    def reduce(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        count = across.count(part)
        mean = across.sum(part, "the mean") / count
        result = across.sum((part - mean) ** 2, "the variance") / max(count - self._correction, 0)
        return result.sqrt() if self._root else result, (mean,)

    def gradient(
        self, gradient: Tensor, part: Tensor, result: Tensor, saved: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        (mean,), freedom = saved, max(across.count(part) - self._correction, 0)
        if not self._root:
            return gradient * 2 * (part - mean) / freedom
        return gradient * ((part - mean) / (freedom * result)).masked_fill(result == 0, 0)


@final
class Extreme(ReductionKind):
    """The largest element or the smallest; those that are equally large have equal parts of its gradient."""

    backward_collectives = 1

    def __init__(self, sign: int) -> None:
        self._sign = sign

    def reduce(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._sign * across.largest(self._sign * part), ()

    def gradient(
        self, gradient: Tensor, part: Tensor, result: Tensor, saved: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del saved
        equal = (part == result).to(part.dtype)
        return gradient * equal / across.sum(equal, "the number of those")


@final
class LogSumExp(ReductionKind):
    """m + log Σ exp(x - m) with m the largest, or 0 where that is infinite; its gradient is exp(x - y)."""

    forward_collectives = 2

    def reduce(self, part: Tensor, across: ShardedReduction) -> tuple[Tensor, tuple[Tensor, ...]]:
        largest = across.largest(part)
        largest = largest.masked_fill(largest.isinf(), 0)
        return across.sum((part - largest).exp(), "the sum").log() + largest, ()

    def gradient(
        self, gradient: Tensor, part: Tensor, result: Tensor, saved: list[Tensor], across: ShardedReduction
    ) -> Tensor:
        del saved, across
        return gradient * (part - result).exp()


_FIXED_KINDS: Mapping[str, ReductionKind] = {
    "amax": Extreme(1), "amin": Extreme(-1), "max": Extreme(1), "min": Extreme(-1), "logsumexp": LogSumExp()
}  # fmt: skip


def _kind(call: OpCall) -> ReductionKind | None:
    """Return the kind of a reduction over the sharded dim; None: there is none for this operator."""
    name, (value,), output = call.op_name, call.inputs, call.outputs[0]
    if len(call.outputs) != 1 or not value.dtype.is_floating_point or output.dtype != value.dtype:
        return None
    if name in ("norm", "linalg_vector_norm"):
        order = call.argument_named("ord", call.argument_named("p", 2))
        order = 2 if order is None else order
        return Norm(order) if order in (1, 2) else None
    if name in ("var", "std"):
        correction = call.argument_named("correction")
        correction = call.argument_named("unbiased", True) if correction is None else correction
        return Variance(float(correction), root=name == "std")
    return _FIXED_KINDS.get(name)


register(Statistic())
