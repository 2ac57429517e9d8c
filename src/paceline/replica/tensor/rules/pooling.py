"""Pooling over the last dims, padding and resizing of them, by what lies along the others, and in space."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar, final

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
    functional_overloads,
    register,
    shards_among,
)
from paceline.replica.tensor.halo import Halo, HaloReach, SlidingWindow, per_dim
from paceline.replica.tensor.placements import PARTIAL, Shard
from paceline.replica.tensor.rules.spatial import reaches_kept, spatial_strategy

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

    targets: ClassVar = tuple(functional_overloads(_NAMES))
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        before = call.inputs[0].shape
        for split in shards_among(available[0]):
            # A dim is passed over where everything from it on to the front keeps its length; the last ones may not.
            untouched = all(len(v.shape) == len(before) and v.shape[split.dim] == split.length for v in call.outputs)
            if untouched and -split.dim > _spatial(call):
                yield OpStrategy((split,), tuple(split for _ in call.outputs), share=split.share)
        if _name(call).startswith("adaptive_avg_pool"):
            for split in shards_among(available[0]):
                if -split.dim <= _spatial(call) and call.outputs[0].shape[split.dim] == 1:
                    yield OpStrategy((split,), (PARTIAL,), emit=_term(split), share=split.share)
        elif _name(call) in _MAXIMA + _MEANS:
            windows = _windows(call)
            for reach in reaches_kept(call, available, windows):
                yield spatial_strategy(call, reach, _seen(reach, windows))


_MAXIMA = ("max_pool1d", "max_pool2d", "max_pool3d")
_MEANS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")


def _name(call: OpCall) -> str:
    return str(call.target._schema.name).removeprefix("aten::")


def _spatial(call: OpCall) -> int:
    """How many of the last dims it may look across."""
    name = _name(call)
    if "pad" in name:
        pads = call.argument(1, "pad")
        return len(pads) // 2 if isinstance(pads, (list, tuple)) else call.inputs[0].dims
    if "shuffle" in name:
        return 3
    return int(next(c for c in name if c.isdigit()))


def _term(split: Shard) -> Emit:
    """The mean over a part, weighed by how much of the whole it is."""

    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        return emitter.call(aten.mul.Tensor, emitter.same(call), split.sizes[emitter.shards.rank] / split.block_size)

    return emit


def _windows(call: OpCall) -> list[SlidingWindow]:
    """Of each spatial dim."""
    dims = _spatial(call)
    sizes = per_dim(call.argument(1, "kernel_size"), dims)
    strides = per_dim(call.argument(2, "stride", ()) or sizes, dims)
    padding = per_dim(call.argument(3, "padding", 0), dims)
    dilations = per_dim(call.argument(4, "dilation", 1) if _name(call) in _MAXIMA else 1, dims)
    return [SlidingWindow(*each) for each in zip(sizes, strides, padding, dilations, strict=True)]


def _seen(reach: HaloReach, windows: Sequence[SlidingWindow]) -> Emit:
    """On the part with its halo; a mean over windows that reach over the edge is one of fewer elements."""

    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        largest, (x,) = _name(call) in _MAXIMA, call.inputs
        module = Halo(emitter.shards, x.node.name, reach, fill=-inf if largest else 0.0)
        padding = [each.before for each in windows]
        padding[reach.has.dim] = 0
        made = emitter.same(call, self=emitter.module(module, emitter.local(x.node)), padding=padding)
        if largest or call.argument(6, "divisor_override") is not None:
            return made
        counts = _counts(reach, emitter.shards.rank, padded=bool(call.argument(5, "count_include_pad", True)))
        if set(counts) == {reach.windows.size}:
            return made
        return emitter.module(Scaled(reach.has.dim, [reach.windows.size / count for count in counts]), made)

    return emit


def _counts(reach: HaloReach, shard: int, *, padded: bool) -> list[int]:
    """How many elements count in each window of a shard, along the divided dim."""
    windows, edge = reach.windows, reach.windows.before if padded else 0
    start = reach.makes.offsets[shard]
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
