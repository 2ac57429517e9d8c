"""Halo exchange: operators that look through windows along a sharded dim need elements of their neighbours' parts.

::

                 forward                               backward
    borders      all-gather                            reduce-scatter: what others found for mine is added to it
    padding      put around                            dropped

Borders are small compared with the tensor, so every shard gets those of all: one collective each way, which sends k - 1
times what neighbours alone would send each other.

A shard that makes some elements of the result needs those of the input that their windows cover; where a window crosses
the border between two shards it needs a few of a neighbour's, or of several where parts are small::

    size 3, stride 1, 1 before            shard 0        shard 1
    input                           .   0   1   2   3 | 4   5   6   7   .       . is padding
    result                              0   1   2   3 | 4   5   6   7
    needs                            0 1 2 3 4        |  3 4 5 6 7
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.errors import InputError
from paceline.replica.tensor.base import Available, Emit, OpCall, OpStrategy, shards_among
from paceline.replica.tensor.placements import Shard, even_sizes
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives


@final
@dataclass(frozen=True)
class SlidingWindow:
    """Window along one dim: element i of the result sees i·stride - before + j·dilation of the input, j < size."""

    size: int
    stride: int = 1
    before: int = 0
    """Elements of padding in front of the first."""
    dilation: int = 1
    after: int | None = None
    """Elements of padding behind the last; None: as many as before."""

    @property
    def reach(self) -> int:
        """Elements from the first that is seen to the last."""
        return self.dilation * (self.size - 1) + 1

    @property
    def even(self) -> bool:
        """True if there is as much padding on either side."""
        return self.after in (None, self.before)


@final
@dataclass(frozen=True)
class HaloReach:
    """The elements of a dim that each shard needs.

    Args:
        has: sharding of the input along it, in one block.
        makes: sharding of the result.
        windows: window through which the input is seen.
    """

    has: Shard
    makes: Shard
    windows: SlidingWindow

    def seen(self, shard: int) -> tuple[int, int]:
        """Return the first element of a shard's windows and the one behind the last, padding included."""
        window = self.windows
        first = self.makes.offsets[shard]
        last = first + self.makes.sizes[shard] - 1
        return first * window.stride - window.before, last * window.stride - window.before + window.reach

    def needs(self, shard: int) -> range:
        """Return the elements of the input that a shard's part of the result sees."""
        first, end = self.seen(shard)
        first = min(max(first, 0), self.has.length)
        return range(first, max(min(end, self.has.length), first))

    def padding(self, shard: int) -> tuple[int, int]:
        """Return the number of elements that a shard sees before and behind all that there are."""
        first, end = self.seen(shard)
        outside = end - first - len(self.needs(shard))
        before = min(max(-first, 0), outside)
        return before, outside - before

    def own(self, shard: int) -> range:
        """Return the elements that a shard has."""
        start = self.has.offsets[shard]
        return range(start, start + self.has.sizes[shard])

    def of(self, shard: int, other: int) -> range:
        """Return the elements that a shard needs of another one."""
        needs, own = self.needs(shard), self.own(other)
        start = max(needs.start, own.start)
        return range(start, max(min(needs.stop, own.stop), start))

    def given(self, shard: int) -> tuple[int, ...]:
        """Return the elements of a shard that others need, in order."""
        others = (other for other in range(len(self.has.sizes)) if other != shard)
        return tuple(sorted({each for other in others for each in self.of(other, shard)}))

    @cached_property
    def crossed(self) -> int:
        """Number of elements that all shards give to others: 0 if no window crosses a border."""
        return sum(len(self.given(shard)) for shard in range(len(self.has.sizes)))


def halo_reach(has: Shard, length: int, windows: SlidingWindow) -> HaloReach | None:
    """Return the reach for a result of this length; None: not all shards would have a part of it.

    The result is sharded as the input is if both are as long, else as evenly as possible: neighbouring operators agree.

    >>> halo_reach(Shard(-2, (4, 4)), 4, SlidingWindow(size=3, stride=2, before=1)).makes
    Shard(dim=-2, sizes=(2, 2), blocks=1)
    """
    if has.blocks > 1 or not all(has.sizes) or length < len(has.sizes):
        return None
    makes = has if length == has.length else Shard(has.dim, even_sizes(length, len(has.sizes)))
    return HaloReach(has, makes, windows)


