"""Several models on the same workers: side by side, in turns, or some of both, whichever ends first.

::

    turns   all workers   | model 0 | model 1 | model 2 |       ends after  Σ f_i(N)
    split   n_0 workers   | model 0           |                 ends after  max f_i(n_i)
            n_1 workers   | model 1 | model 2 |                 a group in turns on its part: Σ of its f_i(n)

f_i(n) is what model i takes with n workers at the most, and groups are all partitions of the models; exact for these.
A model's memory is free again when it has had its turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search

MOST_MODELS = 6
"""Partitions of so many are 203."""

SHARES = 32
"""Into so many equal shares workers are dealt at the most."""


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A model, and for how many steps."""

    name: str
    workload: Workload
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """Models that take turns on some of the workers."""

    workers: int
    jobs: tuple[int, ...]
    """Their places in the list that was given."""
    plans: tuple[Plan, ...]
    """One each, in the same order."""
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class WorkerDivision:
    """Who has which workers."""

    shares: tuple[Share, ...]

    @property
    def seconds(self) -> Seconds:
        """Until the last is done."""
        return max(share.seconds for share in self.shares)

    def __str__(self) -> str:
        return "turns" if len(self.shares) == 1 else "split" if self._alone else "split, some in turns"

    @property
    def _alone(self) -> bool:
        return all(len(share.jobs) == 1 for share in self.shares)


@dataclass(frozen=True, slots=True)
class Shared:
    """What was found."""

    best: WorkerDivision | None
    """None: some model does not fit all workers."""
    turns: WorkerDivision | None
    split: WorkerDivision | None
    """The best in which each model has workers of its own; None: some does not fit, or there are too few workers."""


Table = Sequence[Sequence[Plan | None]]
"""Of each job, of each number of shares from 1 on, the quickest."""


def shared(
    jobs: Sequence[SharedJob], cluster: Cluster, asked: Objectives | None = None, habits: OverlapModel | None = None
) -> Shared:
    """Who should have which workers so that all are done first.

    Args:
        jobs: one to six models.
        cluster: whose workers they share.
        asked: how many workers at the most; None: all.
        habits: of who carries it out.

    Raises:
        InputError: no models, too many, or a model whose batch can't be divided.
    """
    if not 1 <= len(jobs) <= MOST_MODELS:
        raise InputError(f"{len(jobs)} models, but 1 to {MOST_MODELS} can be planned together; write fewer.")
    asked = asked or Objectives()
    most = min(cluster.workers, asked.workers or cluster.workers)
    unit = ceil(most / SHARES)
    table = [_quickest(job, cluster, asked, habits, range(unit, most + 1, unit)) for job in jobs]
    divisions = [found for groups in partitions(len(jobs)) if (found := divide(groups, jobs, table, unit))]
    alone = [found for found in divisions if len(found.shares) == len(jobs)]
    together = [found for found in divisions if len(found.shares) == 1]
    best = min(divisions, key=lambda found: (found.seconds, len(found.shares)), default=None)
    return Shared(best, next(iter(together), None), next(iter(alone), None))


def _quickest(
    job: SharedJob, cluster: Cluster, asked: Objectives, habits: OverlapModel | None, counts: Sequence[int]
) -> list[Plan | None]:
    """With each number of workers at the most: never slower than with fewer."""
    known, found = CostCache.of(job.workload, cluster, habits), list[Plan | None]()
    for count in counts:
        plans = search(job.workload, cluster, replace(asked, workers=count, simulated=5), known=known).plans
        tried = [plan for plan in (*plans[:1], *found[-1:]) if plan is not None]
        found.append(min(tried, key=lambda plan: plan.cost.step_s, default=None))
    return found


def partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put 0 ... count - 1 into groups.

    >>> list(partitions(2))
    [((0, 1),), ((0,), (1,))]
    """
    if not count:
        yield ()
        return
    last = count - 1
    for groups in partitions(last):
        yield from ((*groups[:at], (*group, last), *groups[at + 1 :]) for at, group in enumerate(groups))
        yield (*groups, (last,))


def divide(
    groups: Sequence[tuple[int, ...]], jobs: Sequence[SharedJob], table: Table, unit: int
) -> WorkerDivision | None:
    """The numbers of workers with which the last group is done first; None where they are too few.

    A group is never slower with more, so each gets as few as do within T, for the least T with which that is enough.
    """
    many = len(table[0])
    times = [[_turns_s(group, jobs, table, n) for n in range(many)] for group in groups]
    for bound in sorted({each for row in times for each in row if each < inf}):
        needed = [next((n for n, each in enumerate(row) if each <= bound), many) for row in times]
        if sum(n + 1 for n in needed) <= many:
            return WorkerDivision(
                tuple(_share(group, n, jobs, table, unit) for group, n in zip(groups, needed, strict=True))
            )
    return None


def _turns_s(group: Sequence[int], jobs: Sequence[SharedJob], table: Table, n: int) -> Seconds:
    plans = [table[job][n] for job in group]
    return sum(
        inf if plan is None else plan.cost.step_s * jobs[job].steps for job, plan in zip(group, plans, strict=True)
    )


def _share(group: tuple[int, ...], n: int, jobs: Sequence[SharedJob], table: Table, unit: int) -> Share:
    plans = tuple(plan for job in group if (plan := table[job][n]) is not None)
    return Share((n + 1) * unit, group, plans, _turns_s(group, jobs, table, n))
