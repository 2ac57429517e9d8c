"""Measuring a profile: one short run of processes that do what workers do.

::

    alone    one process with all threads                       what replicas=1 computes
    all      as many processes as workers, their threads each   what any of the others computes, and what it sends
    runs     of the program itself, some steps of each kind of worker: what a step takes, and a worker holds, beside
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
from paceline.engine.spmd.worker_pool import PRELOAD, WorkerPool
from paceline.engine.step_profile.predict import update_s
from paceline.planner.base import Numerics
from paceline.planner.program.closed_form import job_for
from paceline.planner.program.profile import Busy, LineFit, Profile, Unit, this_machine
from paceline.planner.program.profiler_worker import Captured, Heard, Probe
from paceline.planner.program.short_runs import Runs, short_runs
from paceline.program import Program, call
from paceline.replica.module_utils import preserve_state
from paceline.replica.pipeline.prepare import parameter_copies
from paceline.strategy import Strategy

Tell: TypeAlias = Callable[[str, float], None]
"""(what is measured, the part of all that is done)."""

WHOLE = "the whole model"
"""What the one unit of a model is called that can't be captured."""


def silent(what: str, done: float) -> None:
    """Tells nobody."""
    del what, done


def profile(program: Program, workers: int, tell: Tell = silent, *, runs: bool = True) -> Profile:
    """Measure a program on this host; within a minute, but for models whose single steps take seconds.

    Args:
        program: what is to be trained.
        workers: the most that plans are to be made for.
        tell: of how far it is.
        runs: whether short ones are made as well. Without them a worker's memory is what can be counted and that of a
            process that measures, and a step takes nothing beside its pieces.

    Raises:
        InputError: the program can't make a step.
        WorkerError: a process failed.
    """
    tell("a first step", 0.0)
    job = job_for(program, Strategy())
    batch = first_batch(job).samples
    heard = _heard(job, sorted({1, workers}), _sizes(batch), tell)
    made = _Made(program, job, heard).profile(batch)
    if runs:
        tell("short runs", 0.5)
        made = _with_runs(made, short_runs(program, workers, made))
    tell("done", 1.0)
    return made


def _with_runs(made: Profile, runs: Runs) -> Profile:
    refused = "".join(f"; none of {kind}: {why}" for kind, why in runs.refused.items())
    told = f"measured here of short runs of {', '.join(runs.found) or 'nothing'}{refused}; {_where()}"
    return replace(made, runs=runs.found, provenance={**made.provenance, "context": told})


def _sizes(batch: int) -> list[int]:
    """A whole batch, and micro-batches of a quarter and a sixteenth of it.

    >>> _sizes(32), _sizes(6), _sizes(1)
    ([32, 8, 2], [6, 1], [1])
    """
    return sorted({batch, max(1, batch // 4), max(1, batch // 16)}, reverse=True)


def _heard(job: Job, counts: Sequence[int], sizes: Sequence[int], tell: Tell) -> Mapping[int, Sequence[Heard]]:
    """What each rank has measured, by how many there were."""
    fork_server, found = (
        ForkServer.start((*PRELOAD, "paceline.planner.program.profiler_worker")),
        dict[int, Sequence[Heard]](),
    )
    try:
        for number, count in enumerate(counts):
            tell(f"operators, {count} at work", 0.05 + 0.45 * number / len(counts))
            shards = _shards(count) if count == counts[-1] else []
            with WorkerPool(Probe(job, sizes, shards), count, threads(job, count), fork_server) as crew:
                found[count] = crew.ask(None)
    finally:
        fork_server.close()
    return found


def _shards(workers: int) -> list[int]:
    """Into how many operators may be divided: divisors of the workers, and powers of two below.

    >>> _shards(2), _shards(6), _shards(12), _shards(1)
    ([2], [2, 3, 4, 6], [2, 3, 4, 6, 8, 12], [])
    """
    return [n for n in range(2, workers + 1) if workers % n == 0 or n & (n - 1) == 0]


@dataclass(frozen=True)
class _Made:
    """What was heard, put together."""

    program: Program
    job: Job
    heard: Mapping[int, Sequence[Heard]]

    def profile(self, batch: int) -> Profile:
        most = self.heard[max(self.heard)]
        captured = most[0].captured
        units = tuple(captured.units) if captured else (self._whole(),)
        return Profile(
            self.program.name,
            this_machine(),
            units,
            tuple(self._busy(count) for count in sorted(self.heard)),
            tuple(captured.divisions) if captured else (),
            most[0].refused,
            tuple(most[0].points),
            numerics_of(self.program),
            update_s(self.job, 1),
            max(each.base_bytes for each in most),
            flops_of(self.program, self.job),
            min(each.flops_per_s for each in most),
            elements(self.program),
            batch,
            provenance=self._provenance(),
        )

    def _whole(self) -> Unit:
        return Unit(WHOLE, elements(self.program), LineFit(), LineFit())

    def _busy(self, count: int) -> Busy:
        """Of the slowest: all wait for it at the end of a step."""
        ranks = self.heard[count]
        times = [taken for each in ranks for taken in each.passes[max(each.passes)]]
        low, middle, high = np.quantile(times, (0.05, 0.5, 0.95))
        slowest = max(ranks, key=lambda each: statistics.median(each.passes[max(each.passes)]))
        forward, backward = _lines(slowest, slowest.captured if ranks[0].captured else None)
        return Busy(count, threads(self.job, count), forward, backward, float(low / middle), float(high / middle))

    def _provenance(self) -> dict[str, str]:
        where = _where()
        many = {len(times) for ranks in self.heard.values() for each in ranks for times in each.passes.values()}
        repeats = " or ".join(str(n) for n in sorted(many))
        return {
            "compute": f"measured here, {repeats} passes of each size, {where}",
            "messages": f"measured here among {max(self.heard)} processes, medians of 9, {where}",
            "optimizer": f"measured here, the median of 9 updates, {where}",
            "memory": f"counted: parameters, gradients, optimizer, what each operator saves; {where}",
            "context": f"measured here of processes that measured, {where}",
        }


def _where() -> str:
    """And when."""
    machine = this_machine()
    return f"on {machine.cores} cores of {machine.processor}, {datetime.datetime.now(datetime.UTC).date().isoformat()}"


def numerics_of(program: Program) -> Numerics:
    """Bytes for each parameter."""
    module = program.build()
    size = next(module.parameters()).element_size()
    return Numerics(size, size, size * (parameter_copies(program, module) - 2))


def elements(program: Program) -> int:
    """Of the parameters of its model."""
    return sum(p.numel() for p in program.build().parameters())


def _lines(heard: Heard, captured: Captured | None) -> tuple[tuple[LineFit, ...], tuple[LineFit, ...]]:
    """Forward and backward; of a model that can't be captured a third and the rest of a pass."""
    if captured is not None:
        return tuple(captured.forward), tuple(captured.backward)
    whole = LineFit.through({size: statistics.median(times) for size, times in heard.passes.items()})
    return (whole.times(1 / 3),), (whole.times(2 / 3),)


def flops_of(program: Program, job: Job) -> float | None:
    """Of one sample, forward and backward, as torch counts matrix products and convolutions; None: it counts none."""
    batch, module = first_batch(job), program.build()
    counter = FlopCounterMode(display=False)
    try:
        with preserve_state(module), program.autocast("cpu"), counter:
            program.loss(call(module, batch.input), batch.target).backward()  # type: ignore[no-untyped-call]
    except (InputError, RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops() / batch.samples or None
