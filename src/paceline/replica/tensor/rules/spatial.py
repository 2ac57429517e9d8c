"""Sharding along the spatial dims of a tensor, the last ones: what rules with halos have in common."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.replica.tensor.base import Available, Emit, OpCall, OpStrategy, shards_among
from paceline.replica.tensor.halo import HaloReach, SlidingWindow, halo_bytes, halo_reach
from paceline.replica.tensor.placements import Shard, even_sizes


def halo_reaches(
    call: OpCall, available: Available, windows: Sequence[SlidingWindow]
) -> Iterator[tuple[HaloReach, bool]]:
    """Yield how the input can be sharded along a spatial dim, and True if it has to be redistributed for that.

    Args:
        call: an operator that looks at its first input through windows.
        available: placements of its inputs.
        windows: windows along the last dims.
    """
    present = list(present_reaches(call, available, windows))
    yield from ((reach, False) for reach in present)
    # Anew, as evenly as possible, only along the first dim that is long enough before and after: its parts are
    # contiguous.
    for dim in range(-len(windows), 0):
        reach = _reach(call, Shard(dim, even_sizes(call.inputs[0].shape[dim], call.shards)), windows)
        if reach is not None:
            if reach not in present:
                yield reach, True
            return


def present_reaches(call: OpCall, available: Available, windows: Sequence[SlidingWindow]) -> Iterator[HaloReach]:
    """Yield how the input is sharded along a spatial dim already; arguments as for :func:`halo_reaches`."""
    for split in shards_among(available[0]):
        reach = _reach(call, split, windows) if -split.dim <= len(windows) else None
        if reach is not None:
            yield reach


def _reach(call: OpCall, split: Shard, windows: Sequence[SlidingWindow]) -> HaloReach | None:
    """Return the reach of a sharding; None: the dim has samples in it, or not all shards would have a part."""
    symbols = _length_symbols(call, split.dim)
    if symbols:
        inputs = (node.meta["val"] for node in call.node.graph.nodes if node.op == "placeholder")
        tensors = (each for each in inputs if isinstance(each, Tensor) and each.dim())
        if symbols & {symbol for tensor in tensors for symbol in _symbols(tensor.shape[0])}:
            return None
    return halo_reach(split, call.outputs[0].shape[split.dim], windows[split.dim])


def varies_in_length(call: OpCall, reach: HaloReach) -> bool:
    """Return True if other batches may have another length there: sharded so, a model takes that of the first alone."""
    return bool(_length_symbols(call, reach.has.dim))


def _length_symbols(call: OpCall, dim: int) -> set[object]:
    """Return the symbols on which the length of a dim of the first input depends."""
    value = call.inputs[0]
    fake = value.node.meta.get("val")
    fake = fake[value.index] if isinstance(fake, (list, tuple)) else fake
    return set() if fake is None else _symbols(fake.shape[dim])


def _symbols(size: Any) -> set[object]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def spatial_strategy(call: OpCall, reach: HaloReach, emit: Emit, *, on_request: bool = False) -> OpStrategy:
    """Return the strategy of an operator with a halo, whose other inputs are replicated."""
    inputs = (reach.has, *(value.replicated for value in call.inputs[1:]))
    collectives = (1 + call.inputs[0].differentiable) if reach.crossed else 0
    share, sent = reach.makes.share, halo_bytes(call, reach)
    return OpStrategy(inputs, (reach.makes,), "space", emit, share, sent, collectives, on_request)
