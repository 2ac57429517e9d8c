"""What is trained, and the two things that Paceline is measured beside: processes at a barrier, and DDP on Gloo.

Both write what rank 0 has seen, and what it ended with, to a file.
"""

import functools
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline import Program
from paceline.datasets.models import cnn, mlp

RANKS = 2
TIMEOUT_S = 120.0
"""Bound on every wait."""

READY = 8
"""Batches that lie ready on each rank, and are fed again and again: data cost no time."""


class Case(NamedTuple):
    """One model and its batches."""

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a batch of one rank."""


CASES = {
    "cnn": Case("small CNN", functools.partial(cnn, 1, 28), (128, 1, 28, 28)),
    "mlp": Case("784-2048-2048-10 MLP", functools.partial(mlp, 784, 2048, 2048, 10), (32, 784)),
}


def make_program(name: str) -> Program:
    """The same job for all: A_0 is made under its seed."""
    return Program(
        model=CASES[name].model,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        train=functools.partial(batches, name),
        name=name,
    )


def batches(name: str, rank: int, ranks: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The endless batches of one rank."""
    draw = torch.Generator().manual_seed(seed * ranks + rank)
    shape = CASES[name].shape
    return itertools.cycle(
        [(torch.randn(shape, generator=draw), torch.randint(10, shape[:1], generator=draw)) for _ in range(READY)]
    )


def at_barrier(rank: int, name: str, steps: int, folder: str) -> None:
    """Forward, backward and a step of its own; then wait for the other. Nothing is exchanged."""
    torch.set_num_threads(1)
    module = make_program(name).build()
    barrier = Barrier(rank, Path(folder) / "barrier")
    _loop(rank, name, steps, folder, module, barrier.wait)


def on_gloo(rank: int, name: str, steps: int, folder: str) -> None:
    """DistributedDataParallel with its defaults, on Gloo over loopback."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    module = nn.parallel.DistributedDataParallel(make_program(name).build())
    _loop(rank, name, steps, folder, module, lambda: None)
    torch.distributed.barrier()
    # All is written, and the other has come as far. Going on to the destructors, a rank once aborted under torch 2.13:
    # "terminate called without an active exception", the end of a thread that still runs.
    os._exit(0)


def _loop(rank: int, name: str, steps: int, folder: str, module: nn.Module, meet: Callable[[], None]) -> None:
    program = make_program(name)
    optimizer = program.optimizer(module.parameters())
    stamps = []
    for inputs, targets in itertools.islice(batches(name, rank, RANKS, program.seed), steps):
        program.loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        meet()
        stamps.append(time.perf_counter())
    if rank == 0:
        plain = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        torch.save((stamps, plain.state_dict()), Path(folder) / "seen")


class Barrier:
    """Two processes meet: each counts in its own cache line of a shared file, and looks at the other's without sleep.

    The quickest there is, so that the pair is no easier to come near than it has to be. Relies on x86's store order.
    """

    def __init__(self, rank: int, path: Path) -> None:
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._mine, self._other = rank * 8, (1 - rank) * 8

    @staticmethod
    def new(path: Path) -> None:
        """Make the file."""
        path.write_bytes(bytes(8 * 8 * RANKS))

    def wait(self) -> None:
        """Until the other has come as often."""
        self._counts[self._mine] += 1
        deadline = time.monotonic() + TIMEOUT_S
        while self._counts[self._other] < self._counts[self._mine]:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other process did not come to the barrier within {TIMEOUT_S:g} s")
