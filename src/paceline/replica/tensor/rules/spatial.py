"""Along the spatial dims of a tensor, the last ones: what rules have in common that divide the input there."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.replica.tensor import halo
from paceline.replica.tensor.base import Available, Emit, GraphTensor, OpCall, OpStrategy, replicated, shards_among
from paceline.replica.tensor.halo import HaloReach, SlidingWindow, halo_reach
from paceline.replica.tensor.placements import Placement, Shard, even_sizes


def halo_reaches(
    call: OpCall, available: Available, windows: Sequence[SlidingWindow]
) -> Iterator[tuple[HaloReach, bool]]:
    """How the input may be divided along a spatial dim, and whether it has to be divided anew for that.

    Args:
        call: an operator that looks at its first tensor through windows.
        offers: how that can be had.
        windows: of the last dims.
    """
    already = list(reaches_kept(call, available, windows))
    yield from ((reach, False) for reach in already)
    yield from ((reach, True) for reach in _anew(call, windows) if reach not in already)


def varies_in_length(call: OpCall, reach: HaloReach) -> bool:
    """Whether another batch may be of another length there: divided so, a model takes that of the first one alone."""
    return bool(_symbols(call.inputs[0], reach.has.dim))


def reaches_kept(call: OpCall, available: Available, windows: Sequence[SlidingWindow]) -> Iterator[HaloReach]:
    """Where the input is divided along a spatial dim already, as it is.

    Args:
        call: an operator that looks at its first tensor through windows.
        offers: how that can be had.
        windows: of the last dims.
    """
    for split in shards_among(available[0]):
        if -split.dim <= len(windows):
            yield from _reached(call, split, windows)


def _anew(call: OpCall, windows: Sequence[SlidingWindow]) -> Iterator[HaloReach]:
    """As evenly as can be along the first spatial dim that is long enough, before and after: its parts lie together."""
    for dim in range(-len(windows), 0):
        split = Shard(dim, even_sizes(call.inputs[0].shape[dim], call.shards))
        found = next(_reached(call, split, windows), None)
        if found is not None:
            yield found
            return


def _reached(call: OpCall, split: Shard, windows: Sequence[SlidingWindow]) -> Iterator[HaloReach]:
    dim = split.dim
    symbols = _symbols(call.inputs[0], dim)
    if not (symbols and symbols & _samples(call)):
        found = halo_reach(split, call.outputs[0].shape[dim], windows[dim])
        if found is not None:
            yield found


def _symbols(value: GraphTensor, dim: int) -> set[object]:
    """Of the sizes that the length of a dim depends on."""
    made = value.node.meta.get("val")
    tensor = made[value.index] if isinstance(made, (list, tuple)) else made
    return set() if tensor is None else _free(tensor.shape[dim])


def _samples(call: OpCall) -> set[object]:
    """Of the numbers of samples."""
    inputs = (node.meta["val"] for node in call.node.graph.nodes if node.op == "placeholder")
    return {symbol for each in inputs if isinstance(each, Tensor) and each.dim() for symbol in _free(each.shape[0])}


def _free(size: Any) -> set[object]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def spatial_strategy(call: OpCall, reach: HaloReach, emit: Emit, *, on_request: bool = False) -> OpStrategy:
    """That of an operator whose other tensors are everyone's."""
    inputs: tuple[Placement, ...] = (reach.has, *map(replicated, call.inputs[1:]))
    sent, collectives = halo.halo_bytes(call, reach), halo.halo_collectives(call, reach)
    return OpStrategy(inputs, (reach.makes,), "space", emit, reach.makes.share, sent, collectives, on_request)
