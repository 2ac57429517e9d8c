"""Convolutions of any dims, grouped and depthwise ones included, by filters, by channels and in space."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import torch
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
from paceline.replica.tensor.halo import Halo, HaloReach, SlidingWindow, per_dim, uneven_padding
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, Placement, Shard, even_sizes
from paceline.replica.tensor.rules.linear import BIAS_RANK, can_be_summed, contracted_shardings
from paceline.replica.tensor.rules.spatial import halo_reaches, spatial_strategy, varies_in_length

aten = torch.ops.aten


@final
class Convolution(OpRule):
    """y = x * W + b, with W of filters × channels × ... .

    filters: S_p = some of the filters of W and elements of b; x is everyone's, and y_p some of the channels of y.
    channels: S_p = some of the channels of W; x_p some of the channels of x, and y is the sum of all x_p * W_p.
    groups: of a convolution in groups, S_p = some of the groups, of x as of y; nothing is sent.
    samples: S_p = everything; x_p are some of the samples of x, and so is y_p.
    space: S_p = everything; x_p are some of the rows of x, and so is y_p; a shard gets the rows of others that its own
    ones of y see, and sends their gradients back.
    """

    targets: ClassVar = tuple(
        overload
        for name in ("conv1d", "conv2d", "conv3d")
        for overload in (getattr(aten, name).default, getattr(aten, name).padding)
    )

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, weight, *bias = call.inputs
        by_weight = list(self._by_weight(call, available))
        yield from by_weight
        for split in shards_among(available[0]):
            if x.dims == weight.dims and split.dim == -x.dims:
                yield OpStrategy(
                    (split, PARTIAL_GRAD, *(PARTIAL_GRAD for _ in bias)), (split,), "samples", share=split.share
                )
        windows = _windows(call)
        for reach, new in halo_reaches(call, available, windows):
            asked = new and (bool(by_weight) or varies_in_length(call, reach))
            yield spatial_strategy(call, reach, _seen(reach, windows), on_request=asked)

    def _by_weight(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, weight, *bias = call.inputs
        dims, groups = weight.dims, call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.shardings(weight.shape[0], -dims):
                made = filters.at(channel)
                yield OpStrategy(
                    (PARTIAL_GRAD, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share
                )
            for channels in (
                contracted_shardings(call, available[0], weight.shape[1], channel) if can_be_summed(call, 2) else ()
            ):
                inputs: tuple[Placement, ...] = (channels, channels.at(1 - dims), *(BIAS_RANK for _ in bias))
                yield OpStrategy(inputs, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[0] // groups)


def _windows(call: OpCall) -> list[SlidingWindow]:
    """Of each spatial dim."""
    sizes = call.inputs[1].shape[2:]
    dims, padding = len(sizes), call.argument(4, "padding", 0)
    strides, dilations = (per_dim(call.argument(i, name, 1), dims) for i, name in ((3, "stride"), (5, "dilation")))
    if padding == "same":
        together = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        around = [(total // 2, total - total // 2) for total in together]
    else:
        around = [(each, each) for each in per_dim(0 if padding == "valid" else padding, dims)]
    each = zip(sizes, strides, around, dilations, strict=True)
    return [SlidingWindow(size, stride, before, dilation, after) for size, stride, (before, after), dilation in each]


def _seen(reach: HaloReach, windows: Sequence[SlidingWindow]) -> Emit:
    """On the part with its halo; where there is more padding on one side it is put around as well."""

    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        x, weight, *bias = call.inputs
        module = Halo(emitter.shards, x.node.name, reach, uneven_padding(windows))
        padding = [each.before if each.even else 0 for each in windows]
        padding[reach.has.dim] = 0
        return emitter.call(
            getattr(aten, call.target._schema.name.removeprefix("aten::")).default,
            emitter.module(module, emitter.local(x.node)), emitter.local(weight.node),
            emitter.local(bias[0].node) if bias else None, [each.stride for each in windows], padding,
            [each.dilation for each in windows], call.argument(6, "groups", 1),
        )  # fmt: skip

    return emit


def _by_groups(call: OpCall, groups: int, channel: int, rows: int, filters: int) -> Iterator[OpStrategy]:
    """With as many rows of W, and filters, to each group."""
    x, weight, *bias = call.inputs
    channels = x.shape[channel] // groups
    evenly = even_sizes(groups, call.shards)
    whole = [Shard(channel, tuple(channels * share for share in evenly))] if min(evenly) else []
    for split in dict.fromkeys((*call.shardings(x.shape[channel], channel), *whole)):
        if split.blocks > 1 or any(size % channels for size in split.sizes):
            continue
        sizes = tuple(size // channels for size in split.sizes)
        owned, made = (Shard(channel, tuple(size * each for size in sizes)) for each in (rows, filters))
        inputs = (split, owned.at(-weight.dims), *(made.at(-1) for _ in bias))
        yield OpStrategy(inputs, (made,), "groups", _grouped(sizes), split.share)


def _grouped(sizes: tuple[int, ...]) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        return emitter.same(call, groups=sizes[emitter.shards.rank])

    return emit


def _summed(emitter: GraphEmitter, call: OpCall) -> Node:
    return emitter.same(call) if emitter.shards.rank == BIAS_RANK.shard else emitter.same(call, bias=None)


@final
class Transposed(OpRule):
    """The transpose of a convolution, with W of channels × filters × ... .

    filters, channels, groups, samples: S_p as of :class:`Convolution`, the first two dims of W exchanged.
    """

    targets: ClassVar = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        x, weight, *bias = call.inputs
        dims = weight.dims
        groups = call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.shardings(weight.shape[1], 1 - dims):
                made = filters.at(channel)
                yield OpStrategy(
                    (PARTIAL_GRAD, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share
                )
            for channels in (
                contracted_shardings(call, available[0], weight.shape[0], channel) if can_be_summed(call, 2) else ()
            ):
                inputs: tuple[Placement, ...] = (channels, channels.at(-dims), *(BIAS_RANK for _ in bias))
                yield OpStrategy(inputs, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[1])
        for split in shards_among(available[0]):
            if x.dims == dims and split.dim == -dims:
                yield OpStrategy(
                    (split, PARTIAL_GRAD, *(PARTIAL_GRAD for _ in bias)), (split,), "samples", share=split.share
                )


for _rule in (Convolution(), Transposed()):
    register(_rule)
