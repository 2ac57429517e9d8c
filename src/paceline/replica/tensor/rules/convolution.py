"""Convolutions of any dims, grouped and depthwise ones included, by filters, by channels and in space."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch.fx import Node

from paceline.replica.module_utils import per_dim
from paceline.replica.tensor import halo
from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.halo import HaloReach, SlidingWindow
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, Placement, Shard, even_sizes
from paceline.replica.tensor.rules.linear import BIAS_RANK, can_be_summed, dim_shardings, emit_bias_once


@op_rule(*(getattr(getattr(aten, f"conv{n}d"), overload) for n in (1, 2, 3) for overload in ("default", "padding")))
def convolution(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = x * W + b, with W of filters × channels × ... .

    filters: S_p = some of the filters of W and elements of b; x is replicated, and y_p some of the channels of y.
    channels: S_p = some of the channels of W; x_p some of the channels of x, and y is the sum of all x_p * W_p.
    groups: of a convolution in groups, S_p = some of the groups, of x as of y; nothing is sent.
    samples: S_p = everything; x_p are some of the samples of x, and so is y_p.
    space: S_p = everything; x_p are some of the rows of x, and so is y_p; a shard gets the rows of others that its own
    ones of y see, and sends their gradients back.
    """
    strategies = list(_by_weight_or_samples(call, available, filter_dim=0))
    yield from strategies
    windows = _windows(call)
    present = list(halo.present_reaches(call, available, windows))
    for reach in present:
        yield halo.spatial_strategy(call, reach, partial(emit_with_halo, reach, windows))
    new = halo.new_reach(call, windows)
    if new is not None and new not in present:
        # Sharded along a dim of another length in other batches, a model takes that of the first alone.
        on_request = bool(halo.length_symbols(call, new.has.dim)) or any(s.name != "samples" for s in strategies)
        yield halo.spatial_strategy(call, new, partial(emit_with_halo, new, windows), on_request=on_request)


@op_rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def transposed(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """The transpose of a convolution, with W of channels × filters × ... .

    filters, channels, groups, samples: S_p as of :func:`convolution`, the first two dims of W exchanged.
    """
    yield from _by_weight_or_samples(call, available, filter_dim=1)


def _by_weight_or_samples(call: OpCall, available: Available, filter_dim: int) -> Iterator[OpStrategy]:
    """Yield the strategies without a halo; the first dims of the weight are filters and channels, or the reverse."""
    x, weight, *bias = call.inputs
    dims, groups = weight.dims, call.argument(6, "groups", 1)
    channel, channel_dim = (1 - x.dims if x.dims == dims else -x.dims), 1 - filter_dim
    if groups > 1:
        yield from _by_groups(call, groups, channel, weight.shape[1] if filter_dim else weight.shape[0] // groups)
    else:
        for filters in call.shardings(weight.shape[filter_dim], filter_dim - dims):
            output = filters.at(channel)
            inputs: tuple[Placement, ...] = (PARTIAL_GRAD, filters, *(filters.at(-1) for _ in bias))
            yield OpStrategy(inputs, (output,), "filters", share=output.share)
        if can_be_summed(call, 2):
            for channels in dim_shardings(call, available[0], weight.shape[channel_dim], channel):
                inputs = (channels, channels.at(channel_dim - dims), *(BIAS_RANK for _ in bias))
                yield OpStrategy(inputs, (PARTIAL,), "channels", emit_bias_once, channels.share)
    for split in shards_among(available[0]):
        if x.dims == dims and split.dim == -x.dims:
            inputs = (split, PARTIAL_GRAD, *(PARTIAL_GRAD for _ in bias))
            yield OpStrategy(inputs, (split,), "samples", share=split.share)


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
        yield OpStrategy(inputs, (output,), "groups", partial(GraphEmitter.with_own_args, groups=sizes), split.share)


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
    # Padding of the dims that have more on one side, from the last, as torch.nn.functional.pad takes it.
    around = [side for each in reversed(windows) for side in ((0, 0) if each.even else (each.before, each.after or 0))]
    module = halo.Halo(emitter.shards, x.node.name, reach, around)
    padding = [each.before if each.even else 0 for each in windows]
    padding[reach.has.dim] = 0  # the halo has it
    args = (
        emitter.module(module, emitter.local(x.node)), emitter.local(weight.node),
        emitter.local(bias[0].node) if bias else None, [each.stride for each in windows], padding,
        [each.dilation for each in windows], call.argument(6, "groups", 1),
    )  # fmt: skip
    return emitter.graph.call_function(getattr(aten, call.op_name).default, args)
