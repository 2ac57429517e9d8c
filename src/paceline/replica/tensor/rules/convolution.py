"""Convolutions of any dims, grouped and depthwise ones included, by filters, by channels and in space."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import GraphEmitter, Offers, OpCall, OpRule, OpStrategy, Write, offered, register
from paceline.replica.tensor.halo import Halo, Reach, WindowOps, expanded, uneven
from paceline.replica.tensor.placements import PARTIAL, SHARED, Layout, Shard, shares
from paceline.replica.tensor.rules.linear import FIRST, inputs, summable
from paceline.replica.tensor.rules.spatial import reaches, varies, way

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

    def ways(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        x, weight, *bias = call.takes
        by_weight = list(self._by_weight(call, offers))
        yield from by_weight
        for split in offered(offers[0]):
            if x.dims == weight.dims and split.dim == -x.dims:
                yield OpStrategy((split, SHARED, *(SHARED for _ in bias)), (split,), "samples", share=split.share)
        windows = _windows(call)
        for reach, new in reaches(call, offers, windows):
            asked = new and (bool(by_weight) or varies(call, reach))
            yield way(call, reach, _seen(reach, windows), asked=asked)

    def _by_weight(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        x, weight, *bias = call.takes
        dims, groups = weight.dims, call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.splits(weight.shape[0], -dims):
                made = filters.at(channel)
                yield OpStrategy(
                    (SHARED, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share
                )
            for channels in inputs(call, offers[0], weight.shape[1], channel) if summable(call, 2) else ():
                takes: tuple[Layout, ...] = (channels, channels.at(1 - dims), *(FIRST for _ in bias))
                yield OpStrategy(takes, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[0] // groups)


def _windows(call: OpCall) -> list[WindowOps]:
    """Of each spatial dim."""
    sizes = call.takes[1].shape[2:]
    dims, padding = len(sizes), call.argument(4, "padding", 0)
    strides, dilations = (expanded(call.argument(i, name, 1), dims) for i, name in ((3, "stride"), (5, "dilation")))
    if padding == "same":
        together = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        around = [(total // 2, total - total // 2) for total in together]
    else:
        around = [(each, each) for each in expanded(0 if padding == "valid" else padding, dims)]
    each = zip(sizes, strides, around, dilations, strict=True)
    return [WindowOps(size, stride, before, dilation, after) for size, stride, (before, after), dilation in each]


def _seen(reach: Reach, windows: Sequence[WindowOps]) -> Write:
    """On the part with its halo; where there is more padding on one side it is put around as well."""

    def write(writer: GraphEmitter, call: OpCall) -> Node:
        x, weight, *bias = call.takes
        module = Halo(writer.shards, x.node.name, reach, uneven(windows))
        padding = [each.before if each.even else 0 for each in windows]
        padding[reach.has.dim] = 0
        return writer.call(
            getattr(aten, call.target._schema.name.removeprefix("aten::")).default,
            writer.module(module, writer.new(x.node)), writer.new(weight.node),
            writer.new(bias[0].node) if bias else None, [each.stride for each in windows], padding,
            [each.dilation for each in windows], call.argument(6, "groups", 1),
        )  # fmt: skip

    return write


def _by_groups(call: OpCall, groups: int, channel: int, rows: int, filters: int) -> Iterator[OpStrategy]:
    """With as many rows of W, and filters, to each group."""
    x, weight, *bias = call.takes
    channels = x.shape[channel] // groups
    evenly = shares(groups, call.shards)
    whole = [Shard(channel, tuple(channels * share for share in evenly))] if min(evenly) else []
    for split in dict.fromkeys((*call.splits(x.shape[channel], channel), *whole)):
        if split.outer > 1 or any(size % channels for size in split.sizes):
            continue
        sizes = tuple(size // channels for size in split.sizes)
        owned, made = (Shard(channel, tuple(size * each for size in sizes)) for each in (rows, filters))
        takes = (split, owned.at(-weight.dims), *(made.at(-1) for _ in bias))
        yield OpStrategy(takes, (made,), "groups", _grouped(sizes), split.share)


def _grouped(sizes: tuple[int, ...]) -> Any:
    def write(writer: GraphEmitter, call: OpCall) -> Node:
        return writer.same(call, groups=sizes[writer.shards.rank])

    return write


def _summed(write: GraphEmitter, call: OpCall) -> Node:
    return write.same(call) if write.shards.rank == FIRST.shard else write.same(call, bias=None)


@final
class Transposed(OpRule):
    """The transpose of a convolution, with W of channels × filters × ... .

    filters, channels, groups, samples: S_p as of :class:`Convolution`, the first two dims of W exchanged.
    """

    targets: ClassVar = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)

    def ways(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        x, weight, *bias = call.takes
        dims = weight.dims
        groups = call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.splits(weight.shape[1], 1 - dims):
                made = filters.at(channel)
                yield OpStrategy(
                    (SHARED, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share
                )
            for channels in inputs(call, offers[0], weight.shape[0], channel) if summable(call, 2) else ():
                takes: tuple[Layout, ...] = (channels, channels.at(-dims), *(FIRST for _ in bias))
                yield OpStrategy(takes, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[1])
        for split in offered(offers[0]):
            if x.dims == dims and split.dim == -dims:
                yield OpStrategy((split, SHARED, *(SHARED for _ in bias)), (split,), "samples", share=split.share)


for _rule in (Convolution(), Transposed()):
    register(_rule)
