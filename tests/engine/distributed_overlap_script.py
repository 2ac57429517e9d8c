"""Trains with Δ cut into many buckets, sent during the backward pass, and as a whole after it; then lets ranks fail."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import launch, train
from paceline.engine.distributed import gradient_buckets, overlap
from tests.engine import programs
from tests.engine.distributed_cases import CASES, GRAPHS, OVERLAPPED, UNDIVIDED, attempt, keep, program, told

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all when one has died, and files are to be written
QUIET: dict[str, Any] = {"engine": "distributed:gloo", "progress": False}


def cut_fine() -> None:
    """Into a bucket for nearly each parameter of the small models here."""
    overlap.BUCKET_BYTES, overlap.FIRST_BUCKET_BYTES = 64, 16
    overlap.SENDING_CORES = -1  # also where ranks have no core for themselves


class Torn(nn.Module):
    """Does something in the backward pass of one rank's third step, when the last layer's gradient is on its way."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act, self.passes = act, 0
        self.first, self.head = programs.mlp(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training and torch.is_grad_enabled()
        between = self.first(x)
        if self.passes == 3 and rank == 1 and between.requires_grad:
            between.register_hook(lambda _: self.act())
        return self.head(between)


def broken() -> None:
    raise ValueError("the tape is torn")


def torn(act: Callable[[], None], loop: Any = None) -> Any:
    settings = QUIET | {"steps": 6, "timeout_s": 30.0}
    return launch(loop or stubborn, programs.program(model=lambda: Torn(act)), f"replicas={ranks}", **settings).summary


def stubborn(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)


def again(worker: Any) -> None:
    """Makes a step anew that has failed."""
    for batch in worker.batches():
        try:
            worker.step(batch)
        except ValueError:
            worker.step(batch)


def off(worker: Any) -> None:
    """Goes where a step has failed."""
    try:
        stubborn(worker)
    except ValueError:
        return


def not_finite() -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        bad = rank == 1 and output.requires_grad and len(seen) == 2
        seen.extend([1] if output.requires_grad else [])
        return nn.functional.cross_entropy(output, target) * (float("nan") if bad else 1.0)

    seen: list[int] = []
    return train(programs.program(loss=loss), f"replicas={ranks}", steps=6, **QUIET)


dist.init_process_group("gloo")
for name, case in OVERLAPPED.items():
    keep(folder, f"{name}, whole", told(case.run(ranks, "distributed:gloo")))
cut_fine()
for name, case in OVERLAPPED.items():
    keep(folder, name, told(case.run(ranks, "distributed:gloo")))
for name in UNDIVIDED:
    keep(folder, name, told(CASES[name].run(ranks, "distributed:gloo")))
keep(folder, "shm", told(train(program(), f"replicas={ranks}", steps=2, engine="distributed:shm", progress=False)))
for name in GRAPHS:
    graph = replace(OVERLAPPED[name], strategy=f"{OVERLAPPED[name].strategy} compile=graph")
    keep(folder, f"{name}, graph", told(graph.run(ranks, "distributed:gloo")))
gradient_buckets.APART_BYTES = 1  # each parameter is large
for name in [*OVERLAPPED][::2]:
    keep(folder, f"{name}, apart", told(OVERLAPPED[name].run(ranks, "distributed:shm")))
torch.manual_seed(0)
mine = programs.mlp()
train(program(model=lambda: mine), f"replicas={ranks}", steps=4, **QUIET)
keep(folder, "hooks", [len(p._post_accumulate_grad_hooks or ()) for p in mine.parameters()])
keep(folder, "traced", told(train(program(), f"replicas={ranks}", steps=8, trace=True, **QUIET)))
for name, function in {
    "raised": lambda: torn(broken),
    "made anew": lambda: torn(broken, again),
    "left": lambda: torn(broken, off),
    "not finite": not_finite,
}.items():
    keep(folder, name, attempt(function))
    dist.barrier()
keep(folder, "killed", attempt(lambda: torn(lambda: signal.raise_signal(signal.SIGKILL))))
