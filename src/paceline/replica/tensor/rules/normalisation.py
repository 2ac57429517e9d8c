"""LayerNorm and RMSNorm: by rows, and over channels that are sharded."""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives


@op_rule(aten.layer_norm.default, aten.rms_norm.default, redistributes=False)
def layer_norm(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = w·(x - mean)/√(variance + ε) + b, and y = w·x/√(mean of x² + ε).

    samples: S_p = everything; x_p is a part of the rows.
    channels: S_p = some of the elements of w and b, as of each row of x; all shards gather each other's means and
    variances, or sum up the squares, and in backward sum up as many numbers a row.
    """
    x, *others = call.inputs
    normalised = len(call.argument(1, "normalized_shape"))
    for split in shards_among(available[0]):
        if -split.dim > normalised:
            inputs = (split, *(value.replicated for value in others))
            yield OpStrategy(inputs, (split,), "samples", share=split.share)
        elif x.node not in [value.node for value in others]:
            # Two numbers a row are gathered, and two summed up in backward; without a mean one is summed up each way.
            number, k = x.nbytes / prod(x.shape[x.dims - normalised :]), call.shards
            summed = 2 * (k - 1) / k * number
            sent = summed * (1 + x.differentiable)
            if call.target is aten.layer_norm.default:
                sent = 2 * (k - 1) * number + 2 * summed * x.differentiable
            emit, inputs = partial(emit_channels, split, normalised), tuple(split for _ in call.inputs)
            yield OpStrategy(inputs, (split,), "channels", emit, split.share, sent, 1 + x.differentiable)


def emit_channels(split: Shard, normalised: int, emitter: GraphEmitter, call: OpCall) -> Node:
    x, (output,), centred = call.inputs[0], call.outputs, call.target is aten.layer_norm.default
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias") if centred else None
    eps = call.argument(4, "eps", 1e-5) if centred else call.argument(3, "eps")
    module = ShardedNorm(
        emitter.shards, call.node.name, split, tuple(range(-normalised, 0)), output.dtype,
        eps=torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps, centred=centred,
    )  # fmt: skip
    return emitter.module(module, *(each and emitter.local(each) for each in (x.node, weight, bias)))


@final
class ShardedNorm(CollectiveModule):
    """Normalisation over dims of one of which each shard has a part.

    n = (x - mean)/σ; dx = (dn - mean of dn - n·(mean of n·dn))/σ. Not centred: without the mean, and that of dn.

    Args:
        shards: the group.
        name: name of the result, for messages of ranks that wait.
        split: sharding of that dim.
        dims: dims to normalise over, counted from the last.
        dtype: type of the result.
        eps: ε.
        centred: subtract the mean first.
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
        super().__init__(shards, name)
        self.split, self.dims, self._dtype, self.eps, self.centred = split, dims, dtype, eps, centred

    def forward(self, part: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the shard's part of the result."""
        return self.with_moments(part, weight, bias)[0]

    def with_moments(self, part: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return that, and each row's mean (0: it is not subtracted) and mean square of what is left."""
        result: Tensor
        result, mean, square = self.differentiable(part.to(torch.promote_types(part.dtype, torch.float32)))
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        return result.to(self._dtype), mean, square

    def count(self, part: Tensor) -> int:
        """Return the number of elements of a row, on all shards."""
        return prod(part.shape[dim] for dim in self.dims) // self.split.sizes[self.shards.rank] * self.split.block_size

    def value(self, ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.centred:
            mean, square = self._moments(x)
            x = x - mean
        else:
            square = self._means(x.square(), "the mean square")
            mean = torch.zeros_like(square)
        scale = (square + self.eps).rsqrt()
        result = x * scale
        ctx.save_for_backward(result, scale)
        ctx.mark_non_differentiable(mean, square)
        return result, mean, square

    def gradients(self, ctx: Any, gradient: Tensor) -> tuple[Tensor]:
        result, scale = ctx.saved_tensors
        # One collective for both means.
        terms = [gradient * result, gradient] if self.centred else [gradient * result]
        along, *mean = self._means(torch.stack(terms), "the gradient")
        for each in mean:
            gradient = gradient - each
        return ((gradient - result * along) * scale,)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of each row from the shards' own ones (Chan, Golub and LeVeque 1983)."""
        mean = x.mean(self.dims, keepdim=True)
        # Deviations from the own mean: sums of squares would cancel.
        local = torch.stack([mean, (x - mean).square().mean(self.dims, keepdim=True)])
        each = self.shards.all_gather(local, [local.shape] * self.shards.count, f"the moments of {self.name}")
        shares = [size / self.split.block_size for size in self.split.sizes]
        # Sums go from shard 0 to the last on all shards, which have the same result to the last bit.
        mean = sum((share * own for share, (own, _) in zip(shares, each, strict=True)), torch.zeros_like(mean))
        squares = [
            share * (own_square + (own - mean).square()) for share, (own, own_square) in zip(shares, each, strict=True)
        ]
        return mean, sum(squares, torch.zeros_like(mean))

    def _means(self, x: Tensor, description: str) -> Tensor:
        """Compute the mean of each row, over all shards; leading dims in front of the rows' stay."""
        share = self.split.sizes[self.shards.rank] / self.split.block_size
        return self.shards.all_reduce(x.mean(self.dims, keepdim=True) * share, f"{description} of {self.name}")
