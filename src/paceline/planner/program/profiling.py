"""Measuring a profile: processes that do the work of workers, then short runs of the program.

::

    alone    one process with all threads                       operators of replicas=1
    all      as many processes as workers, their threads each   operators of every other arrangement, and messages
    runs     some steps of the program by each kind of worker   overhead of a step, and memory of a worker
"""

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.engine.run_context import first_batch, threads
from paceline.engine.spmd.launcher import PRELOAD, WorkerPool
from paceline.engine.step_profile.forecast import update_s
from paceline.planner.base import Numerics
from paceline.planner.program.closed_form import job_for
from paceline.planner.program.profile import Busy, LineFit, Profile, Unit, this_machine
from paceline.planner.program.profiler_worker import MeasuredOperators, Probe, RankMeasurements
from paceline.planner.program.short_runs import short_runs
from paceline.program import Program, call
from paceline.replica.module_utils import preserve_state
from paceline.replica.pipeline.prepare import parameter_copies
from paceline.strategy import Strategy

Notify: TypeAlias = Callable[[str, float], None]
"""Progress callback: (the current measurement, the completed share of all)."""

WHOLE = "the whole model"
"""Name of the only unit of a model that can't be captured."""


def silent(description: str, done: float) -> None:
    """Report nothing."""
    del description, done


def profile(program: Program, workers: int, notify: Notify = silent, *, runs: bool = True) -> Profile:
    """Measure a program on this host; within a minute, but for models whose single steps take seconds.

    Args:
        program: to train.
        workers: the most workers of a plan.
        notify: called with the progress.
        runs: whether to make short runs as well. Without them a worker's memory is the counted bytes and a measuring
            process's own, and a step has no overhead over its components.

    Raises:
        InputError: the program can't make a step.
        WorkerError: a process failed.
    """
    notify("a first step", 0.0)
    job = job_for(program, Strategy())
    batch = first_batch(job).samples
    ranks = _measure(job, sorted({1, workers}), _sizes(batch), notify)
    measured = _ProfileBuilder(program, job, ranks).profile(batch)
    if runs:
        notify("short runs", 0.5)
        done = short_runs(program, workers, measured)
        refused = "".join(f"; none of {kind}: {reason}" for kind, reason in done.refused.items())
        source = f"measured here of short runs of {', '.join(done.found) or 'nothing'}{refused}; {_where()}"
        measured = replace(measured, runs=done.found, provenance={**measured.provenance, "context": source})
    notify("done", 1.0)
    return measured


