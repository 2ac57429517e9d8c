"""A threshold that searches for the highest rate of Δs."""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.aggregation.base import Arrival
from paceline.aggregation.thresholds import Searched
from paceline.core.errors import check_int, check_number
from paceline.core.registry import register
from paceline.core.types import Seconds

# Windows between two trials, once trials have failed often.
_LONGEST_REST = 32


class Climb(NamedTuple):
    """The memory of :class:`Throughput`."""

    k: int = 1
    """K in force."""
    base: int = 1
    """The best so far; another ``k`` is on trial."""
    rate: float = 0.0
    """Δs per second under ``base``, when it was last measured."""
    up: bool = True
    """Direction of the next trial."""
    failures: int = 0
    """Trials since the last that won."""
    rest: int = 0
    """Windows to measure ``base`` again before the next trial."""
    seen: int = 0
    """Δs in this window."""
    since_s: Seconds = 0.0
    """End of its first part, which is not measured."""


@final
@register("throughput")
@dataclass(frozen=True)
class Throughput(Searched[Climb]):
    """The K under which most Δs arrive per second, found by trying: hill climbing on a ladder 1, 2, 3, 4, 5, 7, 9, ...

    Where Δs are summed, each moves A as far whatever K is, so their number counts: a server that takes as
    long for an update of many as of one wants a large K, stragglers want a small one. A window is measured after as
    many Δs as there are replicas, which were computed under the K before::

        window      | - P - | measured | - P - | measured | - P - | measured |
        K            1       1          2       2          3       3              2 was faster than 1: go on to 3
                                                                                  3 is not: back to 2, later try 1

    Args:
        ratio: between two rungs of the ladder, at least one Δ.
        margin: least gain in speed of another K, as a fraction.
        largest: the last rung; None: P.
    """

    ratio: float = 1.25
    margin: float = 0.05
    largest: int | None = None

    def __post_init__(self) -> None:
        check_number("throughput:ratio", self.ratio, "above 1", lambda ratio: ratio > 1, instead=1.25)
        check_number("throughput:margin", self.margin, "of at least 0", lambda margin: margin >= 0, instead=0.05)
        if self.largest is not None:
            check_int("throughput:largest", self.largest, least=1)

    def start(self) -> Climb:
        return Climb()

    def observe(self, memory: Climb, arrival: Arrival) -> Climb:
        seen, first = memory.seen + 1, self.last
        # The first P Δs of a window were computed under the K before: the clock starts after them.
        if seen <= first:
            return memory._replace(seen=seen, since_s=arrival.time_s)
        if seen < first + max(2 * first, 4 * memory.k):
            return memory._replace(seen=seen)
        took_s = arrival.time_s - memory.since_s
        return self._decided(memory._replace(seen=0), (seen - first) / took_s if took_s > 0 else math.inf)

    def at(self, memory: Climb, u: int) -> float:
        del u
        return memory.k

    def _decided(self, memory: Climb, rate: float) -> Climb:
        """Judge a complete window."""
        if memory.k == memory.base:
            return self._measured(memory._replace(rate=rate))
        if rate > memory.rate * (1 + self.margin):
            won = memory._replace(base=memory.k, rate=rate, failures=0)
            return won._replace(k=self._next_rung(won))
        failures = memory.failures + 1
        rest = 0 if failures < 2 else min(_LONGEST_REST, 2 ** (failures - 2))
        return memory._replace(k=memory.base, up=not memory.up, failures=failures, rest=rest)

    def _measured(self, memory: Climb) -> Climb:
        """Try another K, or rest, after the base has been measured again."""
        if memory.rest:
            return memory._replace(rest=memory.rest - 1)
        if self._next_rung(memory) == memory.base:
            memory = memory._replace(up=not memory.up)
        return memory._replace(k=self._next_rung(memory))

    def _next_rung(self, memory: Climb) -> int:
        """Return the next rung above or below the base."""
        k = memory.base
        if memory.up:
            return min(self.last, max(k + 1, math.ceil(k * self.ratio)))
        return max(1, min(k - 1, math.floor(k / self.ratio)))
