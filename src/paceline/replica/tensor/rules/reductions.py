"""Norms, variances, extremes and the like of a tensor along some dims, the sharded one too."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import REPLICATE, Shard
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives


@op_rule(
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.var.default, aten.var.dim,
    aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.logsumexp.default, aten.max.dim, aten.min.dim, aten.argmax.default,
    aten.argmin.default, aten.prod.dim_int, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default,
    aten.all.dim, aten.all.dims, aten.median.dim, aten.mode.default, redistributes=False)  # fmt: skip
def statistic(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """One number of all elements along some dims.

    Along other dims than the sharded one: S_p is a part of the numbers. Along the sharded one: S_p is a part of the
    elements; each shard reduces its own, and the numbers of all shards, as small as the result, are combined to the
    number. In backward a shard makes the gradient of its own elements from the number, and nothing more is sent but by
    extremes, to count the elements that are equally large.
    """
    (value,), dims, kind = call.inputs, call.dims_named("dim"), _kind(call)
    for split in shards_among(available[0]):
        if split.dim % value.dims not in dims:
            output = split.without(() if call.argument_named("keepdim") else dims, value.dims)
            yield OpStrategy((split,), tuple(output for _ in call.outputs), share=split.share)
        elif kind is not None:
            collectives = kind.forward_collectives + kind.backward_collectives * value.differentiable
            sent = collectives * 2 * (call.shards - 1) / call.shards * call.outputs[0].nbytes
            yield OpStrategy(
                (split,), (REPLICATE,), "across", partial(emit_across, split, kind), split.share, sent, collectives
            )


def emit_across(split: Shard, kind: "ReductionKind", emitter: GraphEmitter, call: OpCall) -> Node:
    dims, keepdim = sorted(call.dims_named("dim")), bool(call.argument_named("keepdim"))
    module = ShardedReduction(emitter.shards, call.node.name, split, dims, kind, keepdim=keepdim)
    return emitter.module(module, emitter.local(call.inputs[0].node))


class ReductionKind(NamedTuple):
    """Kind of reduction, with the collectives that it makes."""

    name: str
    forward_collectives: int
    backward_collectives: int = 0
    order: float = 2
    """Order of a norm: 1 or 2."""
    correction: float = 1
    """What is subtracted from the number of elements that a variance is divided by."""


_FIXED_KINDS: Mapping[str, ReductionKind] = {
    "amax": ReductionKind("largest", 1, 1),
    "amin": ReductionKind("smallest", 1, 1),
    "max": ReductionKind("largest", 1, 1),
    "min": ReductionKind("smallest", 1, 1),
    "logsumexp": ReductionKind("logsumexp", 2),
}


def _kind(call: OpCall) -> ReductionKind | None:
    """Return the kind of a reduction over the sharded dim; None: there is none for this operator."""
    name, (value,), output = call.op_name, call.inputs, call.outputs[0]
    if len(call.outputs) != 1 or not value.dtype.is_floating_point or output.dtype != value.dtype:
        return None
    if name in ("norm", "linalg_vector_norm"):
        order = call.argument_named("ord", call.argument_named("p", 2))
        order = 2 if order is None else order
        return ReductionKind("norm", 1, order=order) if order in (1, 2) else None
    if name in ("var", "std"):
        correction = call.argument_named("correction")
        correction = call.argument_named("unbiased", True) if correction is None else correction
        return ReductionKind(name, 2, correction=float(correction))
    return _FIXED_KINDS.get(name)


@final
class ShardedReduction(CollectiveModule):
    """Reduction y of all elements x along some dims, one of which is sharded.

    ::

        norm       (Σ x²)^½, or Σ |x|                               dx = dy·x/y, 0 where y is, or dy·sign(x)
        var        Σ (x - m)²/(n - c), with m the mean              dx = dy·2(x - m)/(n - c)
        std        its root                                         dx = dy·(x - m)/((n - c)·y), 0 where y is
        largest    max x; smallest: -max -x                         dx = dy/(number of x that are y) for those
        logsumexp  m + log Σ exp(x - m), with m the largest,        dx = dy·exp(x - y)
                   or 0 where that is infinite

    Args:
        shards: the group.
        name: name of the result, for messages of ranks that wait.
        split: sharding of the input.
        dims: dims that are reduced.
        kind: kind of reduction.
        keepdim: keep them with one element.
    """

    def __init__(
        self, shards: TPCollectives, name: str, split: Shard, dims: list[int], kind: ReductionKind, *, keepdim: bool
    ) -> None:
        super().__init__(shards, name)
        self.split, self.dims, self.kind, self.keepdim = split, dims, kind, keepdim

    def forward(self, part: Tensor) -> Tensor:
        """Return the whole result."""
        # Statistics in at least float32, as torch's kernels accumulate them.
        result: Tensor = self.differentiable(part.to(torch.promote_types(part.dtype, torch.float32)))
        return (result if self.keepdim else result.squeeze(tuple(self.dims))).to(part.dtype)

    def value(self, ctx: Any, x: Tensor) -> Tensor:
        name, saved = self.kind.name, list[Tensor]()
        if name == "norm":
            y = self._sum(x.abs(), "the sum") if self.kind.order == 1 else self._sum(x * x, "the sum of squares").sqrt()
        elif name in ("var", "std"):
            count, freedom = self._freedom(x)
            mean = self._sum(x, "the mean") / count
            y = self._sum((x - mean) ** 2, "the variance") / freedom
            y, saved = y.sqrt() if name == "std" else y, [mean]
        elif name == "logsumexp":
            largest = self._largest(x)
            largest = largest.masked_fill(largest.isinf(), 0)
            y = self._sum((x - largest).exp(), "the sum").log() + largest
        else:
            sign = 1 if name == "largest" else -1
            y = sign * self._largest(sign * x)
        ctx.save_for_backward(x, y, *saved)
        return y

    def gradients(self, ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (x, y, *saved), name = ctx.saved_tensors, self.kind.name
        if name == "norm":
            dx = dy * x.sign() if self.kind.order == 1 else (dy * x / y).masked_fill(y == 0, 0)
        elif name == "var":
            dx = dy * 2 * (x - saved[0]) / self._freedom(x)[1]
        elif name == "std":
            dx = dy * ((x - saved[0]) / (self._freedom(x)[1] * y)).masked_fill(y == 0, 0)
        elif name == "logsumexp":
            dx = dy * (x - y).exp()
        else:  # elements that are equally large have equal parts
            equal = (x == y).to(x.dtype)
            dx = dy * equal / self._sum(equal, "the number of those")
        return (dx,)

    def _sum(self, terms: Tensor, description: str) -> Tensor:
        """Return the sum along the dims, over all shards."""
        return self.shards.all_reduce(terms.sum(self.dims, keepdim=True), f"{description} of {self.name}")

    def _largest(self, part: Tensor) -> Tensor:
        """Return the maximum along the dims, over all shards."""
        local = part.amax(self.dims, keepdim=True)
        return self.shards.all_reduce(local, f"the maximum of {self.name}", largest=True)

    def _freedom(self, part: Tensor) -> tuple[int, float]:
        """Return the number of elements that are reduced to one, and what a variance divides by."""
        own = prod(part.shape[dim] for dim in self.dims)
        count = own // self.split.sizes[self.shards.rank] * self.split.block_size
        return count, max(count - self.kind.correction, 0)
