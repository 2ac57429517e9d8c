"""Operators that look through windows along a sharded dim, and the exchange of halos that they need.

A shard's part of a tensor with what it needs of its neighbours': a halo.

::

                 forward                               backward
    borders      all-gather                            reduce-scatter: what others found of mine is added to it
    padding      put around                            dropped

Borders are small beside the tensor, so every shard gets those of all: one collective each way, which sends k - 1 times
what neighbours alone would send each other.

A shard that makes some elements of the result needs those of the input that their windows cover; where a window crosses
the border between two shards it needs a few of a neighbour's, or of several where parts are small::

    size 3, stride 1, 1 before            shard 0        shard 1
    input                           .   0   1   2   3 | 4   5   6   7   .       . is padding
    result                              0   1   2   3 | 4   5   6   7
    needs                            0 1 2 3 4        |  3 4 5 6 7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.core.errors import InputError
from paceline.replica.tensor.base import OpCall
from paceline.replica.tensor.placements import Shard, even_sizes
from paceline.replica.tensor.tp_group import TPCollectives


@final
@dataclass(frozen=True)
class SlidingWindow:
    """Along one dim: element i of the result sees those of the input at i·stride - before + j·dilation, j < size."""

    size: int
    stride: int = 1
    before: int = 0
    """Elements of padding in front of the first."""
    dilation: int = 1
    after: int | None = None
    """Elements of padding behind the last; None: as many as before."""

    @property
    def reach(self) -> int:
        """From the first element that is seen to the one behind the last."""
        return self.dilation * (self.size - 1) + 1

    @property
    def even(self) -> bool:
        """Whether there is as much padding on either side."""
        return self.after in (None, self.before)


@final
@dataclass(frozen=True)
class HaloReach:
    """What each shard needs of a dim.

    Args:
        has: how the input is divided along it, in one block.
        makes: how the result is.
        windows: through which it is seen.
    """

    has: Shard
    makes: Shard
    windows: SlidingWindow

    def needs(self, shard: int) -> range:
        """The elements of the input that a shard's part of the result sees."""
        first, end = self._seen(shard)
        first = min(max(first, 0), self.has.length)
        return range(first, max(min(end, self.has.length), first))

    def padding(self, shard: int) -> tuple[int, int]:
        """How many more it sees, before and behind all that there are."""
        first, end = self._seen(shard)
        outside = end - first - len(self.needs(shard))
        before = min(max(-first, 0), outside)
        return before, outside - before

    def own(self, shard: int) -> range:
        """The elements that a shard has."""
        start = self.has.offsets[shard]
        return range(start, start + self.has.sizes[shard])

    def of(self, shard: int, other: int) -> range:
        """The elements that a shard needs of another one."""
        return common(self.needs(shard), self.own(other))

    def given(self, shard: int) -> tuple[int, ...]:
        """The elements of a shard that others need, in order."""
        others = (other for other in range(len(self.has.sizes)) if other != shard)
        return tuple(sorted({each for other in others for each in self.of(other, shard)}))

    @cached_property
    def crossed(self) -> int:
        """How many elements all shards give to others: 0 where no window crosses a border."""
        return sum(len(self.given(shard)) for shard in range(len(self.has.sizes)))

    def _seen(self, shard: int) -> tuple[int, int]:
        """From the first element of its windows to the one behind the last, padding included."""
        first = self.makes.offsets[shard]
        last = first + self.makes.sizes[shard] - 1
        start, step = self.windows.before, self.windows.stride
        return first * step - start, last * step - start + self.windows.reach


def common(first: range, second: range) -> range:
    """The numbers that are in both of two ranges without gaps.

    >>> common(range(2, 6), range(4, 9))
    range(4, 6)
    """
    start = max(first.start, second.start)
    return range(start, max(min(first.stop, second.stop), start))


def halo_reach(has: Shard, length: int, windows: SlidingWindow) -> HaloReach | None:
    """Of a result of this length; None: not all shards would have a part of it.

    It is divided as the input is where both are as long, else as evenly as can be: operators side by side agree on it.

    >>> through(Shard(-2, (4, 4)), 4, WindowOps(size=3, stride=2, before=1)).makes
    Shard(dim=-2, sizes=(2, 2), blocks=1)
    """
    if has.blocks > 1 or not all(has.sizes) or length < len(has.sizes):
        return None
    makes = has if length == has.length else Shard(has.dim, even_sizes(length, len(has.sizes)))
    return HaloReach(has, makes, windows)


def per_dim(given: int | Sequence[int], dims: int) -> list[int]:
    """A number for each dim, of one for all of them or one for each.

    >>> expanded([3], 2), expanded(1, 3), expanded((1, 2), 2)
    ([3, 3], [1, 1, 1], [1, 2])
    """
    each = [given] if isinstance(given, int) else list(given)
    return each * dims if len(each) == 1 else each


