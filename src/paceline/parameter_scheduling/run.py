"""A run: schedule, push, pull, absorb, until the objective stands still or enough updates are made."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.clock import distributions
from paceline.core.errors import InputError, NonFiniteError, check_choice, check_int, check_number, check_positive
from paceline.core.text_form import text_of
from paceline.core.types import Seconds
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram
from paceline.parameter_scheduling.schedulers import Scheduler, balanced, coerce, independent
from paceline.parameter_scheduling.workers import VirtualWorkers, Workers

ENGINES = ("virtual", "local")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The objective after some updates."""

    updates: int
    """Of single blocks."""
    rounds: int
    time_s: Seconds
    """Of the rounds: by the simulated clock, or by the wall; evaluations take none of it."""
    objective: float
    pushed_bytes: int
    """Partial sums of all workers, so far."""
    sent_bytes: int
    """Numbers and values of blocks to all workers, so far."""


@dataclass(frozen=True)
class ScheduledRun:
    """The result of :func:`schedule_parameters`."""

    scheduler: str
    """Its text form."""
    values: Array
    """A: (blocks, ...)."""
    row_values: Array | None
    """Parameters that belong to rows, (rows, ...); None if the program has none."""
    history: list[Evaluation] = field(repr=False)
    ended: str
    """Why: a sentence."""

    @property
    def objective(self) -> float:
        """Return the last objective."""
        return self.history[-1].objective

    def updates_to(self, objective: float) -> int | None:
        """Return the updates after which the objective was first found to be this low; None: it never was."""
        return next((each.updates for each in self.history if each.objective <= objective), None)

    def plot(self, path: str | Path) -> None:
        """Write the objective over updates as an SVG."""
        from paceline.report.figures import drawn

        def draw(all_axes: list[Any]) -> None:
            objectives = [each.objective for each in self.history]
            [axes] = all_axes
            axes.plot([each.updates for each in self.history], objectives)
            axes.set_xlabel("updates of blocks")
            axes.set_yscale("log" if min(objectives) > 0 else "linear")

        text = drawn(draw, f"objective, {self.scheduler}", says="objective over updates of blocks")
        Path(path).write_text(text, encoding="utf-8")


class Budget:
    """What ends a run. It stands still where each block has been updated and all of that has changed nothing."""

    def __init__(self, blocks: int, updates: int, tolerance: float | None, target: float | None) -> None:
        self.updates, self.tolerance, self.target = updates, tolerance, target
        self._first: float | None = None
        self._seen = np.zeros(blocks, bool)
        self._reference = math.nan  # of no comparison that holds

    def updated(self, chosen: Numbers) -> None:
        """Note which blocks a round has updated."""
        self._seen[chosen] = True

    def spent(self, now: Evaluation) -> str | None:
        """Return why the run ends here; None: it goes on."""
        if self._first is None:
            self._first = now.objective
        if self.target is not None and now.objective <= self.target:
            return f"the objective has reached {self.target:g}"
        if self.tolerance is not None:
            if not abs(self._reference - now.objective) <= self.tolerance * abs(self._reference):
                self._reference, self._seen[:] = now.objective, False
            elif self._seen.all():
                return f"updates of all blocks have changed the objective by less than {self.tolerance:g} of it"
        if now.updates < self.updates:
            return None
        risen = f"; the objective has risen from {self._first:g}: write bound=0.1, or at_once=1"
        return f"{now.updates} updates were made{risen if now.objective > self._first else ''}"


