"""Normalisations by channel: BatchNorm, InstanceNorm, GroupNorm."""

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
from paceline.replica.tensor.placements import PARTIAL_GRAD, Placement, Shard
from paceline.replica.tensor.rules.normalisation import ShardedNorm

aten = torch.ops.aten


@final
class BatchNorm(OpRule):
    """channels: S_p = some of the channels, of x and of weight, bias and running statistics; nothing is sent.

    space: S_p = everything; x_p is a part of the rows of each channel. All shards gather each other's means and
    variances, and in backward sum up as many numbers; with running statistics in their place nothing is sent.
    """

    targets: ClassVar = (aten.batch_norm.default, aten.instance_norm.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, *others = call.inputs
        for split in shards_among(available[0]):
            if split.dim == 1 - x.dims:
                inputs: tuple[Placement, ...] = (split, *(split.at(-1) for _ in others))
                yield OpStrategy(inputs, (split,), "channels", share=split.share)
            elif split.dim > 1 - x.dims and _can_be_summed(call):
                inputs = (split, *map(replicated, others))
                if not call.argument(5, "training"):
                    yield OpStrategy(inputs, (split,), "space", share=split.share)
                else:
                    emit, collectives = _over_space(split), 1 + x.differentiable
                    yield OpStrategy(inputs, (split,), "space", emit, split.share, _sent(call), collectives)


def _over(call: OpCall) -> tuple[int, ...]:
    """The dims over which the mean is taken."""
    dims = call.inputs[0].dims
    first = () if call.target is aten.instance_norm.default else (-dims,)
    return (*first, *range(2 - dims, 0))


def _can_be_summed(call: OpCall) -> bool:
    """Whether the numbers are known by which running statistics change, if there are any."""
    kept = call.argument(3, "running_mean") is not None
    return not kept or (call.target is aten.batch_norm.default and isinstance(call.argument(6, "momentum"), float))


def _sent(call: OpCall) -> float:
    """Two numbers a mean gathered by all, and two summed up in backward."""
    x, shards = call.inputs[0], call.shards
    of_batch = -x.dims in _over(call)
    number = x.shape[1] * x.dtype.itemsize if of_batch else x.nbytes / prod(x.shape[2:])
    return 2 * (shards - 1) * number + 4 * (shards - 1) / shards * number * x.differentiable


def _over_space(split: Shard) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        (made,), momentum, eps = call.outputs, call.argument(6, "momentum"), call.argument(7, "eps")
        across = ShardedNorm(emitter.shards, call.node.name, split, _over(call), made.dtype, eps=eps, centred=True)
        nodes = [call.argument(0, "input"), *(call.argument(i, "") for i in range(1, 5))]
        return emitter.module(OverSpace(across, momentum), *(each and emitter.local(each) for each in nodes))

    return emit


@final
class OverSpace(nn.Module):
    """A normalisation of each channel, of whose rows each shard has a part.

    Args:
        across: over all of them.
        momentum: of the running statistics, where there are any.
    """

    def __init__(self, across: ShardedNorm, momentum: float) -> None:
        super().__init__()
        self._across, self._momentum = across, momentum

    def forward(
        self,
        part: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Tensor:
        """The shard's part of the result; the running statistics change in place."""
        shape = [-1, *[1] * (part.dim() - 2)]
        scale, shift = (None if each is None else each.view(shape) for each in (weight, bias))
        made, mean, square = self._across.of(part, scale, shift)
        if running_mean is not None and running_var is not None:
            count = self._across.count(part)
            for kept, found in ((running_mean, mean), (running_var, square * count / (count - 1))):
                kept.mul_(1 - self._momentum).add_(found.reshape(-1).to(kept.dtype), alpha=self._momentum)
        return made


@final
class GroupNorm(OpRule):
    """channels: S_p = some of the groups, with their channels; nothing is sent. samples: S_p = everything."""

    targets: ClassVar = (aten.group_norm.default,)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, *others = call.inputs
        groups = call.argument(1, "num_groups")
        each = x.shape[1] // groups
        for split in shards_among(available[0]):
            if split.dim == -x.dims:
                yield OpStrategy((split, *(PARTIAL_GRAD for _ in others)), (split,), "samples", share=split.share)
            elif split.dim == 1 - x.dims and split.blocks == 1 and not any(size % each for size in split.sizes):
                inputs = (split, *(split.at(-1) for _ in others))
                yield OpStrategy(inputs, (split,), "channels", _emit(split, each), split.share)


def _emit(split: Shard, each: int) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        return emitter.same(call, num_groups=split.sizes[emitter.shards.rank] // each)

    return emit


for _rule in (BatchNorm(), GroupNorm()):
    register(_rule)
