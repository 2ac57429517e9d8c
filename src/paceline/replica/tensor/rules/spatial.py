"""Along the spatial dims of a tensor, the last ones: what rules have in common that divide the input there."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.replica.tensor import halo
from paceline.replica.tensor.base import Offers, OpCall, OpStrategy, Value, Write, everyones, offered
from paceline.replica.tensor.halo import Reach, WindowOps, through
from paceline.replica.tensor.placements import Layout, Shard, shares


def reaches(call: OpCall, offers: Offers, windows: Sequence[WindowOps]) -> Iterator[tuple[Reach, bool]]:
    """How the input may be divided along a spatial dim, and whether it has to be divided anew for that.

    Args:
        call: an operator that looks at its first tensor through windows.
        offers: how that can be had.
        windows: of the last dims.
    """
    already = list(kept(call, offers, windows))
    yield from ((reach, False) for reach in already)
    yield from ((reach, True) for reach in _anew(call, windows) if reach not in already)


def varies(call: OpCall, reach: Reach) -> bool:
    """Whether another batch may be of another length there: divided so, a model takes that of the first one alone."""
    return bool(_symbols(call.takes[0], reach.has.dim))


def kept(call: OpCall, offers: Offers, windows: Sequence[WindowOps]) -> Iterator[Reach]:
    """Where the input is divided along a spatial dim already, as it is.

    Args:
        call: an operator that looks at its first tensor through windows.
        offers: how that can be had.
        windows: of the last dims.
    """
    for split in offered(offers[0]):
        if -split.dim <= len(windows):
            yield from _reached(call, split, windows)


def _anew(call: OpCall, windows: Sequence[WindowOps]) -> Iterator[Reach]:
    """As evenly as can be along the first spatial dim that is long enough, before and after: its parts lie together."""
    for dim in range(-len(windows), 0):
        split = Shard(dim, shares(call.takes[0].shape[dim], call.shards))
        found = next(_reached(call, split, windows), None)
        if found is not None:
            yield found
            return


def _reached(call: OpCall, split: Shard, windows: Sequence[WindowOps]) -> Iterator[Reach]:
    dim = split.dim
    symbols = _symbols(call.takes[0], dim)
    if not (symbols and symbols & _samples(call)):
        found = through(split, call.gives[0].shape[dim], windows[dim])
        if found is not None:
            yield found


def _symbols(value: Value, dim: int) -> set[object]:
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


def way(call: OpCall, reach: Reach, write: Write, *, asked: bool = False) -> OpStrategy:
    """That of an operator whose other tensors are everyone's."""
    takes: tuple[Layout, ...] = (reach.has, *map(everyones, call.takes[1:]))
    sent, collectives = halo.sent(call, reach), halo.collectives(call, reach)
    return OpStrategy(takes, (reach.makes,), "space", write, reach.makes.share, sent, collectives, asked)