def schedule_parameters(
    program: ScheduledProgram[Any],
    scheduler: Scheduler[Any] | str = "priority",
    *,
    workers: int = 4,
    engine: str = "virtual",
    updates: int | None = None,
    tolerance: float | None = 1e-10,
    target: float | None = None,
    evaluate_every: int | None = None,
    operation_s: Seconds | None = None,
    message: str | None = None,
    timeout_s: Seconds = 300.0,
    seed: int = 0,
    progress: bool | None = None,
) -> ScheduledRun:
    """Minimise a program's objective by updates of a few blocks of parameters at a time.

    Args:
        program: :class:`Lasso`, :class:`MatrixFactorization` or one of your own.
        scheduler: which blocks: a value, or its text: "priority:at_once=8,bound=0.1", "uniform", "cyclic".
        workers: among which rows of data are divided, so that the costs of their rows are about the same.
        engine: "virtual", all in this process under a simulated clock; "local", processes of this host. Both compute
            the same bits.
        updates: of single blocks, at most; None: a thousand of each.
        tolerance: the run ends where updates of all blocks have changed the objective by less than this share; None:
            it does not.
        target: objective at which the run ends.
        evaluate_every: updates between two evaluations, about; None: as many as there are blocks.
        operation_s: seconds of one unit of cost of a block in one of a row, on the simulated clock; 1e-9 by default.
        message: distribution of the seconds that a worker's messages of a round take; "0.0001" by default.
        timeout_s: longest time that an answer of a process may take.
        seed: of all draws.
        progress: True to draw it on stderr; None only if that is a terminal.

    Raises:
        InputError: what can't be done as written; nothing has been started.
        NonFiniteError: values have overflown, as they do if blocks that depend on each other are updated at once.
        WorkerError: a process has ended or failed.
        WaitTimeoutError: a process has not answered in time.
    """
    scheduler = _scheduler(scheduler, program)
    _check(program, workers, engine, operation_s, message, seed)
    evaluate_every = program.blocks if evaluate_every is None else evaluate_every
    budget = Budget(program.blocks, 1000 * program.blocks if updates is None else updates, tolerance, target)
    _check_budget(budget, evaluate_every, timeout_s)
    costs = np.asarray(program.row_costs(), float)
    rows = balanced(costs, workers)
    with (
        _opened(program, rows, engine, operation_s, message, timeout_s, seed) as opened,
        _reporting(progress) as report,
    ):
        return _run(program, scheduler, opened, budget, evaluate_every, seed, report)


def _run(
    program: ScheduledProgram[Any],
    scheduler: Scheduler[Any],
    workers: Workers,
    budget: Budget,
    evaluate_every: int,
    seed: int,
    report: Any,
) -> ScheduledRun:
    values = np.array(program.initial(), np.float64)
    state = scheduler.start(program.blocks, seed)
    updates = rounds = due = 0
    history: list[Evaluation] = []
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        while True:
            if updates >= due or updates >= budget.updates:
                due = updates + evaluate_every
                objective = workers.loss() + program.penalty(values)
                if not math.isfinite(objective):
                    raise _diverged("the objective is", scheduler)
                sizes = workers.pushed_bytes, workers.sent_bytes
                history.append(Evaluation(updates, rounds, workers.time_s, objective, *sizes))
                report(f"objective {objective:.6g}", min(1.0, updates / budget.updates))
                ended = budget.spent(history[-1])
                if ended is not None:
                    return ScheduledRun(text_of(scheduler), values, workers.row_values(), history, ended)
            chosen = choose(program, scheduler, state, values)[: budget.updates - updates]
            before = values[chosen]
            after = np.asarray(program.pull(workers.push(chosen, before), chosen, before), np.float64)
            _check_new(after, before, chosen, scheduler)
            workers.absorb(after)
            values[chosen] = after
            moved = np.linalg.norm((after - before).reshape(len(chosen), -1), axis=1)
            state = scheduler.updated(state, chosen, moved)
            budget.updated(chosen)
            updates, rounds = updates + len(chosen), rounds + 1


def choose(program: ScheduledProgram[Any], scheduler: Scheduler[Any], state: Any, values: Array) -> Numbers:
    """Return the blocks of the next round: candidates of which no two depend on each other."""
    candidates = scheduler.propose(state)
    if len(set(candidates.tolist())) != len(candidates):
        raise InputError(f"{text_of(scheduler)} proposed {candidates.tolist()}; propose each block once at most")
    if scheduler.bound is None or scheduler.at_once == 1:
        return candidates[: scheduler.at_once]
    dependency = np.asarray(program.dependency(candidates, values[candidates]), np.float64)
    if dependency.shape != 2 * candidates.shape or not np.isfinite(dependency).all():
        raise InputError(
            f"dependency returned {dependency.shape} for {len(candidates)} blocks, or values that are not finite; "
            "return a finite number for each pair, or write bound=none"
        )
    return candidates[independent(dependency, scheduler.bound, scheduler.at_once)]