@final
class Halo(CollectiveModule):
    """A part -> all elements that the windows of a shard see, padding included.

    Args:
        shards: the group.
        name: name of the tensor.
        reach: elements that each shard needs.
        around: padding of other dims, as :func:`torch.nn.functional.pad` takes it.
        fill: value of the padding.
    """

    def __init__(
        self, shards: TPCollectives, name: str, reach: HaloReach, around: Sequence[int] = (), *, fill: float = 0.0
    ) -> None:
        super().__init__(shards, name)
        self.reach, self._fill = reach, fill
        rank, dim, start = shards.rank, reach.has.dim, reach.own(shards.rank).start
        # Computed once, since every pass needs them: (first, number) of what this shard needs, in its own part or in
        # what each other one gives.
        self._slices = list[tuple[int, int]]()
        for shard in range(shards.count):
            needed = reach.of(rank, shard)
            before = sum(each < needed.start for each in reach.given(shard)) if shard != rank else needed.start - start
            self._slices.append((before if needed else 0, len(needed)))
        self._given = [len(reach.given(shard)) for shard in range(shards.count)]
        self._places = [each - start for each in reach.given(rank)]
        self._padding = [*around, *[0] * (-2 * dim - len(around))]
        self._padding[-2 * dim - 2 : -2 * dim] = reach.padding(rank)

    def forward(self, part: Tensor) -> Tensor:
        """Return the elements that this shard needs.

        Raises:
            InputError: the tensor is longer or shorter than planned.
        """
        dim, length = self.reach.has.dim, self.reach.has.sizes[self.shards.rank]
        if part.shape[dim] != length:
            raise InputError(
                f"{self.name} has {part.shape[dim]} elements along dim {dim} on shard {self.shards.rank}, and was "
                f"planned for {length}; give batches of the same size as the first, or leave its module whole in "
                "shard_rules"
            )
        if self.reach.crossed:
            result: Tensor = self.differentiable(part)
        else:
            result = self._local(part)
        return pad(result, self._padding, value=self._fill) if any(self._padding) else result

    def _local(self, part: Tensor) -> Tensor:
        """Return what the shard's windows see of its own part, as a view."""
        return part.narrow(self.reach.has.dim, *self._slices[self.shards.rank])

    def _indices(self, like: Tensor) -> Tensor:
        """Return where in its own part those elements are that others need."""
        return torch.tensor(self._places, device=like.device, dtype=torch.int64)

    def value(self, _: Any, part: Tensor) -> Tensor:
        """Return the part with what the windows see of the others'."""
        rank, dim = self.shards.rank, self.reach.has.dim
        shapes = [_with_length(part, dim, length) for length in self._given]
        borders = part.index_select(part.dim() + dim, self._indices(part))
        gathered = self.shards.all_gather(borders, shapes, f"the borders of {self.name}")
        pieces = [
            self._local(part) if shard == rank else given.narrow(dim, *self._slices[shard])
            for shard, given in enumerate(gathered)
        ]
        return torch.cat(pieces, dim)

    def gradients(self, _: Any, gradient: Tensor) -> tuple[Tensor]:
        """Return the gradient of the part, with what other shards found for it."""
        rank, dim = self.shards.rank, self.reach.has.dim
        pieces = torch.split(gradient, [length for _, length in self._slices], dim)
        parts = list[Tensor]()
        for shard, piece in enumerate(pieces):  # zeros for itself: a shard adds its own gradient below
            part = piece.new_zeros(_with_length(piece, dim, self._given[shard]))
            if shard != rank:
                part.narrow(dim, *self._slices[shard]).copy_(piece)
            parts.append(part)
        received = self.shards.reduce_scatter(parts, f"the gradient of the borders of {self.name}")
        # The own gradient first, then what was received for it: elements that several windows see are added up.
        total = gradient.new_zeros(_with_length(gradient, dim, self.reach.has.sizes[rank]))
        self._local(total).copy_(pieces[rank])
        return (total.index_add_(dim, self._indices(total), received),)


def _with_length(tensor: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    shape[dim] = length
    return tuple(shape)


def present_reaches(call: OpCall, available: Available, windows: Sequence[SlidingWindow]) -> Iterator[HaloReach]:
    """Yield how the input of an operator is sharded along a spatial dim already.

    Args:
        call: an operator that looks at its first input through windows.
        available: placements of its inputs.
        windows: windows along the last dims.
    """
    for split in shards_among(available[0]):
        reach = _reach(call, split, windows) if -split.dim <= len(windows) else None
        if reach is not None:
            yield reach


def new_reach(call: OpCall, windows: Sequence[SlidingWindow]) -> HaloReach | None:
    """Return how the input can be sharded anew along a spatial dim, as evenly as possible; arguments as above.

    Only along the first dim that is long enough before and after: its parts are contiguous.
    """
    shape = call.inputs[0].shape
    reaches = (_reach(call, Shard(d, even_sizes(shape[d], call.shards)), windows) for d in range(-len(windows), 0))
    return next((reach for reach in reaches if reach is not None), None)


def _reach(call: OpCall, split: Shard, windows: Sequence[SlidingWindow]) -> HaloReach | None:
    """Return the reach of a sharding; None: the dim has samples in it, or not all shards would have a part."""
    inputs = (node.meta["val"] for node in call.node.graph.nodes if node.op == "placeholder")
    batch_sizes = (each.shape[0] for each in inputs if isinstance(each, Tensor) and each.dim())
    if length_symbols(call, split.dim) & {symbol for size in batch_sizes for symbol in _symbols(size)}:
        return None
    return halo_reach(split, call.outputs[0].shape[split.dim], windows[split.dim])


def length_symbols(call: OpCall, dim: int) -> set[object]:
    """Return the symbols on which the length of a dim of the first input depends: none if it is always the same."""
    value = call.inputs[0]
    fake = value.node.meta.get("val")
    fake = fake[value.index] if isinstance(fake, (list, tuple)) else fake
    return set() if fake is None else _symbols(fake.shape[dim])


def _symbols(size: Any) -> set[object]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def spatial_strategy(call: OpCall, reach: HaloReach, emit: Emit, *, on_request: bool = False) -> OpStrategy:
    """Return the strategy of an operator with a halo, whose other inputs are replicated."""
    x, *others = call.inputs
    # Each shard sends the borders that it gives, forward, and their gradients, backward.
    sent = (call.shards - 1) / call.shards * reach.crossed * (x.nbytes // reach.has.length) * (1 + x.differentiable)
    collectives = (1 + x.differentiable) if reach.crossed else 0
    inputs = (reach.has, *(value.replicated for value in others))
    return OpStrategy(inputs, (reach.makes,), "space", emit, reach.makes.share, sent, collectives, on_request)
