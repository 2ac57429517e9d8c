"""Measured times of collectives and messages: latency curves through few points, and what follows for other sizes.

What messages take where it was measured: curves by collective and group, and what follows from them for others.

What was not measured follows from what was, by the bytes that a worker moves::

    moved(all_reduce, n) = 2 (n - 1) / n      moved(broadcast) = moved(send) = 1
    moved(reduce_scatter, n) = moved(all_gather, n) = moved(all_to_all, n) = (n - 1) / n

    t'(bytes) = α · rounds' / rounds + (t(bytes) - α) · moved' / moved        α: of a message without bytes

Source: the bytes of rings are those of nccl-tests' PERFORMANCE.md ("bus bandwidth"). That rounds grow with log2 n is
what fits NCCL on the 8 A100 of a host best, of n - 1, √n, log2 n and none.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite, log2
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import Collective
from paceline.planner.cluster import DeviceGroup, Messages

MOST = 6
"""Knots of a curve; with those that fit best, lines between them are 0.4 % off on NCCL's curves of 11 points."""


_APART = 8
"""Times as large is what tells a bandwidth: from 128 MiB up to 1 GiB 3.6 % off on A100, where the last piece's own is
4.6 % off (benchmarks/planner/messages.md)."""


class Knot(NamedTuple):
    """What a message of a size took."""

    size_bytes: float
    seconds: Seconds


class _Line(NamedTuple):
    latency_s: Seconds
    s_per_byte: float

    def at(self, size_bytes: float) -> Seconds:
        return self.latency_s + size_bytes * self.s_per_byte


@final
@dataclass(frozen=True)
class Knots:
    """Times by size.

    Args:
        knots: by size, each size once.

    Raises:
        InputError: none, a size or a time that is not above 0, or sizes that do not grow.

    >>> curve = Knots((Knot(1e6, 5e-5), Knot(1e7, 1.4e-4)))
    >>> [round(curve.seconds(size) * 1e6, 3) for size in (0, 1e6, 2e6, 1e7, 1e8)]
    [40.0, 50.0, 60.0, 140.0, 1040.0]
    """

    knots: tuple[Knot, ...]

    def __post_init__(self) -> None:
        if not self.knots:
            raise InputError("a curve without knots; write at least one (bytes, seconds).")
        for size, took in self.knots:
            if not (0 < size < inf and 0 < took < inf):
                raise InputError(f"a knot of {size:g} bytes in {took:g} s; write both as finite numbers above 0.")
        sizes = [knot.size_bytes for knot in self.knots]
        if sizes != sorted(set(sizes)):
            raise InputError(f"knots at {sizes} bytes; write them by size, each size once.")

    @classmethod
    def of(cls, points: Iterable[tuple[float, Seconds]], most: int = MOST) -> "Knots":
        """Through those of the measured points that leave the least mean relative error at all of them.

        Args:
            points: (bytes, seconds), each size once.
            most: knots to keep, at least two; the smallest and the largest size are among them.

        >>> line = [(float(size), 1e-5 + size * 1e-9) for size in range(1000, 9000, 1000)]
        >>> [knot.size_bytes for knot in Knots.of(line, most=2).knots]
        [1000.0, 8000.0]
        """
        if most < 2:
            raise InputError(f"most={most} knots leave out an end of the curve; write most=2 or more.")
        known = cls(tuple(Knot(*point) for point in sorted(points)))
        return cls(tuple(known.knots[i] for i in _kept(known.knots, most)))

    def seconds(self, size_bytes: float) -> Seconds:
        """What a message of so many bytes takes."""
        if not (size_bytes >= 0 and isfinite(size_bytes)):
            raise InputError(f"a message of {size_bytes:g} bytes; write a number of at least 0.")
        first, last = self.knots[0], self.knots[-1]
        if size_bytes > last.size_bytes:
            return last.seconds + (size_bytes - last.size_bytes) * self._beyond_s_per_byte
        line = self._lines[bisect_right(self._inner, size_bytes)]
        least = first.seconds * min(1.0, size_bytes / first.size_bytes)
        return max(line.at(size_bytes), least)

    @property
    def latency_s(self) -> Seconds:
        """Of a message without bytes: where the first piece begins."""
        return max(0.0, self._lines[0].latency_s)

    @cached_property
    def _inner(self) -> list[float]:
        """Where one piece ends and the next begins."""
        return [knot.size_bytes for knot in self.knots[1:-1]]

    @cached_property
    def _beyond_s_per_byte(self) -> float:
        """Towards the last knot from one of at most an eighth of its size, lest one noisy time decides; that of a
        message without latency where times do not grow."""
        last = self.knots[-1]
        earlier = [knot for knot in self.knots[:-1] if knot.size_bytes <= last.size_bytes / _APART] or self.knots[:1]
        slope = _through(earlier[-1], last).s_per_byte if len(self.knots) > 1 else 0.0
        return slope if slope > 0 else last.seconds / last.size_bytes

    @cached_property
    def _lines(self) -> list[_Line]:
        if len(self.knots) == 1:
            return [_Line(0.0, self.knots[0].seconds / self.knots[0].size_bytes)]
        return [_through(a, b) for a, b in pairwise(self.knots)]


def _through(a: Knot, b: Knot) -> _Line:
    slope = (b.seconds - a.seconds) / (b.size_bytes - a.size_bytes)
    return _Line(a.seconds - slope * a.size_bytes, slope)


