"""One rank of a side: trains for some steps, and prints how long one takes and what it sends."""

import functools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from paceline import Program, launch

WIDTH, BATCH = 512, 64


def model() -> nn.Module:
    """A million parameters, 4 MB."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4096, WIDTH, generator=draw), torch.randint(10, (4096,), generator=draw)


def paceline(strategy: str, steps: int) -> dict[str, Any]:
    """Train with Paceline."""
    program = Program(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        train=data(),
        batch_size=BATCH,
    )
    times = list[float]()

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
            times.append(time.perf_counter())

    run = launch(loop, program, strategy, engine="distributed:gloo", steps=steps, evaluate_every=steps, progress=False)
    return {"payload_bytes": run.summary["payload_bytes_per_step"], "step_s": _step_s(times)}


def ddp(steps: int) -> dict[str, Any]:
    """Train with torch alone."""
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    inputs, targets = data()
    times = list[float]()
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(targets)
        nn.functional.cross_entropy(wrapped(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    torch.distributed.destroy_process_group()
    ranks = int(os.environ["WORLD_SIZE"])
    nbytes = sum(p.nbytes for p in wrapped.parameters())
    return {"payload_bytes": 2 * (ranks - 1) * nbytes, "step_s": _step_s(times)}


def _step_s(times: list[float]) -> float:
    """Return the mean time of the second half of the steps: those that exchange are longer than the others."""
    half = len(times) // 2
    return statistics.mean(b - a for a, b in zip(times[half:], times[half + 1 :], strict=False))


if __name__ == "__main__":
    torch.set_num_threads(1)
    side, steps = sys.argv[1], int(sys.argv[2])
    print(json.dumps(ddp(steps) if side == "ddp" else paceline(side, steps)))
