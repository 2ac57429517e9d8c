"""Plans of a program for this host by closed forms, each corrected by a short run of its kind.

Plans of a program for this host by closed forms, each held to a short run of its kind.

::

    computing   foretold + what the short run's pieces took beside their closed form, by passes through its stages
    the rest    foretold + what the short run's step took beside that
    less        than foretold: that many times as much, for what takes less was measured while the machine did more else

The pieces of a step, measured one by one on processes that are as busy as its workers will be.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from paceline.comm.fork_server import ForkServer
from paceline.core.types import Seconds
from paceline.engine.base import Budget, Job
from paceline.engine.dry_run import dry_run
from paceline.engine.run_context import first_batch
from paceline.engine.step_profile.predict import Forecast, forecast, update_s
from paceline.planner.base import Arrangement, Cost, Plan, WorkerMemory
from paceline.planner.program.measured_workload import MeasuredWorkload, cluster_of
from paceline.planner.program.profile import Busy, Pieces, Profile, ShortRun, kind
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search
from paceline.program import Program
from paceline.strategy import Strategy


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def job_for(program: Program, strategy: Strategy | str, steps: int = 1) -> Job:
    """A short run, as an engine takes it.

    Raises:
        InputError: the program can't make a step.
    """
    strategy = Strategy.coerce(strategy)
    draft = Job(program, strategy, Budget("steps", steps, steps))
    seen = dry_run(program, first_batch(draft))
    policy = strategy.aggregation.resolved(learning_rate=seen.learning_rate, replicas=strategy.replicas)
    return replace(
        draft,
        program=replace(program, metrics=seen.metrics, test=None),
        strategy=replace(strategy, aggregation=policy),
        running_buffers=seen.running_buffers,
    )


STAGED = ("compute", "shards", "bubble", "stages")
"""Terms of what the workers of a replica do together."""

KEPT = 200
"""Of a search for each number of workers, so that each kind of replica is among them."""


def workload_of(program: Program, measured: Profile, workers: int) -> MeasuredWorkload:
    """For so many workers at work at the same time; its batch is one replica's, where a program says no global one."""
    return MeasuredWorkload(measured, workers, program.global_batch_size or measured.batch)


def asked_here(program: Program, asked: Objectives, workers: int) -> Objectives:
    """Of up to so many workers of this host."""
    own = program.global_batch_size is None
    return replace(asked, workers=workers, engine="local", fixed="replica" if own else "global", simulated=KEPT)


def closed_plans(program: Program, measured: Profile, asked: Objectives, workers: int) -> Iterator[Plan]:
    """Those that have exactly so many workers: how long operators take depends on how many are at work.

    Args:
        program: what is to be trained.
        measured: of it.
        asked: by :func:`asked_here`.
        workers: of all replicas.
    """
    workload, cluster = workload_of(program, measured, workers), cluster_of(measured, workers)
    for plan in search(workload, cluster, replace(asked, workers=workers)).plans:
        more = program.global_batch_size is None and accumulates(plan)  # than the program's own batch
        if plan.strategy is not None and plan.arrangement.workers == workers and not more:
            yield corrected(plan, measured)


def once(plans: Sequence[Plan]) -> Sequence[Plan]:
    """Without those that compute again, where others fit, and those that accumulate, where the same does without: both
    take time for nothing but memory."""
    plans = [plan for plan in plans if plan.arrangement.recompute == "none"] or plans
    whole = {_workers(plan) for plan in plans if not accumulates(plan)}
    return [plan for plan in plans if not accumulates(plan) or _workers(plan) not in whole]


def accumulates(plan: Plan) -> bool:
    """Whether a step of a worker is several passes that are summed."""
    return plan.strategy is not None and plan.strategy.accumulate > 1


def _workers(plan: Plan) -> tuple[int, int, int]:
    a = plan.arrangement
    return a.replicas, a.stages, a.shards


