"""One turn of each side: how long a step takes on this rank, in the processes that are there."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, Data
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline

WARM_UP = 3
"""Steps that do not count."""

RATE, MOMENTUM = 0.01, 0.9


def alone(model: str, batch: int, steps: int) -> list[float]:
    """Processes that communicate nothing: nobody can be quicker but by chance."""
    make, data = MODELS[model]
    return _plain(make(), data(batch), steps)


def ddp(backend: str, model: str, batch: int, steps: int) -> list[float]:
    """torch's DistributedDataParallel, as its users write it."""
    make, data = MODELS[model]
    group = dist.new_group(backend=backend)
    times = _plain(DistributedDataParallel(make(), process_group=group), data(batch), steps)
    dist.destroy_process_group(group)
    return times


def _plain(model: nn.Module, data: Data, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    x, y = data
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def ours(backend: str, words: str, model: str, batch: int, steps: int) -> list[float]:
    """Paceline's distributed engine."""
    make, data = MODELS[model]
    torch.manual_seed(0)
    program = paceline.Program(
        model=make,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        train=data(batch * dist.get_world_size()),
        batch_size=batch,
    )
    times = []

    def loop(worker: Any) -> None:
        batches = worker.batches()
        one = next(batches)  # the same again and again, as on the other sides
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            worker.step(one)
            times.append(time.perf_counter() - began)

    strategy = f"replicas={dist.get_world_size()} threads=1 {words}"
    paceline.launch(
        loop, program, strategy, engine=f"distributed:{backend}", steps=WARM_UP + steps, evaluate_every=10**6,
        progress=False,
    )  # fmt: skip
    return times[WARM_UP:]


SIDES: dict[str, Callable[[str, int, int], list[float]]] = {
    "alone": alone,
    "ddp gloo": functools.partial(ddp, "gloo"),
    "ddp shm": functools.partial(ddp, "shm"),
    "paceline gloo": functools.partial(ours, "gloo", ""),
    "paceline shm": functools.partial(ours, "shm", ""),
    "paceline shm, divided": functools.partial(ours, "shm", "shard_optimizer=true"),
}
"""Name -> (model, batch, steps) -> seconds of each step."""


def middle(times: list[float]) -> float:
    """The median of a turn, of the slowest rank."""
    word = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.item()
