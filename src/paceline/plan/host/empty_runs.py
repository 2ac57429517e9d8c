"""Runs in which next to nothing is computed: what an engine's step takes, and a worker holds, whatever the model.

::

    a step, as it was run     |--------------------------------------------|
    its pieces, as measured   |-- pull --|- compute -|- push -|- update -|        what is left is beside them
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from paceline.comm.nursery import Nursery
from paceline.core.types import Seconds
from paceline.engine.base import Engine, Job, Progress
from paceline.engine.local.engine import LocalEngine
from paceline.engine.virtual.pieces.forecast import NEEDS, Forecast, forecast, update_s
from paceline.plan.host.here import job_for
from paceline.program import Program
from paceline.strategy import Strategy

STEPS = 40
"""Of each run."""

KINDS = ("alone", "replicas", "stages", "shards")
"""What a worker may be to the others."""


@dataclass(frozen=True)
class Empty:
    """By kind of worker."""

    base_bytes: Mapping[str, int]
    beside_s: Mapping[str, Seconds]
    """What a step takes beside what its pieces take; below 0 where these count something twice."""
    action_s: Seconds = 0.0
    """What an empty stage takes for a micro-batch, forward and backward."""


@functools.cache
def empty_runs(workers: int) -> Empty:
    """One of each kind, with so many workers; once in a process, for they hang on no program."""
    sizes, seconds, action_s = dict[str, int](), dict[str, Seconds](), 0.0
    nursery = Nursery.start(NEEDS)
    try:
        for kinds in (("alone", "replicas"), ("stages", "shards")):  # those whose fork server imports the same
            with LocalEngine() as engine:
                for kind, job in _jobs(kinds, workers):
                    sizes[kind], step_s = _run(job, engine)
                    seen = forecast(job, nursery)
                    seconds[kind] = step_s - pieces_s(job, seen)
                    action_s = median(seen.compute_s) / _passed(job) if kind == "stages" else action_s
    finally:
        nursery.close()
    return Empty(sizes, seconds, action_s)


def pieces_s(job: Job, seen: Forecast) -> Seconds:
    """A step's pieces together."""
    return seen.pull_s + median(seen.compute_s) + seen.push_s + update_s(job, job.strategy.replicas, seen.steps_on)


def _passed(job: Job) -> int:
    """Of a pipeline's step: m + p - 1 forward and backward passes, one after the other."""
    return job.strategy.micro_batch_count + job.strategy.stage_count - 1


def _jobs(kinds: Iterable[str], workers: int) -> Iterator[tuple[str, Job]]:
    for kind in kinds:
        if kind == "alone":
            yield kind, job_for(_nothing(workers), Strategy(), STEPS)
        elif workers > 1:
            yield kind, job_for(_nothing(workers), f"{kind}={workers}", STEPS)


def _run(job: Job, engine: Engine) -> tuple[int, Seconds]:
    """What the largest worker holds, and the median of its steps."""
    seen = engine.run(job, unwatched).account.workers
    times = [each.step_time_s for each in seen if each.step_time_s is not None]
    return max(each.peak_memory_bytes or 0 for each in seen), median(times)


def _nothing(workers: int) -> Program:
    """As many layers as workers, each with a row for each of them; a sample for each micro-batch."""
    samples = 2 * workers
    data = torch.zeros(8 * samples, workers)
    return Program(
        model=lambda: nn.Sequential(*(nn.Linear(workers, workers) for _ in range(workers))),
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        train=(data, data),
        batch_size=samples,
        name="nothing",
    )


def unwatched(progress: Progress) -> None:
    """Tells nobody how a run stands."""
    del progress