def staged_s(cost: Cost) -> Seconds:
    """Of the workers of a replica together."""
    return sum(cost.terms[name] for name in STAGED)


def passes(arrangement: Arrangement) -> int:
    """One after the other, of micro-batches: in a pipeline as many as go through all its stages, m + p - 1.

    >>> passes(Arrangement(stages=2, micro_batches=4)), passes(Arrangement(replicas=2)), passes(Arrangement())
    (5, 1, 1)
    """
    return arrangement.micro_batches + arrangement.accumulated * (arrangement.stages - 1)


def corrected(plan: Plan, measured: Profile) -> Plan:
    """With what a step of its kind takes, and its workers hold, beside what closed forms count."""
    arrangement, cost = plan.arrangement, plan.cost
    run = measured.runs.get(kind(arrangement))
    added = 0.0 if run is None else _beside_s(arrangement, cost, run)
    terms = {**cost.terms, "waiting": cost.terms["waiting"] + added}
    held = tuple(_held(each, arrangement, measured) for each in cost.memory)
    scale = (cost.step_s + added) / cost.step_s
    return replace(
        plan,
        cost=replace(cost, terms=terms, memory=held),
        low_s=plan.low_s * scale,
        high_s=plan.high_s * scale,
        samples_per_s=plan.samples_per_s / scale,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
    )


def _beside_s(arrangement: Arrangement, cost: Cost, run: ShortRun) -> Seconds:
    own_s, pieces_s, share = staged_s(cost), run.pieces.compute_s, passes(arrangement) / passes(run.arrangement)
    computing = beside(own_s, run.closed_compute_s, pieces_s, share)
    return computing + beside(cost.step_s - own_s, run.closed_s - run.closed_compute_s, run.step_s - pieces_s)


def beside(foretold_s: Seconds, run_foretold_s: Seconds, run_s: Seconds, share: float = 1.0) -> Seconds:
    """What is added to a time, when a run's took so long.

    Args:
        foretold_s: of what is corrected.
        run_foretold_s: of the run.
        run_s: what it took; below 0 as 0.
        share: how many times what the run's took more.

    >>> beside(3.0, 1.0, 1.5), beside(3.0, 1.0, 1.5, 2.0), beside(3.0, 1.0, 0.5), beside(3.0, 1.0, -2.0)
    (0.5, 1.0, -1.5, -3.0)
    """
    if run_s >= run_foretold_s:
        return share * (run_s - run_foretold_s)
    return -foretold_s * (1.0 - (run_s / run_foretold_s if run_s > 0 else 0.0))


def _held(held: WorkerMemory, arrangement: Arrangement, measured: Profile) -> WorkerMemory:
    """Replicas of one worker have no optimizer: who holds A has it."""
    whole = kind(arrangement) in ("alone", "replicas")
    return replace(held, context=measured.context_bytes(arrangement), optimizer=0.0 if whole else held.optimizer)


SPREADS_WITH = 9
"""Of fewer passes the 5th and the 95th of 100 say nothing."""


def pieces_of(job: Job, fork_server: ForkServer, busy: Busy) -> Pieces:
    """Of a job.

    Args:
        job: whose.
        fork_server: of its processes.
        busy: how far passes differ, where a few are measured.

    Raises:
        InputError: the model can't be cut or divided as the strategy says.
        WorkerError: a process failed.
    """
    seen = forecast(job, fork_server)
    return put_together(seen, update_s(job, job.strategy.replicas, seen.steps_on), busy)


def put_together(seen: Forecast, updated_s: Seconds, busy: Busy) -> Pieces:
    """What was measured, and how far one pass differs from another."""
    compute_s, low, high = median(seen.compute_s), busy.low, busy.high
    if len(seen.compute_s) >= SPREADS_WITH:
        low, high = (float(each) / compute_s for each in np.quantile(list(seen.compute_s), (0.05, 0.95)))
    return Pieces(compute_s, seen.pull_s + seen.push_s, updated_s, min(low, 1.0), max(high, 1.0))