def _kept(points: Sequence[Knot], most: int) -> list[int]:
    """Which points to keep: with j kept of the first i, error[j][i] is the least sum of what lies between them.

    error[j][i] = min over h < i of error[j - 1][h] + off[h][i]
    """
    count = len(points)
    off = _off(points)
    error, before = off[0], list[NDArray[np.int64]]()
    for _ in range(min(most, count) - 2):
        paths = error[:, None] + off
        before.append(np.argmin(paths, axis=0))
        error = np.min(paths, axis=0)
    kept = [count - 1]
    for chosen in reversed(before):
        kept.append(int(chosen[kept[-1]]))
    return sorted({0, *kept})


def _off(points: Sequence[Knot]) -> NDArray[np.float64]:
    """[h, i]: the summed relative errors of the points between h and i, on the line from one to the other."""
    sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    off = np.zeros((len(points), len(points)))
    off[np.tril_indices(len(points), -1)] = inf
    for h in range(len(points)):
        for i in range(h + 2, len(points)):
            inside = slice(h + 1, i)
            line = np.interp(sizes[inside], sizes[[h, i]], seconds[[h, i]])
            off[h, i] = float(np.sum(np.abs(line / seconds[inside] - 1.0)))
    return off


class Measurable(NamedTuple):
    """What has a curve: a collective in a group."""

    collective: Collective
    group: DeviceGroup

    @property
    def moved(self) -> float:
        """Bytes that each worker sends, of those that :class:`~paceline.planner.base.Call` counts.

        >>> Measurable("all_reduce", DeviceGroup(4, 4)).moved, Measurable("send", DeviceGroup(2, 2)).moved
        (1.5, 1.0)
        """
        if self.collective in ("send", "broadcast"):
            return 1.0
        passes = 2 if self.collective == "all_reduce" else 1
        return passes * (self.group.size - 1) / self.group.size

    @property
    def rounds(self) -> float:
        """How latency grows: 2 log2 n for an all_reduce, half of it for what goes one way, 1 for a send."""
        if self.collective == "send":
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * log2(self.group.size)

    def other_than(self, known: "Measurable") -> tuple[bool, float]:
        """How far it is from what is known: another collective first, then the size of the group and of its hosts."""
        larger, denser = (mine / other for mine, other in zip(self.group, known.group, strict=True))
        return self.collective != known.collective, abs(log2(larger)) + abs(log2(denser))


@final
@dataclass(frozen=True)
class Measured(Messages):
    """From what was measured, and from links where nothing was.

    A group on one host follows from the nearest one that was measured on a host, one over several hosts from the
    nearest that was measured over several. Where none was, hosts meet over ``otherwise``, with 1/g of the bytes for
    each of the g workers on a host, after the g have met.

    Args:
        curves: at least one.
        otherwise: what takes the place of curves that there are none of; None: such a group is refused.

    Raises:
        InputError: no curve, or one of a group of a single worker.

    >>> from paceline.planner.collective_times import Knot
    >>> pair = Knots((Knot(1e6, 1.1e-3), Knot(2e6, 2.1e-3)))
    >>> messages = Measured({Measurable("all_reduce", DeviceGroup(2, 2)): pair})
    >>> tuple(round(messages.seconds(name, 1e6, DeviceGroup(2, 2)), 9) for name in ("all_reduce", "send"))
    (0.0011, 0.00105)
    """

    curves: Mapping[Measurable, Knots]
    otherwise: Messages | None = None
    _found: dict[Measurable, tuple[Measurable, float, float] | None] = field(
        default_factory=dict[Measurable, tuple[Measurable, float, float] | None], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.curves:
            raise InputError("no curve was measured; write Described(links), or measure one all_reduce.")
        for known in self.curves:
            if known.group.size < 2:
                raise InputError(f"{known}: one worker alone sends nothing; write a group of two or more.")

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        if group.size <= 1:
            return 0.0
        asked = Measurable(collective, group)
        if asked not in self._found:
            self._found[asked] = self._follows(asked)
        found = self._found[asked]
        return self._apart(asked, size_bytes) if found is None else self._scaled(found, size_bytes)

    def _follows(self, asked: Measurable) -> tuple[Measurable, float, float] | None:
        """From which curve, and by how much its latency and its bytes grow; None: nothing alike was measured."""
        alike = [known for known in self.curves if (known.group.hosts == 1) == (asked.group.hosts == 1)]
        if not alike:
            return None
        known = min(alike, key=asked.other_than)
        return known, asked.rounds / known.rounds, asked.moved / known.moved

    def _scaled(self, found: tuple[Measurable, float, float], size_bytes: float) -> Seconds:
        known, rounds, moved = found
        curve = self.curves[known]
        if rounds == moved == 1.0:
            return curve.seconds(size_bytes)
        latency_s = min(curve.latency_s, curve.seconds(size_bytes))
        return latency_s * rounds + (curve.seconds(size_bytes) - latency_s) * moved

    def _apart(self, asked: Measurable, size_bytes: float) -> Seconds:
        """Where workers are placed as no measured ones were."""
        collective, group = asked
        if self.otherwise is None:
            place = "one host" if group.hosts == 1 else f"{group.hosts} hosts"
            raise InputError(
                f"nothing was measured on {place}, for {collective} among {group.size}; write "
                "otherwise=Described(Links(…)) with what the links' data sheets say."
            )
        if group.hosts == 1 or group.on_host == 1 or collective in ("send", "broadcast"):
            return self.otherwise.seconds(collective, size_bytes, group)
        return sum(self._in_turn(asked, size_bytes, self.otherwise))

    def _in_turn(self, asked: Measurable, size_bytes: float, between: Messages) -> Iterator[Seconds]:
        """On each host and then between hosts, where one of each host meets the others with its part of the bytes."""
        collective, group = asked
        yield self.seconds(collective, size_bytes, DeviceGroup(group.on_host, group.on_host))
        yield between.seconds(collective, size_bytes / group.on_host, DeviceGroup(group.hosts, 1))
