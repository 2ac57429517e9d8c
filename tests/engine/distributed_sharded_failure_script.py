"""Lets ranks fail in the middle of a forward whose layers all ranks gather, and keeps what each is told of it."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline import launch
from paceline.comm import register
from tests.engine import programs
from tests.engine.distributed_cases import attempt, keep

folder, backend, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all when one has died, and files are to be written
LATE_S = 6.0
"""Longer than the others wait, and than they then ask who is there."""

acts: list[Callable[[], Any]] = []
"""What this rank does in its next forward."""


class Between(nn.Module):
    """Between two layers that are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        while acts:
            acts.pop()()
        return x


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Between(), nn.Tanh(), nn.Linear(8, 3)).double()


class Direct(nn.Module):
    """Reads a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(x, self.first.weight))


def broken() -> None:
    raise ValueError("the tape is torn")


def trained(loop: Any, model: Any = layers, words: str = "", timeout_s: float = 30.0, **fields: Any) -> Any:
    run = launch(
        loop,
        programs.program(model=model, **fields),
        f"replicas=3 shard_parameters=true {words}",
        engine=f"distributed:{backend}",
        steps=6,
        timeout_s=timeout_s,
        progress=False,
    )
    return run.summary["updates"]


def with_act(act: Callable[[], Any], at: int, by: int, timeout_s: float = 30.0) -> Any:
    def loop(worker: Any) -> None:
        for made, batch in enumerate(worker.batches()):
            if (made, worker.replica) == (at, by):
                acts.append(act)
            worker.step(batch)

    return trained(loop, timeout_s=timeout_s)


def plain(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)


def too_short(worker: Any) -> None:
    for made, batch in enumerate(worker.batches(), start=1):
        worker.step(batch)
        if (made, worker.replica) == (3, 1):
            return


def endless(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) * float("inf")


def scenario(name: str, function: Callable[[], Any]) -> None:
    keep(folder, name, attempt(function))
    dist.barrier()


register()
dist.init_process_group(backend)  # the user's own, which every run leaves as it is
scenario("fine", lambda: trained(plain))
scenario("raised", lambda: with_act(broken, 2, 1))
scenario("not finite", lambda: trained(plain, loss=endless))
scenario("too short", lambda: trained(too_short, words="accumulate=2"))
scenario("direct", lambda: trained(plain, model=Direct))
scenario("late", lambda: with_act(lambda: threading.Event().wait(LATE_S), 2, 2, timeout_s=1.0))
scenario("fine again", lambda: trained(plain))
keep(folder, "killed", attempt(lambda: with_act(lambda: signal.raise_signal(signal.SIGKILL), 2, 1)))
