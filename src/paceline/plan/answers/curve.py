"""How many samples a second with how many workers, and from where on more of them hardly help."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

from paceline.plan.base import Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.habits import Habits
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.known import Known
from paceline.plan.searching.search import search

HALF = 1.5
"""What twice the workers must give, in times of samples a second, to be worth it: half of what they could."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best that so many workers can do, by closed forms."""

    workers: int
    samples_per_s: float
    """0 where nothing fits."""
    strategy: str


@dataclass(frozen=True, slots=True)
class Curve:
    """From one worker to all of them."""

    points: tuple[Point, ...]

    @property
    def knee(self) -> int | None:
        """The workers from which on twice as many give less than one and a half times as much; None: there is none."""
        fitting = [point for point in self.points if point.samples_per_s]
        for fewer, more in pairwise(fitting):
            times, gained = more.workers / fewer.workers, more.samples_per_s / fewer.samples_per_s
            if gained < HALF ** log2(times):
                return fewer.workers
        return None


def curve(
    workload: Workload, cluster: Cluster, asked: Asked, habits: Habits | None = None, known: Known | None = None
) -> Curve:
    """The best for 1, 2, 4, ... workers and for all; of many for 1, 4, 16, ....

    Args:
        workload: what is trained.
        cluster: all of it.
        asked: what counts as best.
        habits: of who carries it out.
        known: of searches before.
    """
    asked, known = replace(asked, simulated=1, delay=None), known or Known.of(workload, cluster, habits)
    most = min(cluster.workers, asked.workers or cluster.workers)
    points = [_point(known, asked.of_workers(count)) for count in reversed(steps(most))]  # all frames are known first
    return Curve(tuple(reversed(points)))


FINE = 64
"""Up to so many workers each doubling is looked at, of more each fourfold."""


def curve_of(plans: Sequence[Plan], most: int) -> Curve:
    """Of plans that were made for each number of workers by itself."""
    found = []
    for count in steps(most):
        fitting = [plan for plan in plans if plan.arrangement.workers <= count and plan.strategy is not None]
        best = max(fitting, key=lambda plan: plan.samples_per_s, default=None)
        found.append(Point(count, best.samples_per_s, str(best.strategy)) if best else Point(count, 0.0, ""))
    return Curve(tuple(found))


def steps(most: int) -> Sequence[int]:
    """Up to so many.

    >>> steps(6), steps(1), steps(100)
    ([1, 2, 4, 6], [1], [1, 4, 16, 64, 100])
    """
    each = 1 if most <= FINE else 2
    return [*(2**k for k in range(0, most.bit_length(), each) if 2**k < most), most]


def _point(known: Known, asked: Asked) -> Point:
    found = search(known.workload, known.cluster, asked, known=known, simulate=False).plans
    assert asked.workers is not None
    if not found:
        return Point(asked.workers, 0.0, "")
    return Point(asked.workers, found[0].samples_per_s, str(found[0].strategy))
