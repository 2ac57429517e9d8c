"""Paceline's side: the distributed engine, with a loop that others may step beside."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from job import OPTIMIZER, Job
from models import SEED, Loss, cuts

import paceline

Step: TypeAlias = Callable[[], None]


def trained(words: str, job: Job, steps: int, loop: Callable[[Step], None], *, trace: bool = False) -> paceline.Run:
    """A run of as many stages as there are ranks, cut where the others are.

    Args:
        words: the rest of the strategy.
        job: what is trained.
        steps: that ``loop`` makes.
        loop: calls what it is given once for each step.
        trace: whether spans are kept.

    Raises:
        ArithmeticError: it was cut elsewhere, so that its times would say nothing.
    """
    program = paceline.Program(
        model=job.model.make,
        loss=Loss,
        optimizer=OPTIMIZER,
        train=lambda replica, replicas, seed: itertools.repeat(job.model.batch(job.micro_batches)),
        batch_size=job.micro_batches * job.model.samples,
        seed=SEED,
    )

    def stepped(worker: Any) -> None:
        batch = next(worker.batches())  # the same again and again, as on the other sides
        loop(lambda: worker.step(batch))

    strategy = paceline.Strategy.parse(
        f"stages={dist.get_world_size()} micro_batches={job.micro_batches} threads=1 {words}"
    )
    strategy = dataclasses.replace(strategy, cuts=cuts(strategy.order.parts(strategy.stage_count)))
    run = paceline.launch(
        stepped, program, strategy, engine=f"distributed:{job.backend}", steps=steps, evaluate_every=10**6,
        progress=False, trace=trace,
    )  # fmt: skip
    if len(set(run.summary["parameter_bytes"])) > 1:
        raise ArithmeticError(f"{strategy} made stages of {run.summary['parameter_bytes']} bytes of parameters each")
    return run


def times(count: int) -> Callable[[Step], None]:
    """A loop that makes so many steps."""

    def loop(step: Step) -> None:
        for _ in range(count):
            step()

    return loop
