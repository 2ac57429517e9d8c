"""Several models on the same workers: concurrently, in turn, or some of both, whichever ends first.

::

    turns   all workers   | model 0 | model 1 | model 2 |       ends after  Σ f_i(N)
    split   n_0 workers   | model 0           |                 ends after  max f_i(n_i)
            n_1 workers   | model 1 | model 2 |                 a group in turn on its share: Σ of its f_i(n)

f_i(n) is the time of model i with n workers at the most, and groups are all partitions of the models; exact for these.
A model's memory is free again after its turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, search

# Partitions of so many are 203.
MOST_MODELS = 6

# Maximal number of equal shares into which workers are divided.
SHARES = 32


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A model, and its number of steps."""

    name: str
    workload: Workload
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """Models that run in turn on some of the workers."""

    workers: int
    jobs: tuple[int, ...]
    """Indices in the list of jobs."""
    plans: tuple[Plan, ...]
    """Plan of each job, in the same order."""
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class WorkerDivision:
    """Division of the workers among the models."""

    shares: tuple[Share, ...]

    @property
    def seconds(self) -> Seconds:
        """Time until the last model is done."""
        return max(share.seconds for share in self.shares)

    def __str__(self) -> str:
        if len(self.shares) == 1:
            return "turns"
        return "split" if all(len(share.jobs) == 1 for share in self.shares) else "split, some in turns"

    def json(self, jobs: Sequence[SharedJob]) -> dict[str, Any]:
        """Return the division as JSON."""
        shares = []
        for share in self.shares:
            each = zip(share.jobs, share.plans, strict=True)
            programs = [
                {"program": jobs[job].name, "strategy": str(plan.strategy), "step_s": plan.cost.step_s}
                for job, plan in each
            ]
            shares.append({"workers": share.workers, "seconds": share.seconds, "programs": programs})
        return {"way": str(self), "seconds": self.seconds, "shares": shares}


@dataclass(frozen=True, slots=True)
class SharingResult:
    """The best divisions of the workers."""

    best: WorkerDivision | None
    """None: some model does not fit all workers."""
    turns: WorkerDivision | None
    split: WorkerDivision | None
    """The best in which each model has workers of its own; None: some does not fit, or there are too few workers."""

    def json(self, jobs: Sequence[SharedJob]) -> dict[str, Any]:
        """Return the result as JSON."""
        ways = {"best": self.best, "turns": self.turns, "split": self.split}
        result: dict[str, Any] = {"programs": [job.name for job in jobs], "fits": self.best is not None}
        return result | {name: None if way is None else way.json(jobs) for name, way in ways.items()}


def shared(
    jobs: Sequence[SharedJob],
    cluster: Cluster,
    objectives: Objectives | None = None,
    overlap_model: OverlapModel | None = None,
) -> SharingResult:
    """Divide workers among models so that all are done first.

    Args:
        jobs: one to six models.
        cluster: whose workers they share.
        objectives: says how many workers there may be; None: all.
        overlap_model: of the runtime.

    Raises:
        InputError: no models, too many, or a model whose batch can't be divided.
    """
    if not 1 <= len(jobs) <= MOST_MODELS:
        raise InputError(f"{len(jobs)} models, but 1 to {MOST_MODELS} can be planned together; write fewer.")
    objectives = objectives or Objectives()
    most = objectives.max_workers(cluster)
    unit = ceil(most / SHARES)
    table = []
    for job in jobs:
        cost_cache, row = CostCache(job.workload, cluster, overlap_model), list[Plan | None]()
        for count in range(unit, most + 1, unit):  # with more workers never slower than with fewer
            # Servers are planned for whole clusters: engine None would let plans with them compete.
            engine = objectives.engine or "distributed"
            limited = replace(objectives, workers=count, simulated=5, engine=engine)
            plans = search(job.workload, cluster, limited, cost_cache=cost_cache).plans
            tried = [plan for plan in (*plans[:1], *row[-1:]) if plan is not None]
            row.append(min(tried, key=lambda plan: plan.cost.step_s, default=None))
        table.append(row)
    divisions = [each for groups in partitions(len(jobs)) if (each := divide(groups, jobs, table, unit))]
    split = [each for each in divisions if len(each.shares) == len(jobs)]
    turns = [each for each in divisions if len(each.shares) == 1]
    best = min(divisions, key=lambda each: (each.seconds, len(each.shares)), default=None)
    return SharingResult(best, next(iter(turns), None), next(iter(split), None))


def partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to put 0 ... count - 1 into groups.

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
    groups: Sequence[tuple[int, ...]], jobs: Sequence[SharedJob], table: Sequence[Sequence[Plan | None]], unit: int
) -> WorkerDivision | None:
    """Return the numbers of workers with which the last group is done first; None where there are too few.

    The table has for each job the fastest plan of each number of shares from 1 on. A group is never slower with more,
    so each gets as few as suffice for T, for the least T for which all suffice.
    """
    many = len(table[0])
    job_s = [[inf if plan is None else plan.cost.step_s * jobs[j].steps for plan in row] for j, row in enumerate(table)]
    times = [[sum(job_s[job][n] for job in group) for n in range(many)] for group in groups]
    # The least T is one of the groups' times.
    for bound in sorted({each for row in times for each in row if each < inf}):
        needed = [next((n for n, each in enumerate(row) if each <= bound), many) for row in times]
        if sum(n + 1 for n in needed) <= many:
            shares = list[Share]()
            for group, row, n in zip(groups, times, needed, strict=True):
                plans = tuple(plan for job in group if (plan := table[job][n]) is not None)
                shares.append(Share((n + 1) * unit, group, plans, row[n]))
            return WorkerDivision(tuple(shares))
    return None
