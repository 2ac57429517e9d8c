"""Convolutions of any dims, grouped and depthwise ones included, by filters, by channels and in space."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpRule, OpStrategy, register, shards_among
from paceline.replica.tensor.halo import Halo, HaloReach, SlidingWindow, per_dim, uneven_padding
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, Placement, Shard, even_sizes
from paceline.replica.tensor.rules.linear import BIAS_RANK, can_be_summed, contracted_shardings, emit_bias_once
from paceline.replica.tensor.rules.spatial import halo_reaches, spatial_strategy, varies_in_length

aten = torch.ops.aten


@final
class Convolution(OpRule):
    """y = x * W + b, with W of filters × channels × ... .

    filters: S_p = some of the filters of W and elements of b; x is replicated, and y_p some of the channels of y.
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
        by_weight = list(_by_weight(call, available, filter_dim=0))
        yield from by_weight
        yield from _by_samples(call, available)
        windows = _windows(call)
        for reach, new in halo_reaches(call, available, windows):
            on_request = new and (bool(by_weight) or varies_in_length(call, reach))
            yield spatial_strategy(call, reach, partial(emit_with_halo, reach, windows), on_request=on_request)


@final
class TransposedConvolution(OpRule):
    """The transpose of a convolution, with W of channels × filters × ... .

    filters, channels, groups, samples: S_p as of :class:`Convolution`, the first two dims of W exchanged.
    """

    targets: ClassVar = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        yield from _by_weight(call, available, filter_dim=1)
        yield from _by_samples(call, available)


def _by_weight(call: OpCall, available: Available, filter_dim: int) -> Iterator[OpStrategy]:
    """Yield the strategies that shard the weight; its first two dims are filters and channels, or the reverse."""
    x, weight, *bias = call.inputs
    dims, groups = weight.dims, call.argument(6, "groups", 1)
    channel, channel_dim = (1 - x.dims if x.dims == dims else -x.dims), 1 - filter_dim
    if groups > 1:
        yield from _by_groups(call, groups, channel, weight.shape[1] if filter_dim else weight.shape[0] // groups)
        return
    for filters in call.shardings(weight.shape[filter_dim], filter_dim - dims):
        output = filters.at(channel)
        inputs: tuple[Placement, ...] = (PARTIAL_GRAD, filters, *(filters.at(-1) for _ in bias))
        yield OpStrategy(inputs, (output,), "filters", share=output.share)
    if can_be_summed(call, 2):
        for channels in contracted_shardings(call, available[0], weight.shape[channel_dim], channel):
            inputs = (channels, channels.at(channel_dim - dims), *(BIAS_RANK for _ in bias))
            yield OpStrategy(inputs, (PARTIAL,), "channels", emit_bias_once, channels.share)


def _by_groups(call: OpCall, groups: int, channel: int, filters: int) -> Iterator[OpStrategy]:
    """Yield the strategies that shard whole groups; ``filters``: filters of a group."""
    x, weight, *bias = call.inputs
    channels, rows = x.shape[channel] // groups, weight.shape[0] // groups
    evenly = even_sizes(groups, call.shards)
    whole = [Shard(channel, tuple(channels * share for share in evenly))] if min(evenly) else []
    for split in dict.fromkeys((*call.shardings(x.shape[channel], channel), *whole)):
        if split.blocks > 1 or any(size % channels for size in split.sizes):
            continue
        sizes = tuple(size // channels for size in split.sizes)
        weights, output = (Shard(channel, tuple(size * each for size in sizes)) for each in (rows, filters))
        inputs = (split, weights.at(-weight.dims), *(output.at(-1) for _ in bias))
        yield OpStrategy(inputs, (output,), "groups", partial(emit_groups, sizes), split.share)


def emit_groups(sizes: tuple[int, ...], emitter: GraphEmitter, call: OpCall) -> Node:
    return emitter.with_args(call, groups=sizes[emitter.shards.rank])


def _by_samples(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    x, weight, *bias = call.inputs
    for split in shards_among(available[0]):
        if x.dims == weight.dims and split.dim == -x.dims:
            inputs: tuple[Placement, ...] = (split, PARTIAL_GRAD, *(PARTIAL_GRAD for _ in bias))
            yield OpStrategy(inputs, (split,), "samples", share=split.share)


def _windows(call: OpCall) -> list[SlidingWindow]:
    """Return the window along each spatial dim."""
    sizes = call.inputs[1].shape[2:]
    dims, padding = len(sizes), call.argument(4, "padding", 0)
    strides, dilations = (per_dim(call.argument(i, name, 1), dims) for i, name in ((3, "stride"), (5, "dilation")))
    if padding == "same":
        totals = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    else:
        around = [(each, each) for each in per_dim(0 if padding == "valid" else padding, dims)]
    each = zip(sizes, strides, around, dilations, strict=True)
    return [SlidingWindow(size, stride, before, dilation, after) for size, stride, (before, after), dilation in each]


def emit_with_halo(reach: HaloReach, windows: Sequence[SlidingWindow], emitter: GraphEmitter, call: OpCall) -> Node:
    """Return what emits the convolution of the part with its halo, which has the padding where it is uneven, too."""
    x, weight, *bias = call.inputs
    module = Halo(emitter.shards, x.node.name, reach, uneven_padding(windows))
    padding = [each.before if each.even else 0 for each in windows]
    padding[reach.has.dim] = 0  # the halo has it
    return emitter.call(
        getattr(aten, call.op_name).default,
        emitter.module(module, emitter.local(x.node)), emitter.local(weight.node),
        emitter.local(bias[0].node) if bias else None, [each.stride for each in windows], padding,
        [each.dilation for each in windows], call.argument(6, "groups", 1),
    )  # fmt: skip


register(Convolution(), TransposedConvolution())
