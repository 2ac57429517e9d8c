"""Models of many kinds, captured, cut and run as a pipeline, compared with one process after five steps."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from paceline import Program
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.schedule import parse
from tests.replica.pipeline.cut_models import Attention
from tests.replica.pipeline.hand_cuts import evenly, own
from tests.replica.pipeline.pipeline_world import Alone, World, same
from tests.zoo import SAMPLES, ZOO, Job

SCHEDULES = ["sequential", "gpipe", "1f1b", "zero-bubble", "interleaved:chunks=2"]
MICRO_BATCHES = {1: 3, 2: 4, 3: 3, 4: 4}
OPTIMIZERS = {
    "sgd": functools.partial(SGD, lr=0.05, momentum=0.9),
    # The bias of attention's keys has a gradient of zero but for rounding; a large eps does not blow that up to steps.
    "adam": functools.partial(Adam, lr=0.01, eps=1e-4),
}
BOUND = 1e-10
"""Both add up the same float64 numbers in another order; Adam's eps makes steps of at most 1e4 · lr times an error."""


@functools.cache
def prepared(name: str) -> tuple[Job, Units]:
    """A model of the zoo without dropout, which one process draws otherwise than a pipeline."""
    job = ZOO[name]()
    return job, group(capture(undropped(job), job.inputs))


def undropped(job: Job) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = job.model().train()
    for module in model.modules():
        names = [n for n, v in vars(module).items() if isinstance(v, float) and ("drop" in n or n == "p")]
        for each in names:
            setattr(module, each, 0.0)
    return model


def running(module: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, _ in module.named_buffers() if "running" in n or "num_batches" in n)


def world_of(name: str, schedule: str, workers: int, optimizer: str, **options: Any) -> tuple[World, Alone, Batch]:
    job, units = prepared(name)
    parts = parse(schedule).parts(workers)
    if parts > len(units.groups):
        pytest.skip(f"{name} can't be cut into {parts} parts")
    data = (torch.zeros(1), torch.zeros(1))
    program = Program(lambda: undropped(job), job.loss, OPTIMIZERS[optimizer], train=data)
    alone = Alone(program, MICRO_BATCHES[workers])
    buffers = running(alone.module)
    made = evenly(units, parts)
    world = World(program, nn.Module, schedule, workers, MICRO_BATCHES[workers], options, buffers=buffers, cutter=made)
    return world, alone, Batch(job.inputs, job.targets, SAMPLES)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ZOO)
def test_five_steps_equal_one_process(name: str, schedule: str, workers: int) -> None:
    optimizer = "adam" if (workers + SCHEDULES.index(schedule)) % 2 else "sgd"
    world, alone, batch = world_of(name, schedule, workers, optimizer)
    for _ in range(5):
        world.all(lambda member: member.step(batch))
        alone.step(batch)
        same(world.gradients(), alone.values() | alone.gradients(), BOUND)
    same(world.values(), alone.values(), BOUND)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", ["boundaries", "all"])
@pytest.mark.parametrize("name", ZOO)
def test_what_is_made_again_is_the_same(name: str, recompute: str, schedule: str) -> None:
    world, alone, batch = world_of(name, schedule, 2, "sgd", recompute=recompute)
    for _ in range(2):
        world.all(lambda member: member.step(batch))
        alone.step(batch)
    same(world.gradients(), alone.values() | alone.gradients(), BOUND)
    same(world.values(), alone.values(), BOUND)


@functools.cache
def attention() -> tuple[nn.Module, Units]:
    """Values whose dims have another order in memory."""
    torch.manual_seed(4)
    model = Attention().double()
    return model, group(capture(model, torch.randn(6, 2, 6, 6, dtype=torch.float64), others=(), verified=False))


@pytest.mark.parametrize("recompute", ["none", "boundaries", "all"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved:chunks=2"])
def test_a_value_arrives_in_its_order_in_memory(schedule: str, recompute: str) -> None:
    """In parts that begin at views: where the values before them are contiguous, those can't be made."""
    model, units = attention()
    borders = [units.nodes()[name] for name in ("view", "scaled_dot_product_attention", "view_4")]
    borders = borders if "interleaved" in schedule else borders[1:]
    program = Program(
        lambda: copy.deepcopy(model), lambda y, target: (y * target).mean(), OPTIMIZERS["sgd"], (torch.zeros(1),) * 2
    )
    workers, alone = 2 if "interleaved" in schedule else 3, Alone(program, 2)
    made = own(cut(units, borders))
    world = World(program, nn.Module, schedule, workers, 2, {"recompute": recompute}, cutter=made)
    for samples in (6, 4, 6):
        x, y = (torch.randn(samples, *shape, dtype=torch.float64) for shape in ((2, 6, 6), (3, 9)))
        batch = Batch(x, y, samples)
        world.all(lambda member, batch=batch: member.step(batch))
        alone.step(batch)
    same(world.gradients(), alone.gradients(), BOUND)
    same(world.values(), alone.values(), BOUND)


class Conjugates(nn.Module):
    """torch marks conjugates, and their imaginary parts as negative, and leaves what is in memory as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        conjugate = (torch.fft.fft(x) @ self.filter).conj()
        imaginary = conjugate.imag
        return self.head(conjugate.abs() * imaginary)


def test_conjugates_are_sent_as_numbers() -> None:
    torch.manual_seed(4)
    model = Conjugates().double()
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    units = group(capture(model, x, others=(), verified=False))
    data = (torch.zeros(1), torch.zeros(1))
    program = Program(lambda: copy.deepcopy(model), lambda y, target: (y * target).mean(), OPTIMIZERS["sgd"], data)
    alone, made = Alone(program, 2), own(cut(units, units.candidates))
    world = World(program, nn.Module, "1f1b", len(units.groups), 2, cutter=made)
    world.all(lambda member: member.step(Batch(x, y, 6)))
    alone.step(Batch(x, y, 6))
    same(world.gradients(), alone.gradients(), BOUND)


def test_fewer_rows_of_another_length() -> None:
    world, alone, batch = world_of("gpt2", "1f1b", 2, "sgd")
    ids = batch.input["input_ids"]
    for rows, length in ((6, 9), (5, 4), (1, 7), (6, 9)):
        other = Batch({"input_ids": ids[:rows, :length]}, batch.target[:rows, :length], rows)
        world.all(lambda member, other=other: member.step(other))
        alone.step(other)
    same(world.values(), alone.values(), BOUND)
