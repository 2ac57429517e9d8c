"""Normalisations by channel: BatchNorm, InstanceNorm, GroupNorm."""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import final

from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL_GRAD, Placement, Shard
from paceline.replica.tensor.rules.normalisation import ShardedNorm


@op_rule(aten.batch_norm.default, aten.instance_norm.default, redistributes=False)
def batch_norm(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """channels: S_p = some of the channels, of x and of weight, bias and running statistics; nothing is sent.

    space: S_p = everything; x_p is a part of the rows of each channel. All shards gather each other's means and
    variances, and in backward sum up as many numbers; with running statistics in their place nothing is sent.
    """
    x, *others = call.inputs
    # Running statistics are updated here by the momentum, which has to be a number.
    updates = call.argument(3, "running_mean") is not None
    momentum = call.target is aten.batch_norm.default and isinstance(call.argument(6, "momentum"), float)
    updatable = momentum or not updates
    for split in shards_among(available[0]):
        if split.dim == 1 - x.dims:
            inputs: tuple[Placement, ...] = (split, *(split.at(-1) for _ in others))
            yield OpStrategy(inputs, (split,), "channels", share=split.share)
        elif split.dim > 1 - x.dims and updatable:
            inputs = (split, *(value.replicated for value in others))
            if not call.argument(5, "training"):
                yield OpStrategy(inputs, (split,), "space", share=split.share)
            else:
                # All gather two numbers a mean, and two are summed up in backward.
                over_batch, k = -x.dims in _mean_dims(call), call.shards
                number = x.shape[1] * x.dtype.itemsize if over_batch else x.nbytes / prod(x.shape[2:])
                sent = 2 * (k - 1) * number + 4 * (k - 1) / k * number * x.differentiable
                emit, collectives = partial(emit_space, split), 1 + x.differentiable
                yield OpStrategy(inputs, (split,), "space", emit, split.share, sent, collectives)


def _mean_dims(call: OpCall) -> tuple[int, ...]:
    """Return the dims over which the mean is taken."""
    dims = call.inputs[0].dims
    first = () if call.target is aten.instance_norm.default else (-dims,)
    return (*first, *range(2 - dims, 0))


def emit_space(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    (output,), momentum, eps = call.outputs, call.argument(6, "momentum"), call.argument(7, "eps")
    norm = ShardedNorm(emitter.shards, call.node.name, split, _mean_dims(call), output.dtype, eps=eps, centred=True)
    nodes = [call.argument(0, "input"), *(call.argument(i, "") for i in range(1, 5))]
    return emitter.module(SpatialBatchNorm(norm, momentum), *(each and emitter.local(each) for each in nodes))


@final
class SpatialBatchNorm(nn.Module):
    """Normalisation of each channel, of whose rows each shard has a part.

    Args:
        norm: normalises over all shards' rows.
        momentum: momentum of the running statistics, if there are any.
    """

    def __init__(self, norm: ShardedNorm, momentum: float) -> None:
        super().__init__()
        self._norm, self._momentum = norm, momentum

    def forward(self, part: Tensor, *others: Tensor | None) -> Tensor:
        """Return the shard's part of the result; the running statistics change in place.

        Args:
            part: the shard's part of the rows.
            others: weight, bias, running mean and running variance.
        """
        weight, bias, running_mean, running_var = others
        shape = [-1, *[1] * (part.dim() - 2)]
        scale, shift = (None if each is None else each.view(shape) for each in (weight, bias))
        result, mean, square = self._norm.with_moments(part, scale, shift)
        if running_mean is not None and running_var is not None:
            count = self._norm.count(part)  # running variances are unbiased
            for running, batch in ((running_mean, mean), (running_var, square * count / (count - 1))):
                running.mul_(1 - self._momentum).add_(batch.reshape(-1).to(running.dtype), alpha=self._momentum)
        return result


@op_rule(aten.group_norm.default, redistributes=False)
def group_norm(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """channels: S_p = some of the groups, with their channels; nothing is sent. samples: S_p = everything."""
    x, *others = call.inputs
    channels = x.shape[1] // call.argument(1, "num_groups")
    for split in shards_among(available[0]):
        if split.dim == -x.dims:
            yield OpStrategy((split, *(PARTIAL_GRAD for _ in others)), (split,), "samples", share=split.share)
        elif split.dim == 1 - x.dims and split.blocks == 1 and not any(size % channels for size in split.sizes):
            inputs = (split, *(split.at(-1) for _ in others))
            groups = tuple(size // channels for size in split.sizes)
            emit = partial(GraphEmitter.with_own_args, num_groups=groups)
            yield OpStrategy(inputs, (split,), "channels", emit, split.share)