def _sizes(batch: int) -> list[int]:
    """Return the sizes to measure: a whole batch, and micro-batches of a quarter and a sixteenth of it.

    >>> _sizes(32), _sizes(6), _sizes(1)
    ([32, 8, 2], [6, 1], [1])
    """
    return sorted({batch, max(1, batch // 4), max(1, batch // 16)}, reverse=True)


def _measure(
    job: Job, counts: Sequence[int], sizes: Sequence[int], notify: Notify
) -> Mapping[int, Sequence[RankMeasurements]]:
    """Return each rank's measurements, by the number of ranks."""
    fork_server = ForkServer.start((*PRELOAD, "paceline.planner.program.profiler_worker"))
    ranks: dict[int, Sequence[RankMeasurements]] = {}
    try:
        for number, count in enumerate(counts):
            notify(f"operators, {count} at work", 0.05 + 0.45 * number / len(counts))
            shards = _shards(count) if count == counts[-1] else []
            with WorkerPool(Probe(job, sizes, shards), count, threads(job, count), fork_server) as pool:
                ranks[count] = pool.ask(None)
    finally:
        fork_server.close()
    return ranks


def _shards(workers: int) -> list[int]:
    """Return the numbers of shards to plan for: divisors of the workers, and powers of two below.

    >>> _shards(2), _shards(6), _shards(12), _shards(1)
    ([2], [2, 3, 4, 6], [2, 3, 4, 6, 8, 12], [])
    """
    return [n for n in range(2, workers + 1) if workers % n == 0 or n & (n - 1) == 0]


@dataclass(frozen=True)
class _ProfileBuilder:
    """Builder of a profile from the ranks' measurements."""

    program: Program
    job: Job
    ranks: Mapping[int, Sequence[RankMeasurements]]
    """By number of workers at work."""

    def profile(self, batch: int) -> Profile:
        most = self.ranks[max(self.ranks)]
        captured = most[0].captured
        count = elements(self.program)
        units = tuple(captured.units) if captured else (Unit(WHOLE, count, LineFit(), LineFit()),)
        return Profile(
            self.program.name,
            this_machine(),
            units,
            tuple(self._busy(workers) for workers in sorted(self.ranks)),
            tuple(captured.divisions) if captured else (),
            most[0].refused,
            tuple(most[0].points),
            numerics_of(self.program),
            update_s(self.job, 1),
            max(each.base_bytes for each in most),
            flops_of(self.program, self.job),
            min(each.flops_per_s for each in most),
            count,
            batch,
            provenance=self._provenance(),
        )

    def _busy(self, workers: int) -> Busy:
        """Return the times of the slowest rank: all wait for it at the end of a step."""
        ranks = self.ranks[workers]
        times = [seconds for each in ranks for seconds in each.passes[max(each.passes)]]
        low, middle, high = np.quantile(times, (0.05, 0.5, 0.95))
        slowest = max(ranks, key=lambda each: statistics.median(each.passes[max(each.passes)]))
        forward, backward = _lines(slowest, slowest.captured if ranks[0].captured else None)
        return Busy(workers, threads(self.job, workers), forward, backward, float(low / middle), float(high / middle))

    def _provenance(self) -> dict[str, str]:
        where = _where()
        counts = {len(times) for ranks in self.ranks.values() for each in ranks for times in each.passes.values()}
        repeats = " or ".join(str(n) for n in sorted(counts))
        return {
            "compute": f"measured here, {repeats} passes of each size, {where}",
            "messages": f"measured here among {max(self.ranks)} processes, medians of 9, {where}",
            "optimizer": f"measured here, the median of 9 updates, {where}",
            "memory": f"counted: parameters, gradients, optimizer, what each operator saves; {where}",
            "context": f"measured here of processes that measured, {where}",
        }


def _where() -> str:
    """Describe the machine and the date of a measurement."""
    machine = this_machine()
    return f"on {machine.cores} cores of {machine.processor}, {datetime.datetime.now(datetime.UTC).date().isoformat()}"


def numerics_of(program: Program) -> Numerics:
    """Return the bytes for each parameter."""
    module = program.build()
    size = next(module.parameters()).element_size()
    return Numerics(size, size, size * (parameter_copies(program, module) - 2))


def elements(program: Program) -> int:
    """Count the parameters of the program's model."""
    return sum(p.numel() for p in program.build().parameters())


def _lines(
    rank: RankMeasurements, captured: MeasuredOperators | None
) -> tuple[tuple[LineFit, ...], tuple[LineFit, ...]]:
    """Return forward and backward lines; of a model that can't be captured a third and the rest of a pass."""
    if captured is not None:
        return tuple(captured.forward), tuple(captured.backward)
    whole = LineFit.through({size: statistics.median(times) for size, times in rank.passes.items()})
    return (whole.times(1 / 3),), (whole.times(2 / 3),)


def flops_of(program: Program, job: Job) -> float | None:
    """Count operations of one sample, forward and backward, in matrix products and convolutions; None if torch counts
    none."""
    batch, module = first_batch(job), program.build()
    counter = FlopCounterMode(display=False)
    try:
        with preserve_state(module), program.autocast("cpu"), counter:
            program.loss(call(module, batch.input), batch.target).backward()  # type: ignore[no-untyped-call]
    except (InputError, RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops() / batch.samples or None
