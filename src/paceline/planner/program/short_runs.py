"""Short runs: a few steps of the program by each kind of worker, compared with counted memory and measured components.

::

    a step, as it was run     |---------------------------------------|
    its components, measured  |- pull -|-- compute --|- push -|- update -|     the difference is the step's overhead

    peak        measured memory of the worker that used most
    - counted   its parameters, gradients, optimizer and activations saved for backward
    = overhead  the runtime, copies of the model: A on the server, Δs in flight, leftovers of the preparation

The overhead of a kind of worker depends little on the number of micro-batches or the schedule: so one arrangement of
each kind is run, the likely best, and its overhead is taken for all of them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import TypeAlias

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.base import Budget, Engine, Job, Watcher
from paceline.engine.local.engine import LocalEngine
from paceline.engine.step_profile.forecast import NEEDS
from paceline.planner.base import Arrangement, Plan
from paceline.planner.program import closed_form
from paceline.planner.program.measured_workload import cluster_of
from paceline.planner.program.profile import Profile, ShortRun, kind
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache
from paceline.planner.search.supported import pipelined
from paceline.program import Program

# Rounds at the most; in each, every kind runs once: a temporary disturbance of the machine affects all alike. A step
# of a few milliseconds differs by a tenth from one run to the next.
ROUNDS = 5

# Limit of all rounds together, where the first doesn't take longer.
ROUNDS_S: Seconds = 30.0

# Training time of a run, longer where that is not enough for STEPS steps.
RUN_S: Seconds = 0.7

# Steps that are enough: Δs of several may be in flight at once.
STEPS = 5

# Kinds whose fork server imports the same modules.
TOGETHER = (("alone", "replicas"), ("stages", "shards"))


# Median of a run's steps, and the peak of the worker that used most bytes.
RunResult: TypeAlias = tuple[Seconds, int]


def short_runs(program: Program, workers: int, measured: Profile) -> tuple[Mapping[str, ShortRun], Mapping[str, str]]:
    """Run each kind of worker for a few steps.

    Args:
        program: to run.
        workers: of all replicas.
        measured: its profile, without short runs.

    Returns:
        The runs by kind, and why there is none of a kind, in one line.
    """
    plans = quickest(program, workers, measured)
    jobs = dict[str, Job]()
    for name, plan in plans.items():
        assert plan.strategy is not None, "a plan that is not supported can't be run"
        seconds = max(RUN_S, STEPS * plan.cost.step_s)
        jobs[name] = replace(closed_form.job_for(program, plan.strategy), budget=Budget("seconds", seconds, seconds))
    results, refused = _run_all(jobs)
    found = dict[str, ShortRun]()
    with closing(ForkServer.start(NEEDS)) as fork_server:
        # Twice, to take the shorter components: with disturbed ones, plans based on them would look too good.
        for name in 2 * [name for name in jobs if results[name]]:
            arrangement, cost, runs = plans[name].arrangement, plans[name].cost, results[name]
            try:
                pieces = closed_form.pieces_of(jobs[name], fork_server, measured.at_work(arrangement.workers))
            except PacelineError as error:
                refused[name] = in_a_line(error)
                continue
            if name not in found or pieces.step_s < found[name].pieces.step_s:
                counted = cost.peak.total - cost.peak.context  # the context is what these runs measure
                step_s, used = (median(each) for each in zip(*runs, strict=True))
                closed = cost.step_s, closed_form.staged_s(cost)
                found[name] = ShortRun(arrangement, step_s, pieces, *closed, used - counted)
    return found, {name: reason for name, reason in refused.items() if name not in found}


def _run_all(jobs: Mapping[str, Job]) -> tuple[Mapping[str, Sequence[RunResult]], dict[str, str]]:
    """Run each kind in every round; return the results, and why a kind has none in some round."""
    results, refused = {name: list[RunResult]() for name in jobs}, dict[str, str]()
    for backwards in _rounds():
        for together in TOGETHER[:: -1 if backwards else 1]:
            if jobs.keys().isdisjoint(together):
                continue
            with LocalEngine() as engine:
                for name in (name for name in together if name in jobs):
                    try:
                        engine.refuse(jobs[name])
                        results[name].append(_run(jobs[name], engine))
                    except PacelineError as error:  # a worker may be the first to find out that it can't be divided so
                        refused[name] = in_a_line(error)
    return results, refused


def _run(job: Job, engine: Engine) -> RunResult:
    """Run once.

    Raises:
        KeyboardInterrupt: on Ctrl-C, which the engine itself handles as the end of the run.
        WorkerError: no step was done in time.
    """
    account = engine.run(job, Watcher()).account
    if account.interrupted:
        raise KeyboardInterrupt
    times = [each.step_time_s for each in account.workers if each.step_time_s is not None]
    if not times:
        raise WorkerError("no step was done in time")
    return median(times), max(each.peak_memory_bytes or 0 for each in account.workers)


def _rounds() -> Iterator[bool]:
    """Yield for each round whether its order is reversed; as many rounds as there is time for."""
    began = time.monotonic()
    yield False
    first_s = max(time.monotonic() - began, 1e-9)
    for number in range(1, min(ROUNDS, int(ROUNDS_S / first_s))):
        yield number % 2 == 1


def quickest(program: Program, workers: int, measured: Profile) -> Mapping[str, Plan]:
    """Return the plan of each kind that is fastest by closed forms, with one or all workers and no staleness."""
    objectives, found = closed_form.host_objectives(program, Objectives(), workers), dict[str, Plan]()
    for count in sorted({1, workers}):
        costs = CostCache(closed_form.workload_of(program, measured, count), cluster_of(measured, count))
        plans = closed_form.closed_plans(program, measured, objectives, count)
        fresh = closed_form.once([plan for plan in plans if not plan.cost.staleness])
        for plan in sorted(fresh, key=lambda plan: -plan.samples_per_s):
            plain = alike(plan.arrangement)
            if kind(plain) not in found and plain.workers == count:  # it differs where stages had unlike workers
                found[kind(plain)] = closed_form.corrected(costs.plan(plain), measured)
    return found


def alike(arrangement: Arrangement) -> Arrangement:
    """Return the arrangement with equal numbers of workers in all stages, and without accumulation."""
    plain = replace(arrangement, copies=(), stage_shards=(), accumulated=1, divided=0)
    if pipelined(arrangement):
        return plain
    return replace(plain, micro_batch=plain.micro_batch * plain.micro_batches, micro_batches=1)


def in_a_line(error: PacelineError) -> str:
    """Return the first line of an error: a failed worker's without its traceback."""
    return str(error).partition("\n")[0]
