"""Trains with A in memory that all ranks share, gathered, and whole on each rank; at last one writes what it reads."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import launch, train
from paceline.comm.shared_memory import SharedMemory
from paceline.core.errors import PacelineError
from paceline.engine.distributed import gradient_buckets, shared_parameters
from tests.engine import programs
from tests.engine.distributed_cases import CASES, STEPS, Case, keep, program, told
from tests.engine.test_shared_parameters import DIVIDED, NAMES

folder, scene = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run(name: str, words: str, engine: str = "distributed:shm") -> dict[str, Any]:
    case = CASES[name]
    return told(Case(case.program, f"{case.strategy} {words}", case.settings).run(ranks, engine))


def mapping_of(address: int) -> str:
    """The line of /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= address < high:
            return line
    raise AssertionError(f"{address:x} is in no mapping")


def where(words: str) -> str:
    """How the memory of a parameter is mapped that a replica reads."""
    model = programs.mlp()
    seen = list[str]()

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
            seen.append(mapping_of(next(model.parameters()).data_ptr()))

    strategy = f"replicas={ranks} {words}"
    launch(loop, program(model=lambda: model), strategy, engine="distributed:shm", steps=3, progress=False)
    return seen[-1]


class NoMemory:
    """Of which there is none."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        os.close(fd)
        raise PacelineError(f"{size_bytes} bytes can't be had")

    @classmethod
    def create(cls, name: str, size_bytes: int, **_: Any) -> None:
        raise PacelineError(f"{size_bytes} bytes can't be had for {name}")


@contextlib.contextmanager
def without_memory_on(short: int) -> Any:
    """Context manager: a rank can't map what is to be shared."""
    if rank == short:
        setattr(shared_parameters, "SharedMemory", NoMemory)  # noqa: B010 (the name is a class)
    try:
        yield
    finally:
        setattr(shared_parameters, "SharedMemory", SharedMemory)  # noqa: B010


class Writes(nn.Module):
    """Writes a parameter in its third forward pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.passes = programs.mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += torch.is_grad_enabled()
        if self.passes == 5 and rank == 1:
            with torch.no_grad():
                next(self.rest.parameters()).mul_(0.5)
        return self.rest(x)


if scene == "written":
    train(program(model=Writes), f"replicas={ranks} {DIVIDED}", steps=8, engine="distributed:shm", progress=False)
for name in NAMES:
    keep(folder, f"{name}, whole", run(name, "shard_optimizer=false"))
    keep(folder, f"{name}, gathered", run(name, DIVIDED, "distributed:gloo"))
    keep(folder, f"{name}, shared", run(name, DIVIDED))
for name, settings in {"own model": {}, "own model, watched": {"until": "test_loss<=0"}}.items():
    mine = program().build()
    settings = {"steps": STEPS, "evaluate_every": 2, "engine": "distributed:shm", "progress": False} | settings
    keep(folder, name, told(train(program(model=lambda m=mine: m), f"replicas={ranks} {DIVIDED}", **settings)))
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.mul_(2)
    keep(folder, f"{name}, doubled", {key: value.detach() for key, value in mine.named_parameters()})
keep(folder, "mappings", [where(words) for words in (DIVIDED, "shard_optimizer=false")])
for short in range(2):
    with without_memory_on(short):
        keep(folder, f"without memory on {short}", run("momentum", DIVIDED))
        keep(folder, f"mapping without memory on {short}", where(DIVIDED))
gradient_buckets.APART_BYTES = 1  # each gradient is large
for name in NAMES:
    keep(folder, f"{name}, held", run(name, DIVIDED))
