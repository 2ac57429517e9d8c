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
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import PacelineError
from paceline.core.types import Seconds
from paceline.engine.base import Budget, Engine, Job, Progress
from paceline.engine.local.engine import LocalEngine
from paceline.engine.step_profile.forecast import NEEDS
from paceline.planner.base import Arrangement, Plan
from paceline.planner.program.closed_form import (
    closed_plans,
    corrected,
    host_objectives,
    job_for,
    once,
    pieces_of,
    staged_s,
    workload_of,
)
from paceline.planner.program.measured_workload import cluster_of
from paceline.planner.program.profile import Profile, ShortRun, kind
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache
from paceline.planner.search.supported import pipelined
from paceline.program import Program

ROUNDS = 5
"""Rounds at the most; in each, every kind runs once: a temporary disturbance of the machine affects all alike. A step
of a few milliseconds differs by a tenth from one run to the next."""

ROUNDS_S: Seconds = 30.0
"""Limit of all rounds together, where the first doesn't take longer."""

RUN_S: Seconds = 0.7
"""Training time of a run, longer where that is not enough for :data:`STEPS` steps."""

STEPS = 5
"""Steps that are enough: Δs of several may be in flight at once."""

TOGETHER = (("alone", "replicas"), ("stages", "shards"))
"""Kinds whose fork server imports the same modules."""


class RunResult(NamedTuple):
    """Measurements of one run."""

    step_s: Seconds
    """The median of its steps."""
    held_bytes: int
    """Peak of the worker with the highest."""


class Runs(NamedTuple):
    """Short runs of all kinds."""

    found: Mapping[str, ShortRun]
    refused: Mapping[str, str]
    """Why there is none of a kind, in one line."""


def short_runs(program: Program, workers: int, measured: Profile) -> Runs:
    """Run each kind of worker for a few steps.

    Args:
        program: to run.
        workers: of all replicas.
        measured: its profile, without short runs.
    """
    kinds = {name: _WorkerKind(program, plan) for name, plan in quickest(program, workers, measured).items()}
    results: dict[str, list[RunResult]] = {name: [] for name in kinds}
    refused: dict[str, str] = {}
    for backwards in _rounds():
        for together in TOGETHER[:: -1 if backwards else 1]:
            for name, result in _round([(name, kinds[name]) for name in together if name in kinds]):
                if isinstance(result, str):
                    refused[name] = result
                else:
                    results[name].append(result)
    return _with_pieces([(name, kinds[name], runs) for name, runs in results.items() if runs], refused, measured)


def _rounds() -> Iterator[bool]:
    """Yield for each round whether its order is reversed; as many rounds as there is time for."""
    began = time.monotonic()
    yield False
    first_s = max(time.monotonic() - began, 1e-9)
    for number in range(1, min(ROUNDS, int(ROUNDS_S / first_s))):
        yield number % 2 == 1


def _with_pieces(
    kinds: "Sequence[tuple[str, _WorkerKind, Sequence[RunResult]]]", refused: Mapping[str, str], measured: Profile
) -> Runs:
    """Measure the components twice and take the shorter: with disturbed ones, plans based on them would look too
    good."""
    found, fork_server = dict[str, ShortRun](), ForkServer.start(NEEDS)
    refused = dict(refused)
    try:
        for name, each, runs in (*kinds, *kinds):
            try:
                run = each.short_run(runs, fork_server, measured)
            except PacelineError as error:
                refused[name] = in_a_line(error)
                continue
            if name not in found or run.pieces.step_s < found[name].pieces.step_s:
                found[name] = run
    finally:
        fork_server.close()
    return Runs(found, {name: reason for name, reason in refused.items() if name not in found})


def quickest(program: Program, workers: int, measured: Profile) -> Mapping[str, Plan]:
    """Return the plan of each kind that is fastest by closed forms, with one or all workers and no staleness."""
    objectives, found = host_objectives(program, Objectives(), workers), dict[str, Plan]()
    for count in sorted({1, workers}):
        costs = CostCache(workload_of(program, measured, count), cluster_of(measured, count))
        plans = [plan for plan in closed_plans(program, measured, objectives, count) if not plan.cost.staleness]
        for plan in sorted(once(plans), key=lambda plan: -plan.samples_per_s):
            plain = alike(plan.arrangement)
            if kind(plain) not in found and plain.workers == count:  # it differs where stages had unlike workers
                found[kind(plain)] = corrected(costs.plan(plain), measured)
    return found


def alike(arrangement: Arrangement) -> Arrangement:
    """Return the arrangement with equal numbers of workers in all stages, and without accumulation."""
    plain = replace(arrangement, copies=(), stage_shards=(), accumulated=1, divided=0)
    if pipelined(arrangement):
        return plain
    return replace(plain, micro_batch=plain.micro_batch * plain.micro_batches, micro_batches=1)


@dataclass(frozen=True)
class _WorkerKind:
    """A kind of worker and the plan run for it."""

    program: Program
    plan: Plan

    @property
    def job(self) -> Job:
        assert self.plan.strategy is not None, "a plan that is not supported can't be run"
        seconds = max(RUN_S, STEPS * self.plan.cost.step_s)
        return replace(job_for(self.program, self.plan.strategy), budget=Budget("seconds", seconds, seconds))

    def run(self, engine: Engine) -> RunResult | None:
        """Run once; None if no step was done in time.

        Raises:
            KeyboardInterrupt: on Ctrl-C, which the engine itself handles as the end of the run.
        """
        account = engine.run(self.job, unwatched).account
        if account.interrupted:
            raise KeyboardInterrupt
        times = [each.step_time_s for each in account.workers if each.step_time_s is not None]
        return RunResult(median(times), max(each.peak_memory_bytes or 0 for each in account.workers)) if times else None

    def short_run(self, runs: Sequence[RunResult], fork_server: ForkServer, measured: Profile) -> ShortRun:
        """Return the runs' medians with the measured components."""
        cost = self.plan.cost
        counted = cost.peak.total - cost.peak.context  # the context is what these runs measure
        return ShortRun(
            self.plan.arrangement,
            median(each.step_s for each in runs),
            pieces_of(self.job, fork_server, measured.at_work(self.plan.arrangement.workers)),
            cost.step_s,
            staged_s(cost),
            median(each.held_bytes for each in runs) - counted,
        )


def _round(kinds: Sequence[tuple[str, _WorkerKind]]) -> Iterator[tuple[str, RunResult | str]]:
    """Yield one run of each kind, or why there is none."""
    if not kinds:
        return
    with LocalEngine() as engine:
        for name, each in kinds:
            try:
                engine.refuse(each.job)
                yield name, each.run(engine) or "no step was done in time"
            except PacelineError as error:  # a worker may be the first to find out that it can't be divided so
                yield name, in_a_line(error)


def in_a_line(error: PacelineError) -> str:
    """Return the first line of an error: a failed worker's without its traceback."""
    return str(error).partition("\n")[0]


def unwatched(progress: Progress) -> None:
    """Ignore the progress of a run."""
    del progress
