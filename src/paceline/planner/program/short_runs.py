"""A few steps of the program itself by each kind of worker, beside what can be counted and what its pieces take.

::

    a step, as it was run     |---------------------------------------|
    its pieces, measured      |- pull -|-- compute --|- push -|- update -|        what is left is beside them

    held      what was measured of the worker that held most
    - counted its parameters, gradients, optimizer and what it saves for backward
    = beside  the runtime, copies of the model: A as the server has it, Δs on their way, what preparing it left behind

What a kind of worker takes and holds beside hangs little on how many micro-batches there are, or by which schedule: so
one arrangement is run of each kind, the likely best, and what it tells is taken for all of them.
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
from paceline.engine.step_profile.predict import NEEDS
from paceline.planner.base import Arrangement, Plan
from paceline.planner.program.closed_form import (
    asked_here,
    closed_plans,
    corrected,
    job_for,
    once,
    pieces_of,
    staged_s,
    workload_of,
)
from paceline.planner.program.measured_workload import cluster_of
from paceline.planner.program.profile import Profile, ShortRun, kind
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.supported import pipelined
from paceline.program import Program

ROUNDS = 5
"""At the most; in each, every kind runs once: what disturbs the machine for a while disturbs all alike. A step of a few
milliseconds differs by a tenth from one run to the next."""

ROUNDS_S: Seconds = 30.0
"""So long all rounds may take, where one doesn't take longer."""

RUN_S: Seconds = 0.7
"""A run trains for so long, and for longer where that is not enough for some steps."""

STEPS = 5
"""That are enough: Δs of several may be on their way at once."""

TOGETHER = (("alone", "replicas"), ("stages", "shards"))
"""Kinds whose fork server imports the same."""


class Tried(NamedTuple):
    """One run."""

    step_s: Seconds
    """The median of its steps."""
    held_bytes: int
    """By the worker that held most."""


class Runs(NamedTuple):
    """Of all kinds."""

    found: Mapping[str, ShortRun]
    refused: Mapping[str, str]
    """Why there is none of a kind, in one line."""


def short_runs(program: Program, workers: int, measured: Profile) -> Runs:
    """By kind of worker.

    Args:
        program: is run.
        workers: in all.
        measured: of it, without short runs.
    """
    kinds = {name: _Kind(program, plan) for name, plan in quickest(program, workers, measured).items()}
    tried: dict[str, list[Tried]] = {name: [] for name in kinds}
    refused: dict[str, str] = {}
    for backwards in _rounds():
        for together in TOGETHER[:: -1 if backwards else 1]:
            for name, came in _round([(name, kinds[name]) for name in together if name in kinds]):
                if isinstance(came, str):
                    refused[name] = came
                else:
                    tried[name].append(came)
    return _with_pieces([(name, kinds[name], runs) for name, runs in tried.items() if runs], refused, measured)


def _rounds() -> Iterator[bool]:
    """Whether a round goes backwards; as many rounds as there is time for."""
    began = time.monotonic()
    yield False
    first_s = max(time.monotonic() - began, 1e-9)
    for number in range(1, min(ROUNDS, int(ROUNDS_S / first_s))):
        yield number % 2 == 1


def _with_pieces(
    kinds: "Sequence[tuple[str, _Kind, Sequence[Tried]]]", refused: Mapping[str, str], measured: Profile
) -> Runs:
    """Pieces measured twice, the shorter ones taken: by disturbed ones, plans held to them would look too good."""
    found, fork_server = dict[str, ShortRun](), ForkServer.start(NEEDS)
    refused = dict(refused)
    try:
        for name, each, runs in (*kinds, *kinds):
            try:
                told = each.told(runs, fork_server, measured)
            except PacelineError as error:
                refused[name] = in_a_line(error)
                continue
            if name not in found or told.pieces.step_s < found[name].pieces.step_s:
                found[name] = told
    finally:
        fork_server.close()
    return Runs(found, {name: why for name, why in refused.items() if name not in found})


def quickest(program: Program, workers: int, measured: Profile) -> Mapping[str, Plan]:
    """Of each kind the quickest by closed forms that has all workers and whose steps end."""
    asked, found = asked_here(program, Objectives(), workers), dict[str, Plan]()
    for count in sorted({1, workers}):
        known = CostCache(workload_of(program, measured, count), cluster_of(measured, count))
        plans = [plan for plan in closed_plans(program, measured, asked, count) if not plan.cost.staleness]
        for plan in sorted(once(plans), key=lambda plan: -plan.samples_per_s):
            plain = alike(plan.arrangement)
            if kind(plain) not in found and plain.workers == count:  # as it is not where stages differ
                found[kind(plain)] = corrected(known.plan(plain), measured)
    return found


def alike(arrangement: Arrangement) -> Arrangement:
    """The same with stages that have as many workers each, and without accumulating."""
    plain = replace(arrangement, copies=(), stage_shards=(), accumulated=1, divided=0)
    if pipelined(arrangement):
        return plain
    return replace(plain, micro_batch=plain.micro_batch * plain.micro_batches, micro_batches=1)


@dataclass(frozen=True)
class _Kind:
    """What is run of a kind."""

    program: Program
    plan: Plan

    @property
    def job(self) -> Job:
        assert self.plan.strategy is not None, "a plan that is not supported can't be run"
        seconds = max(RUN_S, STEPS * self.plan.cost.step_s)
        return replace(job_for(self.program, self.plan.strategy), budget=Budget("seconds", seconds, seconds))

    def run(self, engine: Engine) -> Tried | None:
        """Once; None: no step was done in time.

        Raises:
            KeyboardInterrupt: on Ctrl-C, which a run takes for its end.
        """
        account = engine.run(self.job, unwatched).account
        if account.interrupted:
            raise KeyboardInterrupt
        times = [each.step_time_s for each in account.workers if each.step_time_s is not None]
        return Tried(median(times), max(each.peak_memory_bytes or 0 for each in account.workers)) if times else None

    def told(self, runs: Sequence[Tried], fork_server: ForkServer, measured: Profile) -> ShortRun:
        """With what its pieces take."""
        cost = self.plan.cost
        counted = cost.peak.total - cost.peak.context
        return ShortRun(
            self.plan.arrangement,
            median(each.step_s for each in runs),
            pieces_of(self.job, fork_server, measured.at_work(self.plan.arrangement.workers)),
            cost.step_s,
            staged_s(cost),
            median(each.held_bytes for each in runs) - counted,
        )


def _round(kinds: Sequence[tuple[str, _Kind]]) -> Iterator[tuple[str, Tried | str]]:
    """One run of each, or why there is none."""
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
    """Of a failed worker without its traceback."""
    return str(error).partition("\n")[0]


def unwatched(progress: Progress) -> None:
    """Tells nobody how a run stands."""
    del progress
