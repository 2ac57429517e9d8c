"""Operators that look through windows along a divided dim: which elements each shard needs, and who has them.

A shard that makes some elements of the result needs those of the input that their windows see; where a window crosses
the border between two shards it needs a few of a neighbour's, or of more of them where parts are small::

    size 3, stride 1, 1 before            shard 0        shard 1
    input                           .   0   1   2   3 | 4   5   6   7   .       . is padding
    result                              0   1   2   3 | 4   5   6   7
    needs                            0 1 2 3 4        |  3 4 5 6 7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from paceline.replica.tensor.layouts import Split, shares


@final
@dataclass(frozen=True)
class Windows:
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
class Reach:
    """What each shard needs of a dim.

    Args:
        has: how the input is divided along it, in one block.
        makes: how the result is.
        windows: through which it is seen.
    """

    has: Split
    makes: Split
    windows: Windows

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
        start = self.has.starts()[shard]
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
        first = self.makes.starts()[shard]
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


def through(has: Split, length: int, windows: Windows) -> Reach | None:
    """Of a result of this length; None: not all shards would have a part of it.

    It is divided as the input is where both are as long, else as evenly as can be: operators side by side agree on it.

    >>> through(Split(-2, (4, 4)), 4, Windows(size=3, stride=2, before=1)).makes
    Split(dim=-2, sizes=(2, 2), outer=1)
    """
    if has.outer > 1 or not all(has.sizes) or length < len(has.sizes):
        return None
    makes = has if length == has.length else Split(has.dim, shares(length, len(has.sizes)))
    return Reach(has, makes, windows)


def expanded(given: int | Sequence[int], dims: int) -> list[int]:
    """A number for each dim, of one for all of them or one for each.

    >>> expanded([3], 2), expanded(1, 3), expanded((1, 2), 2)
    ([3, 3], [1, 1, 1], [1, 2])
    """
    each = [given] if isinstance(given, int) else list(given)
    return each * dims if len(each) == 1 else each
