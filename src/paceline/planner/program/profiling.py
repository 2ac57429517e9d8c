"""Measuring a profile: processes that do the work of workers, then short runs of the program.

::

    alone    one process with all threads                       operators of replicas=1
    all      as many processes as workers, their threads each   operators of every other arrangement, and messages
    runs     some steps of the program by each kind of worker   overhead of a step, and memory of a worker
"""

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.engine.run_context import first_batch, threads
from paceline.engine.step_profile.forecast import NEEDS, measure_on_ranks, update_s
from paceline.planner.base import Numerics
from paceline.planner.program.closed_form import job_for
from paceline.planner.program.graph_profile import RankMeasurements, measure_rank
from paceline.planner.program.profile import Busy, LineFit, Profile, Unit, this_machine
from paceline.planner.program.short_runs import short_runs
from paceline.program import Program, call
from paceline.replica.module_utils import preserve_state
from paceline.replica.pipeline.prepare import parameter_copies
from paceline.strategy import Strategy

# Progress callback: (the current measurement, the completed share of all).
Notify: TypeAlias = Callable[[str, float], None]

# Name of the only unit of a model that can't be captured.
WHOLE = "the whole model"


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
    ranks = _measure(job, workers, batch, notify)
    most, count, machine, module = ranks[workers], elements(program), this_machine(), program.build()
    size = next(module.parameters()).element_size()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"on {machine.cores} cores of {machine.processor}, {date}"
    repeats = {len(times) for each in ranks.values() for rank in each for times in rank.passes.values()}
    measured = Profile(
        program.name,
        machine,
        most[0].units or (Unit(WHOLE, count, LineFit(), LineFit()),),
        tuple(_busy(job, each) for _, each in sorted(ranks.items())),
        most[0].divisions,
        most[0].refused,
        most[0].points,
        Numerics(size, size, size * (parameter_copies(program, module) - 2)),
        update_s(job, 1),
        max(each.base_bytes for each in most),
        flops_of(program, job),
        min(each.flops_per_s for each in most),
        count,
        batch,
        provenance={
            "compute": f"measured here, {' or '.join(map(str, sorted(repeats)))} passes of each size, {where}",
            "messages": f"measured here among {workers} processes, medians of 9, {where}",
            "optimizer": f"measured here, the median of 9 updates, {where}",
            "memory": f"counted: parameters, gradients, optimizer, what each operator saves; {where}",
            "context": f"measured here of processes that measured, {where}",
        },
    )
    if runs:
        notify("short runs", 0.5)
        found, refused = short_runs(program, workers, measured)
        none = "".join(f"; none of {kind}: {reason}" for kind, reason in refused.items())
        source = f"measured here of short runs of {', '.join(found) or 'nothing'}{none}; {where}"
        measured = replace(measured, runs=found, provenance={**measured.provenance, "context": source})
    notify("done", 1.0)
    return measured


def _measure(job: Job, workers: int, batch: int, notify: Notify) -> Mapping[int, Sequence[RankMeasurements]]:
    """Return each rank's measurements, of one rank alone and of as many as workers, by the number of ranks."""
    # A line through three sizes tells what grows with the batch from the cost to launch an operator.
    sizes = sorted({batch, max(1, batch // 4), max(1, batch // 16)}, reverse=True)
    # sharding is planned for divisors of the workers, and powers of two below
    shards = [n for n in range(2, workers + 1) if workers % n == 0 or n & (n - 1) == 0]
    ranks, counts = dict[int, Sequence[RankMeasurements]](), sorted({1, workers})
    with closing(ForkServer.start((*NEEDS, "paceline.planner.program.graph_profile"))) as fork_server:
        for number, count in enumerate(counts):
            notify(f"operators, {count} at work", 0.05 + 0.45 * number / len(counts))
            measure = partial(measure_rank, job, sizes, shards if count == workers else ())
            ranks[count], _ = measure_on_ranks(measure, job, count, fork_server)
    return ranks


def _busy(job: Job, ranks: Sequence[RankMeasurements]) -> Busy:
    """Return the times of the slowest of ranks at work at the same time: all wait for it at the end of a step."""
    times = [each.passes[max(each.passes)] for each in ranks]
    low, middle, high = np.quantile([seconds for each in times for seconds in each], (0.05, 0.5, 0.95))
    slowest = max(zip(ranks, map(statistics.median, times), strict=True), key=itemgetter(1))[0]
    low, high = float(low / middle), float(high / middle)
    return Busy(len(ranks), threads(job.strategy, len(ranks)), slowest.forward, slowest.backward, low, high)


def elements(program: Program) -> int:
    """Count the parameters of the program's model."""
    return sum(p.numel() for p in program.build().parameters())


def flops_of(program: Program, job: Job) -> float | None:
    """Count operations of one sample, forward and backward, in matrix products and convolutions; None if torch counts
    none."""
    batch, module = first_batch(job), program.build()
    counter = FlopCounterMode(display=False)
    try:
        with preserve_state(module), program.autocast("cpu"), counter:
            program.loss(call(module, batch.input), batch.target).backward()
    except (InputError, RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops() / batch.samples or None