@final
class Halo(nn.Module):
    """A part -> all elements that the windows of a shard see, padding included.

    Args:
        shards: who have the parts.
        name: of the tensor, for those who wait.
        reach: what each of them needs.
        around: padding of other dims, as :func:`torch.nn.functional.pad` has it.
        fill: what padding is.
    """

    def __init__(
        self, shards: TPCollectives, name: str, reach: HaloReach, around: Sequence[int] = (), *, fill: float = 0.0
    ) -> None:
        super().__init__()
        self.shards, self.name, self.reach, self._fill = shards, name, reach, fill
        self._padding = _padding(reach.has.dim, reach.padding(shards.rank), around)

    def forward(self, part: Tensor) -> Tensor:
        """The elements that this shard needs; raises InputError where the tensor is longer or shorter than planned."""
        dim, length = self.reach.has.dim, self.reach.has.sizes[self.shards.rank]
        if part.shape[dim] != length:
            raise InputError(
                f"{self.name} has {part.shape[dim]} elements along dim {dim} on shard {self.shards.rank}, and was "
                f"planned for {length}; give batches of the same size as the first, or leave its module whole in "
                "shard_rules"
            )
        made: Tensor = _Through.apply(part, self) if self.reach.crossed else self.mine(part)  # type: ignore[no-untyped-call]
        return pad(made, self._padding, value=self._fill) if any(self._padding) else made

    def mine(self, part: Tensor) -> Tensor:
        """Of the own part, what the own windows see."""
        rank = self.shards.rank
        found = self.reach.of(rank, rank)
        return part.narrow(self.reach.has.dim, found.start - self.reach.own(rank).start if found else 0, len(found))

    def there(self, part: Tensor) -> Tensor:
        """Of a value: with what others have."""
        reach, rank, dim = self.reach, self.shards.rank, self.reach.has.dim
        shapes = [_sized(part, dim, len(reach.given(shard))) for shard in range(self.shards.count)]
        each = self.shards.all_gather(_picked(part, dim, self._places()), shapes, f"the borders of {self.name}")
        pieces = [self.mine(part) if s == rank else given.narrow(dim, *self._of(s)) for s, given in enumerate(each)]
        return torch.cat(pieces, dim)

    def back(self, gradient: Tensor) -> Tensor:
        """Of a gradient: each shard's own, with what others found of it."""
        reach, rank, dim = self.reach, self.shards.rank, self.reach.has.dim
        lengths = [len(reach.of(rank, shard)) for shard in range(self.shards.count)]
        pieces = torch.split(gradient, lengths, dim)
        parts = [self._put(piece, shard) for shard, piece in enumerate(pieces)]
        found = self.shards.reduce_scatter(parts, f"the gradient of the borders of {self.name}")
        made = gradient.new_zeros(_sized(gradient, dim, reach.has.sizes[rank]))
        self.mine(made).copy_(pieces[rank])
        return made.index_add_(dim, torch.tensor(self._places(), device=made.device, dtype=torch.int64), found)

    def _places(self) -> list[int]:
        """Where in the own part those elements are that others need."""
        start = self.reach.own(self.shards.rank).start
        return [each - start for each in self.reach.given(self.shards.rank)]

    def _of(self, shard: int) -> tuple[int, int]:
        """Where, in what another shard gives, what this one needs begins, and how long it is."""
        needed = self.reach.of(self.shards.rank, shard)
        return sum(each < needed.start for each in self.reach.given(shard)) if needed else 0, len(needed)

    def _put(self, piece: Tensor, shard: int) -> Tensor:
        """The gradient of what another shard gave; of its own a shard tells nobody."""
        dim = self.reach.has.dim
        made = piece.new_zeros(_sized(piece, dim, len(self.reach.given(shard))))
        if shard != self.shards.rank:
            made.narrow(dim, *self._of(shard)).copy_(piece)
        return made

    def extra_repr(self) -> str:
        return f"{self.name}, {self.reach.has} -> {self.reach.makes}"


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.there(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.halo.back(gradients[0]), None


def _sized(tensor: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    shape[dim] = length
    return tuple(shape)


def _picked(part: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    return part.index_select(part.dim() + dim, torch.tensor(places, device=part.device, dtype=torch.int64))


def _padding(dim: int, own: tuple[int, int], around: Sequence[int]) -> list[int]:
    """With that of the divided dim, which is counted from the last."""
    made = [*around, *[0] * (-2 * dim - len(around))]
    made[-2 * dim - 2 : -2 * dim] = own
    return made


def uneven_padding(windows: Sequence[SlidingWindow]) -> list[int]:
    """The padding of those dims that have more on one side, as :func:`torch.nn.functional.pad` has it."""
    return [side for each in reversed(windows) for side in ((0, 0) if each.even else (each.before, each.after or 0))]


def halo_bytes(call: OpCall, reach: HaloReach) -> float:
    """Bytes from each shard for the borders of an operator's first tensor, forward and backward."""
    x = call.inputs[0]
    element = x.nbytes // reach.has.length
    return (call.shards - 1) / call.shards * reach.crossed * element * (1 + x.differentiable)


def halo_collectives(call: OpCall, reach: HaloReach) -> int:
    """That it takes, forward and backward."""
    return (1 + call.inputs[0].differentiable) if reach.crossed else 0
