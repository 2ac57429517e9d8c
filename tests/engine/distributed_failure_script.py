"""Lets ranks fail, one way after the other, and keeps what each rank is told of it."""

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import launch, train
from tests.engine import programs
from tests.engine.distributed_cases import attempt, keep

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all when one has died, and files are to be written
LATE_S = 6.0
"""Longer than the others wait, and than they then ask who is there."""

QUIET: dict[str, Any] = {"engine": f"distributed:{sys.argv[2]}", "progress": False}


def steps(act: Any, at: int, by: int) -> Any:
    """A loop in which one rank does something before a step of its."""

    def loop(worker: Any) -> None:
        for made, batch in enumerate(worker.batches()):
            if (made, worker.replica) == (at, by):
                act()
            worker.step(batch)

    return loop


def broken() -> None:
    raise ValueError("the tape is torn")


def scenario(name: str, function: Any) -> None:
    began = time.monotonic()
    told = attempt(function)
    keep(folder, name, {"told": told, "seconds": time.monotonic() - began})
    dist.barrier()


def with_loop(act: Any, at: int, by: int, timeout_s: float = 30.0) -> Any:
    run = launch(steps(act, at, by), programs.program(), "replicas=3", steps=6, timeout_s=timeout_s, **QUIET)
    return run.summary


def unequal() -> Any:
    return train(programs.program(seed=rank), "replicas=3", steps=1, **QUIET)


class Scaled(nn.Module):
    """A model whose code can't be seen from its layers."""

    factor = 1.0 if rank == 0 else 2.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = programs.mlp()

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.factor


def smoothed(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output, target, label_smoothing=SMOOTHING)


SMOOTHING = 0.1 * rank
SGD, ADAM = torch.optim.SGD, torch.optim.Adam
WRONG: dict[str, dict[str, Any]] = {
    "rate": {"optimizer": functools.partial(SGD, lr=0.1 if rank == 0 else 0.2)},
    "optimizer": {"optimizer": functools.partial(SGD if rank == 0 else ADAM, lr=0.1)},
    "batch": {"batch_size": 4 if rank == 0 else 8},
    "clip": {"clip_norm": None if rank == 0 else 1.0},
    "length": {"train": programs.data(samples=50 if rank == 0 else 40)},
    "samples": {"train": (programs.data()[0] + rank, programs.data()[1])},
    "loss": {"loss": smoothed},
    "activation": {"model": lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU() if rank == 0 else nn.Tanh()).double()},
    "attribute": {"model": Scaled},
    "shape": {"model": lambda: nn.Linear(6, 3 + rank).double()},
    "scheduler": {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 5 + rank)},
}


def wrong(name: str) -> Any:
    return train(programs.program(**WRONG[name]), "replicas=3", steps=1, **QUIET)


def with_bad_metric() -> Any:
    """One that can be had of the trial's batch, but of nothing that is scored."""
    return programs.program(metrics={"torn": torn}, test=programs.data(samples=20))


def torn(output: Any, target: Any) -> float:
    if len(output) == 20:
        broken()
    return 0.0


def not_finite() -> Any:
    program = programs.program(loss=lambda o, t: nn.functional.cross_entropy(o, t) * float("inf"))
    return train(program, "replicas=3", steps=3, **QUIET)


dist.init_process_group("gloo")  # the user's own, which every run leaves as it is
scenario("fine", lambda: with_loop(int, 0, 0))
scenario("raised", lambda: with_loop(broken, 2, 1))
scenario("in metrics", lambda: train(with_bad_metric(), "replicas=3", steps=3, **QUIET))
scenario("unequal", unequal)
for name in WRONG:
    scenario(f"wrong {name}", lambda name=name: wrong(name))
scenario("not finite", not_finite)
scenario("terminated", lambda: with_loop(lambda: os.kill(os.getpid(), signal.SIGTERM), 3, 1))
scenario("interrupted", lambda: with_loop(lambda: os.kill(os.getpid(), signal.SIGINT), 3, 0))
scenario("late", lambda: with_loop(lambda: threading.Event().wait(LATE_S), 2, 2, timeout_s=1.0))
scenario("fine again", lambda: with_loop(int, 0, 0))
keep(folder, "killed", {"told": attempt(lambda: with_loop(lambda: signal.raise_signal(signal.SIGKILL), 2, 1))})
