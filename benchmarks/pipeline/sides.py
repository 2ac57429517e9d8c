"""One turn of each side: what a step takes on this rank, and the parameters that it ends with."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from job import OPTIMIZER, WARM_UP, Job, Turn
from models import SEED, Loss, cuts, parts
from torch import Tensor, nn

import paceline
from paceline import schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

ONE, OURS, THEIRS = "one process", "paceline", "torch"

INSIDE = ("gpipe", "1f1b", "interleaved")
"""What torch has by the same rule."""

Side = Callable[[Job], Turn]


def one(job: Job) -> Turn:
    """One process that goes through all micro-batches, while the others wait; all end with its parameters."""
    model, (x, y) = job.model.built(), job.model.batch(job.micro_batches)
    optimizer = OPTIMIZER(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for a, b in zip(x.chunk(job.micro_batches), y.chunk(job.micro_batches), strict=True):
            torch.autograd.backward(Loss(model(a), b) / job.micro_batches)
        optimizer.step()

    times = _timed(job, step) if dist.get_rank() == 0 else [0.0]
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    return Turn(times, _state(model))


def theirs(name: str, job: Job) -> Turn:
    """torch.distributed.pipelining, with stages written by hand."""
    group, ranks, rank = dist.new_group(backend=job.backend), dist.get_world_size(), dist.get_rank()
    cut = dict(enumerate(parts(job.model.built(), schedule.parse(name).parts(ranks))))
    mine = {number: part for number, part in cut.items() if number % ranks == rank}
    pipeline = _their_pipeline(name, job, mine, len(cut), group)
    optimizer = OPTIMIZER([parameter for part in mine.values() for parameter in part.parameters()])
    x, y = job.model.batch(job.micro_batches)
    given: tuple[Tensor, ...] = (x,) if 0 in mine else ()
    wanted: dict[str, Any] = {"target": y} if len(cut) - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        pipeline.step(*given, **wanted, losses=losses, return_outputs=False)
        optimizer.step()

    times = _timed(job, step)
    dist.barrier()  # nobody's sockets close before all have what was sent
    dist.destroy_process_group(group)
    return Turn(times, {name: value for part in mine.values() for name, value in _state(part).items()})


def _their_pipeline(name: str, job: Job, mine: Mapping[int, nn.Module], count: int, group: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    crosses, first = torch.empty(job.model.shape, requires_grad=True), torch.empty(job.model.shape)
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, number, count, device, crosses if number else first, crosses, group=group)
        for number, part in mine.items()
    ]
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), job.micro_batches, Loss)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], job.micro_batches, Loss)


def _timed(job: Job, step: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(job.all_steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def ours(name: str, job: Job) -> Turn:
    """Paceline's distributed engine."""
    times: list[float] = []
    run = trained(f"schedule={name}", job, times)
    return Turn(times[WARM_UP:], dict(run.state))


def trained(words: str, job: Job, times: list[float], *, trace: bool = False) -> paceline.Run:
    """A run of as many stages as there are ranks, cut where the others are.

    Args:
        words: the rest of the strategy.
        job: what is trained.
        times: gets the seconds of each step.
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

    def loop(worker: Any) -> None:
        batch = next(worker.batches())  # the same again and again, as on the other sides
        for _ in range(job.all_steps):
            began = time.perf_counter()
            worker.step(batch)
            times.append(time.perf_counter() - began)

    strategy = paceline.Strategy.parse(
        f"stages={dist.get_world_size()} micro_batches={job.micro_batches} threads=1 {words}"
    )
    strategy = dataclasses.replace(strategy, cuts=cuts(strategy.order.parts(strategy.stage_count)))
    run = paceline.launch(
        loop, program, strategy, engine=f"distributed:{job.backend}", steps=job.all_steps, evaluate_every=10**6,
        progress=False, trace=trace,
    )  # fmt: skip
    if len(set(run.summary["parameter_bytes"])) > 1:
        raise ArithmeticError(f"{strategy} made stages of {run.summary['parameter_bytes']} bytes of parameters each")
    return run
