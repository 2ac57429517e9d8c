"""Convolutions of any dims, grouped and depthwise ones included, by filters and by channels."""

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Call, Offers, Rule, Way, Writer, offered, register
from paceline.replica.tensor.layouts import PARTIAL, SHARED, Layout, Split, shares
from paceline.replica.tensor.rules.linear import FIRST, summable

aten = torch.ops.aten


@final
class Convolution(Rule):
    """y = x * W + b, with W of filters × channels × ... .

    filters: S_p = some of the filters of W and elements of b; x is everyone's, and y_p some of the channels of y.
    channels: S_p = some of the channels of W; x_p some of the channels of x, and y is the sum of all x_p * W_p.
    groups: of a convolution in groups, S_p = some of the groups, of x as of y; nothing is sent.
    samples: S_p = everything; x_p are some of the samples of x, and so is y_p.
    """

    targets: ClassVar = tuple(
        overload
        for name in ("conv1d", "conv2d", "conv3d")
        for overload in (getattr(aten, name).default, getattr(aten, name).padding)
    )

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        x, weight, *bias = call.takes
        dims, groups = weight.dims, call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.splits(weight.shape[0], -dims):
                made = filters.at(channel)
                yield Way((SHARED, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share)
            for channels in call.splits(weight.shape[1], 1 - dims) if summable(call, 2) else ():
                takes: tuple[Layout, ...] = (channels.at(channel), channels, *(FIRST for _ in bias))
                yield Way(takes, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[0] // groups)
        for split in offered(offers[0]):
            if x.dims == dims and split.dim == -dims:
                yield Way((split, SHARED, *(SHARED for _ in bias)), (split,), "samples", share=split.share)


def _by_groups(call: Call, groups: int, channel: int, rows: int, filters: int) -> Iterator[Way]:
    """With as many rows of W, and filters, to each group."""
    x, weight, *bias = call.takes
    channels = x.shape[channel] // groups
    evenly = shares(groups, call.shards)
    whole = [Split(channel, tuple(channels * share for share in evenly))] if min(evenly) else []
    for split in dict.fromkeys((*call.splits(x.shape[channel], channel), *whole)):
        if split.outer > 1 or any(size % channels for size in split.sizes):
            continue
        sizes = tuple(size // channels for size in split.sizes)
        owned, made = (Split(channel, tuple(size * each for size in sizes)) for each in (rows, filters))
        takes = (split, owned.at(-weight.dims), *(made.at(-1) for _ in bias))
        yield Way(takes, (made,), "groups", _grouped(sizes), split.share)


def _grouped(sizes: tuple[int, ...]) -> Any:
    def write(writer: Writer, call: Call) -> Node:
        return writer.same(call, groups=sizes[writer.shards.rank])

    return write


def _summed(write: Writer, call: Call) -> Node:
    return write.same(call) if write.shards.rank == FIRST.shard else write.same(call, bias=None)


@final
class Transposed(Rule):
    """The transpose of a convolution, with W of channels × filters × ... .

    filters, channels, groups, samples: S_p as of :class:`Convolution`, the first two dims of W exchanged.
    """

    targets: ClassVar = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        x, weight, *bias = call.takes
        dims = weight.dims
        groups = call.argument(6, "groups", 1)
        channel = 1 - x.dims if x.dims == dims else -x.dims
        if groups == 1:
            for filters in call.splits(weight.shape[1], 1 - dims):
                made = filters.at(channel)
                yield Way((SHARED, filters, *(filters.at(-1) for _ in bias)), (made,), "filters", share=made.share)
            for channels in call.splits(weight.shape[0], -dims) if summable(call, 2) else ():
                takes: tuple[Layout, ...] = (channels.at(channel), channels, *(FIRST for _ in bias))
                yield Way(takes, (PARTIAL,), "channels", _summed, channels.share)
        else:
            yield from _by_groups(call, groups, channel, weight.shape[0] // groups, weight.shape[1])
        for split in offered(offers[0]):
            if x.dims == dims and split.dim == -dims:
                yield Way((split, SHARED, *(SHARED for _ in bias)), (split,), "samples", share=split.share)


_NAMES = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_linear1d", "upsample_trilinear3d", "max_pool2d_with_indices", "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "pad", "replication_pad2d", "pixel_shuffle",
)  # fmt: skip


@final
class Pooling(Rule):
    """Over the last dims, and resizing of them: S_p is a part of the channels or of the samples."""

    targets: ClassVar = tuple(
        overload
        for name in _NAMES
        if hasattr(aten, name)
        for overload in (getattr(getattr(aten, name), each) for each in getattr(aten, name).overloads())
        if "out" not in overload._overloadname
    )
    converts = False

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        before = call.takes[0].shape
        for split in offered(offers[0]):
            # A dim is passed over where everything from it on to the front keeps its length; the last ones may not.
            untouched = all(len(v.shape) == len(before) and v.shape[split.dim] == split.length for v in call.gives)
            if untouched and -split.dim > _spatial(call):
                yield Way((split,), tuple(split for _ in call.gives), share=split.share)


def _spatial(call: Call) -> int:
    """How many of the last dims it may look across."""
    name = call.target._schema.name
    if "pad" in name:
        pads = call.argument(1, "pad")
        return len(pads) // 2 if isinstance(pads, (list, tuple)) else call.takes[0].dims
    if "shuffle" in name:
        return 3
    return int(next(c for c in name if c.isdigit()))


for _rule in (Convolution(), Transposed(), Pooling()):
    register(_rule)
