"""Softmax and its logarithm, along the divided dim too."""

from collections.abc import Iterator
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
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.tp_group import TPCollectives

aten = torch.ops.aten

_LOGARITHMS = (aten.log_softmax.int, aten._log_softmax.default)


@final
class Softmax(OpRule):
    """y = exp(x)/Σ exp(x), or its logarithm.

    Along another dim than the divided one: S_p is a part of the rows. Along the divided one: S_p is a part of each row;
    the largest element and the sum are found by all shards together, and in backward one sum more.
    """

    targets: ClassVar = (aten.softmax.int, aten._softmax.default, *_LOGARITHMS)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        (x,), (made,) = call.inputs, call.outputs
        dim = call.argument(1, "dim") % max(x.dims, 1)
        for split in shards_among(available[0]):
            if split.dim % x.dims != dim:
                yield OpStrategy((split,), (split,), share=split.share)
                continue
            sums = 2 + x.differentiable
            sent_bytes = sums * 2 * (call.shards - 1) / call.shards * made.nbytes / x.shape[dim]
            yield OpStrategy((split,), (split,), "across", _emit(split), split.share, sent_bytes, sums)


def _emit(split: Shard) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        x, name = emitter.local(call.inputs[0].node), call.node.name
        across = ShardedSoftmax(
            emitter.shards, name, split.dim, call.outputs[0].dtype, logarithm=call.target in _LOGARITHMS
        )
        return emitter.module(across, x)

    return emit


@final
class ShardedSoftmax(nn.Module):
    """Softmax along a dim of which each shard has a part.

    Args:
        shards: who have the parts.
        name: of the result, for those who wait.
        dim: that is divided.
        dtype: of the result.
        logarithm: of it, rather than it.
    """

    def __init__(self, shards: TPCollectives, name: str, dim: int, dtype: torch.dtype, *, logarithm: bool) -> None:
        super().__init__()
        self.shards, self.name, self.dim, self._dtype, self.logarithm = shards, name, dim, dtype, logarithm

    def forward(self, part: Tensor) -> Tensor:
        """The shard's part of the result."""
        x = part.to(torch.promote_types(self._dtype, torch.float32)).contiguous()
        made: Tensor = _Across.apply(x, self)  # type: ignore[no-untyped-call]
        return made.to(self._dtype)

    def sum(self, terms: Tensor, what: str) -> Tensor:
        """Of all elements along the dim, those of other shards included."""
        return self.shards.all_reduce(terms.sum(self.dim, keepdim=True), f"{what} of {self.name}")

    def extra_repr(self) -> str:
        return f"{self.name}, dim {self.dim}"


class _Across(torch.autograd.Function):
    """log y = x - m - log Σ exp(x - m), with m the largest; d log y = dy - y·Σ dy, and dy = y·(dy - Σ y·dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, across: ShardedSoftmax) -> Tensor:
        ctx.across = across
        largest = across.shards.all_reduce(
            x.amax(across.dim, keepdim=True), f"the maximum of {across.name}", largest=True
        )
        shifted = x - largest
        total = across.sum(shifted.exp(), "the sum")
        made = shifted - total.log() if across.logarithm else shifted.exp() / total
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (made,), (gradient,), across = ctx.saved_tensors, gradients, ctx.across
        if across.logarithm:
            return gradient - made.exp() * across.sum(gradient, "the gradient"), None
        return made * (gradient - across.sum(gradient * made, "the gradient")), None


register(Softmax())
