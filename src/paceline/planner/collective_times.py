"""Measured times of collectives and messages: piecewise-linear curves by size, and their extension to other groups.

A group that was not measured follows from one that was, by the bytes that a worker moves::

    moved(all_reduce, n) = 2 (n - 1) / n      moved(broadcast) = moved(send) = 1
    moved(reduce_scatter, n) = moved(all_gather, n) = moved(all_to_all, n) = (n - 1) / n

    t'(bytes) = α · rounds' / rounds + (t(bytes) - α) · moved' / moved        α: of a message without bytes

Source: the bytes of rings are those of nccl-tests' PERFORMANCE.md ("bus bandwidth"). Rounds that grow with log2 n fit
NCCL on the 8 A100 of a host best, of n - 1, √n, log2 n and none.

::

    time |                           x        beyond the last: by the bandwidth of the last few
         |                       .  ´
         |                 x  ´               between two knots: a straight line, so each piece has a latency and a
         |        x  .  ´                     bandwidth of its own (α + bytes / β)
         |  x  ´                              below the first: its piece's line, but no faster than proportional
         +--------------------------- bytes
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite, log2
from operator import itemgetter
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import Collective
from paceline.planner.cluster import DeviceGroup, Messages

# LatencyCurve of a curve; with those that fit best, lines between them are 0.4 % off on NCCL's curves of 11 points.
MOST = 6


# Ratio of two sizes that gives a bandwidth: from 128 MiB up to 1 GiB 3.6 % off on A100, where the slope of the last
# piece is 4.6 % off (benchmarks/planner/messages.md).
_BANDWIDTH_SPAN = 8


class Knot(NamedTuple):
    """Measured time of a message of a size."""

    size_bytes: float
    seconds: Seconds


@final
@dataclass(frozen=True)
class LatencyCurve:
    """Time by size, linear between knots.

    Args:
        knots: by size, each size once.

    Raises:
        InputError: none, a size or a time that is not above 0, or sizes that do not grow.

    >>> curve = LatencyCurve((Knot(1e6, 5e-5), Knot(1e7, 1.4e-4)))
    >>> [round(curve.seconds(size) * 1e6, 3) for size in (0, 1e6, 2e6, 1e7, 1e8)]
    [40.0, 50.0, 60.0, 140.0, 1040.0]
    """

    knots: tuple[Knot, ...]

    def __post_init__(self) -> None:
        if not self.knots:
            raise InputError("a curve without knots; write at least one (bytes, seconds).")
        for size, seconds in self.knots:
            if not (0 < size < inf and 0 < seconds < inf):
                raise InputError(f"a knot of {size:g} bytes in {seconds:g} s; write both as finite numbers above 0.")
        sizes = [knot.size_bytes for knot in self.knots]
        if sizes != sorted(set(sizes)):
            raise InputError(f"knots at {sizes} bytes; write them by size, each size once.")

    @classmethod
    def of(cls, points: Iterable[tuple[float, Seconds]], most: int = MOST) -> "LatencyCurve":
        """Fit a curve through those of the measured points that leave the least mean relative error at all of them.

        By dynamic programming: with j knots among the first i points, error[j][i] = min over h < i of
        error[j - 1][h] + off[h][i], where off[h][i] is the error of the points between h and i on a line.

        Args:
            points: (bytes, seconds), each size once.
            most: knots to keep, at least two; the smallest and the largest size are among them.

        >>> line = [(float(size), 1e-5 + size * 1e-9) for size in range(1000, 9000, 1000)]
        >>> [knot.size_bytes for knot in LatencyCurve.of(line, most=2).knots]
        [1000.0, 8000.0]
        """
        if most < 2:
            raise InputError(f"most={most} knots leave out an end of the curve; write most=2 or more.")
        knots = cls(tuple(Knot(*point) for point in sorted(points))).knots
        count = len(knots)
        sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*knots, strict=True))
        off = np.zeros((count, count))
        off[np.tril_indices(count, -1)] = inf
        for h in range(count):
            for i in range(h + 2, count):
                inside = slice(h + 1, i)
                line = np.interp(sizes[inside], sizes[[h, i]], seconds[[h, i]])
                off[h, i] = float(np.sum(np.abs(line / seconds[inside] - 1.0)))
        error, previous = off[0], list[NDArray[np.int64]]()
        for _ in range(min(most, count) - 2):
            paths = error[:, None] + off
            previous.append(np.argmin(paths, axis=0))
            error = np.min(paths, axis=0)
        kept = [count - 1]
        for chosen in reversed(previous):
            kept.append(int(chosen[kept[-1]]))
        return cls(tuple(knots[i] for i in sorted({0, *kept})))

    def seconds(self, size_bytes: float) -> Seconds:
        """Return the time of a message of so many bytes.

        Beyond the last knot it grows as from one of at most an eighth of its size, lest one noisy time decides; as a
        message without latency where times do not grow.
        """
        if not (size_bytes >= 0 and isfinite(size_bytes)):
            raise InputError(f"a message of {size_bytes:g} bytes; write a number of at least 0.")
        first, last = self.knots[0], self.knots[-1]
        if size_bytes > last.size_bytes:
            return last.seconds + (size_bytes - last.size_bytes) * self._beyond_s_per_byte
        piece = bisect_right(self.knots, size_bytes, 1, max(1, len(self.knots) - 1), key=itemgetter(0)) - 1
        latency_s, s_per_byte = self._lines[piece]
        least = first.seconds * min(1.0, size_bytes / first.size_bytes)
        return max(latency_s + size_bytes * s_per_byte, least)

    @property
    def latency_s(self) -> Seconds:
        """Time of a message without bytes: the start of the first line."""
        return max(0.0, self._lines[0][0])

    @cached_property
    def _beyond_s_per_byte(self) -> float:
        last = self.knots[-1]
        earlier = [k for k in self.knots[:-1] if k.size_bytes <= last.size_bytes / _BANDWIDTH_SPAN] or self.knots[:1]
        slope = _line(earlier[-1], last)[1] if len(self.knots) > 1 else 0.0
        return slope if slope > 0 else last.seconds / last.size_bytes

    @cached_property
    def _lines(self) -> list[tuple[Seconds, float]]:
        """(latency, seconds a byte) of each piece."""
        if len(self.knots) == 1:
            return [(0.0, self.knots[0].seconds / self.knots[0].size_bytes)]
        return [_line(a, b) for a, b in pairwise(self.knots)]


def _line(a: Knot, b: Knot) -> tuple[Seconds, float]:
    slope = (b.seconds - a.seconds) / (b.size_bytes - a.size_bytes)
    return a.seconds - slope * a.size_bytes, slope


class GroupCollective(NamedTuple):
    """A collective in a group: it has one curve."""

    collective: Collective
    group: DeviceGroup

    @property
    def moved(self) -> float:
        """Bytes that each worker sends, of those that :class:`~paceline.planner.base.Call` counts.

        >>> GroupCollective("all_reduce", DeviceGroup(4, 4)).moved, GroupCollective("send", DeviceGroup(2, 2)).moved
        (1.5, 1.0)
        """
        if self.collective in ("send", "broadcast"):
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * (self.group.size - 1) / self.group.size

    @property
    def rounds(self) -> float:
        """Growth of latency: 2 log2 n for an all_reduce, half of it for collectives of one phase, 1 for a send."""
        if self.collective == "send":
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * log2(self.group.size)

    def distance(self, measured: "GroupCollective") -> tuple[bool, float]:
        """Return the distance to a measured one: by collective, then by the sizes of the group and of its hosts."""
        larger, denser = (own / other for own, other in zip(self.group, measured.group, strict=True))
        return self.collective != measured.collective, abs(log2(larger)) + abs(log2(denser))


@final
@dataclass(frozen=True)
class Measured(Messages):
    """Times from measured curves, and from links where nothing was measured.

    A group on one host follows from the nearest one that was measured on a host, one over several hosts from the
    nearest that was measured over several. Where none was, ``otherwise`` has the time between hosts, with 1/g of the
    bytes for each of the g workers on a host, after those of each host.

    Args:
        curves: at least one.
        otherwise: replaces missing curves; None: such a group is refused.

    Raises:
        InputError: no curve, or one of a group of a single worker.

    >>> pair = LatencyCurve((Knot(1e6, 1.1e-3), Knot(2e6, 2.1e-3)))
    >>> messages = Measured({GroupCollective("all_reduce", DeviceGroup(2, 2)): pair})
    >>> tuple(round(messages.seconds(name, 1e6, DeviceGroup(2, 2)), 9) for name in ("all_reduce", "send"))
    (0.0011, 0.00105)
    """

    curves: Mapping[GroupCollective, LatencyCurve]
    otherwise: Messages | None = None
    _nearest: dict[GroupCollective, GroupCollective | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.curves:
            raise InputError("no curve was measured; write Described(links), or measure one all_reduce.")
        for measured in self.curves:
            if measured.group.size < 2:
                raise InputError(f"{measured}: one worker alone sends nothing; write a group of two or more.")

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        if group.size <= 1:
            return 0.0
        requested = GroupCollective(collective, group)
        if requested not in self._nearest:
            # Links inside a host say nothing of those between hosts, and the reverse.
            similar = [each for each in self.curves if (each.group.hosts == 1) == (group.hosts == 1)]
            self._nearest[requested] = min(similar, key=requested.distance, default=None)
        measured = self._nearest[requested]
        if measured is None:
            if self.otherwise is None:
                place = "one host" if group.hosts == 1 else f"{group.hosts} hosts"
                raise InputError(
                    f"nothing was measured on {place}, for {collective} among {group.size}; write "
                    "otherwise=Described(Links(…)) with what the links' data sheets say."
                )
            if group.hosts == 1 or group.on_host == 1 or collective in ("send", "broadcast"):
                return self.otherwise.seconds(collective, size_bytes, group)
            # On several hosts a collective runs on each, then between one worker of each with its part of the bytes.
            inside_s = self.seconds(collective, size_bytes, DeviceGroup(group.on_host, group.on_host))
            between = DeviceGroup(group.hosts, 1)
            return inside_s + self.otherwise.seconds(collective, size_bytes / group.on_host, between)
        rounds, moved = requested.rounds / measured.rounds, requested.moved / measured.moved
        curve, total_s = self.curves[measured], self.curves[measured].seconds(size_bytes)
        if rounds == moved == 1.0:
            return total_s
        # Latency scales with rounds, the rest with the bytes that each worker moves.
        latency_s = min(curve.latency_s, total_s)
        return latency_s * rounds + (total_s - latency_s) * moved
