"""A model whose parameters are all one number in every version of A, and which looks whether those it reads are.

Each of its gradients is 1 for every element, and plain SGD with learning rate 1 makes of A_u the number -u everywhere:
in float32 to 2^24 updates, in float64 for longer than anybody waits. So a version that is mixed of two shows at once,
and the last A tells how many updates it has had.
"""

import functools
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import Program


class Checker(nn.Module):
    """Half of its parameters are float32, half float64: two vectors in A, which are one version all the same.

    Args:
        parameters: how many.
        folder: where each process counts its reads, and those that were mixed.
        stop: whether a mixed read ends the run.
    """

    def __init__(self, parameters: int, folder: Path, *, stop: bool) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(parameters // 2))
        self.wide = nn.Parameter(torch.zeros(parameters - parameters // 2, dtype=torch.float64))
        self._folder, self._stop = folder, stop
        self._counts: memoryview | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all parameters. What is read is looked at before and after: it may not move meanwhile either."""
        before = self._ends()
        total: Tensor = x.sum() + self.narrow.sum() + self.wide.sum()
        if self.training:
            self._count({*before, *self._ends()})
        return total

    def _ends(self) -> list[float]:
        """The lowest and the highest parameter, of each dtype."""
        return [float(end) for p in (self.narrow, self.wide) for end in torch.aminmax(p.detach())]

    def _count(self, seen: set[float]) -> None:
        if self._counts is None:
            self._counts = new_counts(self._folder)
        self._counts[0] += 1
        if len(seen) > 1:
            self._counts[1] += 1
            if self._stop:
                raise RuntimeError(f"read {self._counts[0]} is mixed: parameters from {min(seen):g} to {max(seen):g}")


def new_counts(folder: Path) -> memoryview:
    """Two numbers, reads and mixed ones, in a file of this process; they outlive it."""
    path = folder / str(os.getpid())
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def counted(folder: Path) -> tuple[int, int]:
    """Reads, and mixed ones, of all workers; this process, which tried the model once before the start, is none."""
    files = [file for file in folder.iterdir() if file.name != str(os.getpid())]
    counts = [memoryview(file.read_bytes()).cast("q") for file in files]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def make_program(parameters: int, folder: Path, *, stop: bool) -> Program:
    """Each update takes 1 from every parameter."""
    return Program(
        model=functools.partial(Checker, parameters, folder, stop=stop),
        loss=lambda output, _: output,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        train=nothing,
        name="checker",
    )


def nothing(replica: int, replicas: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of one zero."""
    return itertools.repeat((torch.zeros(1), torch.zeros(1)))
