"""LayerNorm and RMSNorm: by rows, and over channels that are divided."""

from collections.abc import Iterator
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
    replicated,
    shards_among,
)
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.tp_group import TPCollectives

aten = torch.ops.aten


@final
class LayerNorm(OpRule):
    """y = w·(x - mean)/√(variance + ε) + b, and y = w·x/√(mean of x² + ε).

    samples: S_p = everything; x_p is a part of the rows.
    channels: S_p = some of the elements of w and b, as of each row of x; all shards gather each other's means and
    variances, or sum up the squares, and in backward sum up as many numbers a row.
    """

    targets: ClassVar = (aten.layer_norm.default, aten.rms_norm.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, *others = call.inputs
        normalised = len(call.argument(1, "normalized_shape"))
        for split in shards_among(available[0]):
            if -split.dim > normalised:
                inputs = (split, *map(replicated, others))
                yield OpStrategy(inputs, (split,), "samples", share=split.share)
            elif x.node not in [value.node for value in others]:
                inputs, emit = tuple(split for _ in call.inputs), _emit(split, normalised)
                yield OpStrategy(
                    inputs, (split,), "channels", emit, split.share, _sent(call, normalised), _collectives(call)
                )


def _centred(call: OpCall) -> bool:
    return bool(call.target is aten.layer_norm.default)


def _collectives(call: OpCall) -> int:
    return 1 + call.inputs[0].differentiable


def _sent(call: OpCall, normalised: int) -> float:
    """Two numbers a row gathered by all and two summed up in backward; without a mean, one summed up both times."""
    x, shards = call.inputs[0], call.shards
    number = x.nbytes / prod(x.shape[x.dims - normalised :])
    summed = 2 * (shards - 1) / shards * number
    if _centred(call):
        return 2 * (shards - 1) * number + 2 * summed * x.differentiable
    return summed * _collectives(call)


def _emit(split: Shard, normalised: int) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        x, (made,) = call.inputs[0], call.outputs
        weight, bias = call.argument(2, "weight"), call.argument(3, "bias") if _centred(call) else None
        default = 1e-5 if _centred(call) else None
        eps = call.argument(4 if _centred(call) else 3, "eps", default)
        module = ShardedNorm(
            emitter.shards, call.node.name, split, tuple(range(-normalised, 0)), made.dtype,
            eps=torch.finfo(_wide(x.dtype)).eps if eps is None else eps, centred=_centred(call),
        )  # fmt: skip
        return emitter.module(module, *(each and emitter.local(each) for each in (x.node, weight, bias)))

    return emit


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@final
class ShardedNorm(nn.Module):
    """A normalisation over dims of one of which each shard has a part.

    Args:
        shards: who have the parts.
        name: of the result, for those who wait.
        split: how that dim is divided.
        dims: over which, counted from the last.
        dtype: of the result.
        eps: ε.
        centred: whether the mean is taken away first.
    """

    def __init__(
        self,
        shards: TPCollectives,
        name: str,
        split: Shard,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        *,
        eps: float,
        centred: bool,
    ) -> None:
        super().__init__()
        self.shards, self.name, self.split, self._dtype, self.eps, self.centred = (
            shards, name, split, dtype, eps, centred
        )  # fmt: skip
        self.dims = dims

    def forward(self, part: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The shard's part of the result."""
        return self.of(part, weight, bias)[0]

    def of(self, part: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """That, and of each row the mean (0: it is not taken away) and the mean square of what is left."""
        made: Tensor
        made, mean, square = _Across.apply(part.to(_wide(part.dtype)), self)  # type: ignore[no-untyped-call]
        if weight is not None:
            made = made * weight
        if bias is not None:
            made = made + bias
        return made.to(self._dtype), mean, square

    def count(self, part: Tensor) -> int:
        """Elements of a row, on all shards."""
        return prod(part.shape[dim] for dim in self.dims) // self.split.sizes[self.shards.rank] * self.split.block_size

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square deviation of each row, of the shards' own ones (Chan, Golub and LeVeque 1983)."""
        mean = x.mean(self.dims, keepdim=True)
        mine = torch.stack([mean, (x - mean).square().mean(self.dims, keepdim=True)])
        each = self.shards.all_gather(mine, [mine.shape] * self.shards.count, f"the moments of {self.name}")
        shares = [size / self.split.block_size for size in self.split.sizes]
        mean = sum((share * own for share, (own, _) in zip(shares, each, strict=True)), torch.zeros_like(mean))
        apart = [
            share * (own_square + (own - mean).square()) for share, (own, own_square) in zip(shares, each, strict=True)
        ]
        return mean, sum(apart, torch.zeros_like(mean))

    def means(self, x: Tensor, what: str) -> Tensor:
        """Of each row, over all shards; leading dims beside those of the rows stay."""
        share = self.split.sizes[self.shards.rank] / self.split.block_size
        return self.shards.all_reduce(x.mean(self.dims, keepdim=True) * share, f"{what} of {self.name}")

    def extra_repr(self) -> str:
        return f"{self.name}, {self.split}"


class _Across(torch.autograd.Function):
    """n = (x - mean)/σ; dx = (dn - mean of dn - n·(mean of n·dn))/σ. Not centred: without the mean, and that of dn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, across: ShardedNorm) -> tuple[Tensor, Tensor, Tensor]:
        if across.centred:
            mean, square = across.moments(x)
            x = x - mean
        else:
            square = across.means(x.square(), "the mean square")
            mean = torch.zeros_like(square)
        scale = (square + across.eps).rsqrt()
        made = x * scale
        ctx.across = across
        ctx.save_for_backward(made, scale)
        ctx.mark_non_differentiable(mean, square)
        return made, mean, square

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (made, scale), gradient, across = ctx.saved_tensors, gradients[0], ctx.across
        terms = [gradient * made, gradient] if across.centred else [gradient * made]
        along, *mean = across.means(torch.stack(terms), "the gradient")
        for each in mean:
            gradient = gradient - each
        return (gradient - made * along) * scale, None


register(LayerNorm())
