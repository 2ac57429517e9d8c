"""Stage times without a pipeline: every process works on its own parts of the model, all at the same time.

::

    process 0   F0 B0 F0 B0 ... update | F0 I0 F0 I0 ...      parts 0 (and 2, where they are interleaved)
    process 1   F1 B1 F1 B1 ... update | F1 I1 F1 I1 ...      parts 1 (and 3)
                                       meet: nobody works while another has nothing to do

I is the backward of a part whose linear layers need no gradient of their weights and biases.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from ideal import PartTimes
from job import OPTIMIZER, WARM_UP, Job
from models import Loss, parts
from torch import Tensor, nn

GRADIENT = 1e-4
"""Of what a part makes, about; small, so that random ones lead nowhere."""


class Alone(NamedTuple):
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
        job: says how many micro-batches there are, and how many steps.
        clock: tells seconds.
    """

    def __init__(self, module: nn.Module, number: int, count: int, job: Job, clock: Callable[[], float]) -> None:
        self.module, self._micro_batches, self._clock = module, job.micro_batches, clock
        self._first, self._last = number == 0, number == count - 1
        self._x, self._y = job.model.batch(job.micro_batches)
        self._forwards: list[float] = []
        self._backwards: list[float] = []
        self._inputs: list[float] = []

    def run(self) -> None:
        """Forward and backward of each micro-batch in turn."""
        for forward, backward in self._passes():
            self._forwards.append(forward)
            self._backwards.append(backward)

    def run_inputs(self) -> None:
        """The same without what linear layers need for their own gradients."""
        with _without_products(self.module):
            self._inputs.extend(backward for _, backward in self._passes())

    def medians(self) -> PartTimes:
        """Of a micro-batch, over the steps that count."""
        counted = WARM_UP * self._micro_batches
        return PartTimes(
            *(statistics.median(times[counted:]) for times in (self._forwards, self._backwards, self._inputs))
        )

    def _passes(self) -> Iterator[tuple[float, float]]:
        for x, y in zip(self._x.chunk(self._micro_batches), self._y.chunk(self._micro_batches), strict=True):
            yield self._timed(x, y)

    def _timed(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        received = x.detach().requires_grad_(not self._first)
        began = self._clock()
        made = self.module(received)
        if self._last:
            made = Loss(made, y) / self._micro_batches
        between = self._clock()
        made.backward(None if self._last else GRADIENT * y)
        return between - began, self._clock() - between


def alone(job: Job, count: int) -> Alone:
    """The times of this process's parts: of ``count`` in all it has every P-th."""
    model, clock = job.model.built(), suitable_clock()
    mine = range(dist.get_rank(), count, dist.get_world_size())
    benches = {number: Bench(parts(model, count)[number], number, count, job, clock) for number in mine}
    optimizer = OPTIMIZER([p for bench in benches.values() for p in bench.module.parameters()])
    updates: list[float] = []
    for _ in range(job.all_steps):
        optimizer.zero_grad()
        dist.barrier()
        for bench in benches.values():
            bench.run()
        began = clock()
        optimizer.step()
        updates.append(clock() - began)
        dist.barrier()
        for bench in benches.values():
            bench.run_inputs()
    update = statistics.median(updates[WARM_UP:])
    return Alone({number: bench.medians() for number, bench in benches.items()}, update)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def suitable_clock() -> Callable[[], float]:
    """Wall time; where processes share cores, which makes that say nothing of one of them, processor time."""
    return time.perf_counter if dist.get_world_size() <= cores() else time.thread_time


@contextmanager
def _without_products(module: nn.Module) -> Iterator[None]:
    """While it is entered, linear layers need no gradient of their own."""
    held = [p for layer in module.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)
