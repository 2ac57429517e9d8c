"""Pooling over the last dims, padding and resizing of them, by what lies along the others, and in space."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import (
    GraphEmitter,
    Offers,
    OpCall,
    OpRule,
    OpStrategy,
    Write,
    forms,
    offered,
    register,
)
from paceline.replica.tensor.halo import Halo, Reach, WindowOps, expanded
from paceline.replica.tensor.placements import PARTIAL, Shard
from paceline.replica.tensor.rules.spatial import kept, way

aten = torch.ops.aten

_NAMES = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_linear1d", "upsample_trilinear3d", "max_pool2d_with_indices", "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "pad", "replication_pad2d", "pixel_shuffle",
)  # fmt: skip


@final
class Pooling(OpRule):
    """Over the last dims, and resizing of them: S_p is a part of the channels or of the samples.

    space: S_p is a part of the rows; a shard gets the rows of others that its windows see, and sends their gradients
    back. Of a mean over all rows each shard has a term.
    """

    targets: ClassVar = tuple(forms(_NAMES))
    converts = False

    def ways(self, call: OpCall, offers: Offers) -> Iterator[OpStrategy]:
        before = call.takes[0].shape
        for split in offered(offers[0]):
            # A dim is passed over where everything from it on to the front keeps its length; the last ones may not.
            untouched = all(len(v.shape) == len(before) and v.shape[split.dim] == split.length for v in call.gives)
            if untouched and -split.dim > _spatial(call):
                yield OpStrategy((split,), tuple(split for _ in call.gives), share=split.share)
        if _name(call).startswith("adaptive_avg_pool"):
            for split in offered(offers[0]):
                if -split.dim <= _spatial(call) and call.gives[0].shape[split.dim] == 1:
                    yield OpStrategy((split,), (PARTIAL,), write=_term(split), share=split.share)
        elif _name(call) in _MAXIMA + _MEANS:
            windows = _windows(call)
            for reach in kept(call, offers, windows):
                yield way(call, reach, _seen(reach, windows))


_MAXIMA = ("max_pool1d", "max_pool2d", "max_pool3d")
_MEANS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")


def _name(call: OpCall) -> str:
    return str(call.target._schema.name).removeprefix("aten::")


def _spatial(call: OpCall) -> int:
    """How many of the last dims it may look across."""
    name = _name(call)
    if "pad" in name:
        pads = call.argument(1, "pad")
        return len(pads) // 2 if isinstance(pads, (list, tuple)) else call.takes[0].dims
    if "shuffle" in name:
        return 3
    return int(next(c for c in name if c.isdigit()))


def _term(split: Shard) -> Write:
    """The mean over a part, weighed by how much of the whole it is."""

    def write(writer: GraphEmitter, call: OpCall) -> Node:
        return writer.call(aten.mul.Tensor, writer.same(call), split.sizes[writer.shards.rank] / split.block)

    return write


def _windows(call: OpCall) -> list[WindowOps]:
    """Of each spatial dim."""
    dims = _spatial(call)
    sizes = expanded(call.argument(1, "kernel_size"), dims)
    strides = expanded(call.argument(2, "stride", ()) or sizes, dims)
    padding = expanded(call.argument(3, "padding", 0), dims)
    dilations = expanded(call.argument(4, "dilation", 1) if _name(call) in _MAXIMA else 1, dims)
    return [WindowOps(*each) for each in zip(sizes, strides, padding, dilations, strict=True)]


def _seen(reach: Reach, windows: Sequence[WindowOps]) -> Write:
    """On the part with its halo; a mean over windows that reach over the edge is one of fewer elements."""

    def write(writer: GraphEmitter, call: OpCall) -> Node:
        largest, (x,) = _name(call) in _MAXIMA, call.takes
        module = Halo(writer.shards, x.node.name, reach, fill=-inf if largest else 0.0)
        padding = [each.before for each in windows]
        padding[reach.has.dim] = 0
        made = writer.same(call, self=writer.module(module, writer.new(x.node)), padding=padding)
        if largest or call.argument(6, "divisor_override") is not None:
            return made
        counts = _counts(reach, writer.shards.rank, padded=bool(call.argument(5, "count_include_pad", True)))
        if set(counts) == {reach.windows.size}:
            return made
        return writer.module(Scaled(reach.has.dim, [reach.windows.size / count for count in counts]), made)

    return write


def _counts(reach: Reach, shard: int, *, padded: bool) -> list[int]:
    """How many elements count in each window of a shard, along the divided dim."""
    windows, edge = reach.windows, reach.windows.before if padded else 0
    start = reach.makes.starts()[shard]
    firsts = [i * windows.stride - windows.before for i in range(start, start + reach.makes.sizes[shard])]
    return [min(first + windows.size, reach.has.length + edge) - max(first, -edge) for first in firsts]


@final
class Scaled(nn.Module):
    """Each row of a tensor times a number.

    Args:
        dim: along which the rows lie, counted from the last.
        factors: of the rows.
    """

    def __init__(self, dim: int, factors: Sequence[float]) -> None:
        super().__init__()
        self.dim, self.factors = dim, list(factors)

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor with its rows scaled."""
        return tensor * tensor.new_tensor(self.factors).reshape(-1, *[1] * (-self.dim - 1))

    def extra_repr(self) -> str:
        return f"dim {self.dim}"


register(Pooling())