def _check_new(after: Array, before: Array, chosen: Numbers, scheduler: Scheduler[Any]) -> None:
    if after.shape != before.shape:
        raise InputError(f"pull returned an array of shape {after.shape} for values of {before.shape}; return as many")
    finite = np.isfinite(after.reshape(len(chosen), -1)).all(axis=1)
    if not finite.all():
        raise _diverged(f"block {chosen[int(np.argmin(finite))]} has values that are", scheduler)


def _diverged(what: str, scheduler: Scheduler[Any]) -> NonFiniteError:
    return NonFiniteError(
        f"{what} not finite under {text_of(scheduler)}. Blocks that depend on each other may have been updated at "
        "once; write bound=0.1, or at_once=1"
    )


def _scheduler(scheduler: Scheduler[Any] | str, program: ScheduledProgram[Any]) -> Scheduler[Any]:
    if not isinstance(program, ScheduledProgram):
        raise InputError(f"program={program!r} is no program of scheduled parameters; write paceline.Lasso(X, y, …)")
    scheduler = coerce(scheduler)
    if scheduler.at_once > program.blocks:
        raise InputError(f"at_once={scheduler.at_once} of {program.blocks} blocks; write at_once={program.blocks}")
    return scheduler


def _check(
    program: ScheduledProgram[Any],
    workers: int,
    engine: str,
    operation_s: Seconds | None,
    message: str | None,
    seed: int,
) -> None:
    check_int("workers", workers, least=1)
    check_int("seed", seed, least=0)
    check_choice("engine", engine, ENGINES)
    if workers > program.rows:
        raise InputError(f"workers={workers} for {program.rows} rows of data; write workers={program.rows}")
    if engine == "local" and (operation_s is not None or message is not None):
        raise InputError(
            'operation_s= and message= are of the simulated clock; leave them out, or write engine="virtual"'
        )
    costs = np.asarray(program.row_costs(), float), np.asarray(program.block_costs(), float)
    for name, found, count in zip(("row_costs", "block_costs"), costs, (program.rows, program.blocks), strict=True):
        if found.shape != (count,) or not np.isfinite(found).all() or found.min() < 0:
            raise InputError(f"{name} returned {found.shape}; return {count} finite numbers of at least 0")
    initial = np.shape(program.initial())
    if initial[:1] != (program.blocks,):
        raise InputError(f"initial returned shape {initial} for {program.blocks} blocks; return (blocks, ...)")


def _check_budget(budget: Budget, evaluate_every: int, timeout_s: Seconds) -> None:
    check_int("updates", budget.updates, least=0)
    check_int("evaluate_every", evaluate_every, least=1)
    check_positive("timeout_s", timeout_s, instead=300)
    if budget.tolerance is not None:
        check_number("tolerance", budget.tolerance, "of at least 0", lambda v: v >= 0, instead=1e-10)
    if budget.target is not None and not math.isfinite(budget.target):
        raise InputError(f"target={budget.target} is not finite; write target=None")


def _opened(
    program: ScheduledProgram[Any],
    rows: list[Numbers],
    engine: str,
    operation_s: Seconds | None,
    message: str | None,
    timeout_s: Seconds,
    seed: int,
) -> Workers:
    if engine == "local":
        from paceline.parameter_scheduling.local import LocalWorkers  # imports torch

        return LocalWorkers(program, rows, timeout_s=timeout_s)
    operation_s = 1e-9 if operation_s is None else operation_s
    check_number("operation_s", operation_s, "of at least 0", lambda v: v >= 0, instead=1e-9)
    drawn = distributions.parse("0.0001" if message is None else message)
    return VirtualWorkers(program, rows, operation_s=operation_s, message=drawn, seed=seed)


@contextmanager
def _reporting(progress: bool | None) -> Iterator[Any]:
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda *_: None
        return
    from paceline.progress import measuring  # imports torch

    with measuring(progress, "scheduled updates") as report:
        yield report
