"""Pooling over the last dims, padding and resizing of them, by the other dims, and in space."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

from torch import Tensor
from torch.fx import Node

from paceline.replica.module_utils import per_dim
from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, op_rule, shards_among
from paceline.replica.tensor.halo import Halo, HaloReach, SlidingWindow, present_reaches, spatial_strategy
from paceline.replica.tensor.placements import PARTIAL

_NAMES = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_linear1d", "upsample_trilinear3d", "max_pool2d_with_indices", "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "pad", "replication_pad2d", "pixel_shuffle",
)  # fmt: skip

_MAXIMA = ("max_pool1d", "max_pool2d", "max_pool3d")
_MEANS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")


@op_rule(*_NAMES, redistributes=False)
def pooling(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Over the last dims, and resizing of them: S_p is a part of the channels or of the samples.

    space: S_p is a part of the rows; a shard gets the rows of others that its windows see, and sends their gradients
    back. Of a mean over all rows each shard has a term.
    """
    before, name, spatial = call.inputs[0].shape, call.op_name, _spatial_dims(call)
    for split in shards_among(available[0]):
        # A dim is untouched where everything from it on to the front keeps its length; the last ones may not.
        untouched = all(len(v.shape) == len(before) and v.shape[split.dim] == split.length for v in call.outputs)
        if untouched and -split.dim > spatial:
            yield OpStrategy((split,), tuple(split for _ in call.outputs), share=split.share)
    if name.startswith("adaptive_avg_pool"):
        for split in shards_among(available[0]):
            if -split.dim <= spatial and call.outputs[0].shape[split.dim] == 1:
                term = partial(GraphEmitter.weighed_mean, split=split)
                yield OpStrategy((split,), (PARTIAL,), emit=term, share=split.share)
    elif name in _MAXIMA + _MEANS:
        windows = _windows(call)
        for reach in present_reaches(call, available, windows):
            yield spatial_strategy(call, reach, partial(emit_with_halo, reach, windows))


def _spatial_dims(call: OpCall) -> int:
    """Return the number of the last dims that the operator may look across."""
    name = call.op_name
    if "pad" in name:
        pads = call.argument(1, "pad")
        return len(pads) // 2 if isinstance(pads, (list, tuple)) else call.inputs[0].dims
    if "shuffle" in name:
        return 3
    return int(next(c for c in name if c.isdigit()))


def _windows(call: OpCall) -> list[SlidingWindow]:
    """Return the window along each spatial dim."""
    dims = _spatial_dims(call)
    sizes = per_dim(call.argument(1, "kernel_size"), dims)
    strides = per_dim(call.argument(2, "stride", ()) or sizes, dims)
    padding = per_dim(call.argument(3, "padding", 0), dims)
    dilations = per_dim(call.argument(4, "dilation", 1) if call.op_name in _MAXIMA else 1, dims)
    return [SlidingWindow(*each) for each in zip(sizes, strides, padding, dilations, strict=True)]


def emit_with_halo(reach: HaloReach, windows: Sequence[SlidingWindow], emitter: GraphEmitter, call: OpCall) -> Node:
    """Return what emits the operator on the part with its halo; at the edge a mean is one of fewer elements."""
    largest, (x,), window = call.op_name in _MAXIMA, call.inputs, reach.windows
    module = Halo(emitter.shards, x.node.name, reach, fill=-inf if largest else 0.0)
    padding = [each.before for each in windows]
    padding[reach.has.dim] = 0
    result = emitter.with_args(call, self=emitter.module(module, emitter.local(x.node)), padding=padding)
    if largest or call.argument(6, "divisor_override") is not None:
        return result
    # Elements that count in each window of this shard: the halo has padding where the operator would have none.
    edge = window.before if call.argument(5, "count_include_pad", True) else 0
    start, count = reach.makes.offsets[emitter.shards.rank], reach.makes.sizes[emitter.shards.rank]
    firsts = [i * window.stride - window.before for i in range(start, start + count)]
    counts = [min(first + window.size, reach.has.length + edge) - max(first, -edge) for first in firsts]
    if set(counts) == {window.size}:
        return result
    factors = [window.size / each for each in counts]
    return emitter.graph.call_function(scale_rows, (result, reach.has.dim, factors))


def scale_rows(tensor: Tensor, dim: int, factors: Sequence[float]) -> Tensor:
    """Multiply each row along a dim, counted from the last, by a number."""
    return tensor * tensor.new_tensor(factors).reshape(-1, *[1] * (-dim - 1))
