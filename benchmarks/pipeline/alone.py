"""Stage times without a pipeline: every process works on its own parts of the model, all at the same time.

::

    process 0   F0 B0 F0 B0 ... update | F0 I0 F0 I0 ...      parts 0 (and 2, where they are interleaved)
    process 1   F1 B1 F1 B1 ... update | F1 I1 F1 I1 ...      parts 1 (and 3), in the order of the schedule
                                       meet: no worker computes while another is idle

I is the backward of a part whose linear layers need no gradient of their weights and biases.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from ideal import PartTimes
from job import OPTIMIZER, Job
from models import Loss, parts
from torch import Tensor, nn

from paceline.schedule import Schedule

GRADIENT = 1e-4
"""Of what a part makes, about; small, so that random ones lead nowhere."""


class Measured(NamedTuple):
    """What one process measured of itself: medians."""

    parts: dict[int, PartTimes]
    """By their numbers."""
    update: float


class Bench:
    """One part of the model, and tensors as its neighbours would send them.

    Args:
        module: the part.
        number: of the part.
        count: of all parts.
        job: says how many micro-batches there are.
        clock: tells seconds.
    """

    def __init__(self, module: nn.Module, number: int, count: int, job: Job, clock: Callable[[], float]) -> None:
        self.module, self._clock = module, clock
        self._first, self._last = number == 0, number == count - 1
        x, y = job.model.batch(job.micro_batches)
        self._xs, self._ys = x.chunk(job.micro_batches), y.chunk(job.micro_batches)
        self._made: dict[int, Tensor] = {}
        self.forwards: list[float] = []
        self.backwards: list[float] = []

    def forward(self, i: int) -> None:
        """Of micro-batch i."""
        began = self._clock()
        made: Tensor = self.module(self._xs[i].detach().requires_grad_(not self._first))
        if self._last:
            made = Loss(made, self._ys[i]) / len(self._ys)
        self._made[i] = made
        del made
        self.forwards.append(self._clock() - began)

    def backward(self, i: int) -> None:
        """Of micro-batch i, until all that was kept for it has been let go of."""
        gradient = None if self._last else GRADIENT * self._ys[i]
        began = self._clock()
        torch.autograd.backward([self._made[i]], None if gradient is None else [gradient])
        del self._made[i]
        self.backwards.append(self._clock() - began)

    def take(self) -> tuple[float, float]:
        """The median forward and backward, which are forgotten."""
        found = statistics.median(self.forwards), statistics.median(self.backwards)
        self.forwards.clear()
        self.backwards.clear()
        return found


class Alone:
    """The parts of this process under one schedule.

    Args:
        job: what is trained.
        schedule: of all processes.
    """

    def __init__(self, job: Job, schedule: Schedule) -> None:
        ranks, rank, self._clock = dist.get_world_size(), dist.get_rank(), suitable_clock()
        count = schedule.parts(ranks)
        cut = parts(job.model.built(), count)
        self._benches = {
            number: Bench(cut[number], number, count, job, self._clock)
            for number in range(count)
            if schedule.worker_of(number, ranks) == rank
        }
        self._actions = list(schedule.actions(rank, ranks, job.micro_batches))
        self._halves = schedule.splits_backward
        self._optimizer = OPTIMIZER([p for bench in self._benches.values() for p in bench.module.parameters()])

    def measure(self, steps: int) -> Measured:
        """So many steps, and one before them that doesn't count."""
        self._step()
        self._take()
        updates = [self._step() for _ in range(steps)]
        whole, inputs = self._take(), self._inputs(steps) if self._halves else {}
        made = {number: PartTimes(f, b, inputs.get(number, b)) for number, (f, b) in whole.items()}
        return Measured(made, statistics.median(updates))

    def _step(self) -> float:
        """All actions in their order; seconds of the update."""
        self._optimizer.zero_grad()
        self._go()
        began = self._clock()
        self._optimizer.step()
        return self._clock() - began

    def _inputs(self, steps: int) -> Mapping[int, float]:
        """Seconds of the halves of backward that give gradients of inputs, by part."""
        for _ in range(steps):
            dist.barrier()
            with _without_products([bench.module for bench in self._benches.values()]):
                self._go()
        return {number: backward for number, (_, backward) in self._take().items()}

    def _go(self) -> None:
        for action in self._actions:
            if action.kind == "forward":
                self._benches[action.stage].forward(action.micro_batch)
            elif action.kind != "backward_weight":
                self._benches[action.stage].backward(action.micro_batch)

    def _take(self) -> dict[int, tuple[float, float]]:
        return {number: bench.take() for number, bench in self._benches.items()}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def suitable_clock() -> Callable[[], float]:
    """Wall time; where processes share cores, which makes that say nothing of one of them, processor time."""
    return time.perf_counter if dist.get_world_size() <= cores() else time.thread_time


@contextmanager
def _without_products(modules: list[nn.Module]) -> Iterator[None]:
    """While it is entered, linear layers need no gradient of their own."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
    held = [p for layer in layers for p in layer.parameters()]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)
