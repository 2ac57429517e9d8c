"""A rank that trains while others die at chosen moments, and leaves what it has found."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline import launch
from paceline.engine.distributed.client import AllReduceClient
from paceline.engine.distributed.exchange import GradientSync
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.membership import RanksLost
from tests.engine.distributed_cases import CASES, attempt, keep, told

folder, backend, case, steps = Path(sys.argv[1]), sys.argv[2], CASES[sys.argv[3]], int(sys.argv[4])
rank = int(os.environ["RANK"])


def die() -> None:
    signal.raise_signal(signal.SIGKILL)


class Failpoints:
    """Has this rank die, or miss a result, at phases of its steps: ``phase:rank:step``, steps counted from 0."""

    def __init__(self, points: list[str]) -> None:
        split = [point.split(":") for point in points]
        self.own = {(phase, int(step)) for phase, who, step in split if int(who) == rank}
        self.step = -1

    def at(self, phase: str) -> bool:
        return (phase, self.step) in self.own

    def install(self) -> None:
        exchange, take, push, reduce = (
            GradientSync.exchange,
            ReplicatedCoordinator.take,
            AllReduceClient.push,
            Communicator.start_all_reduce,
        )

        def exchanged(sync: Any, *args: Any) -> Any:
            if self.at("before exchange"):
                die()
            if self.at("stop"):
                signal.raise_signal(signal.SIGSTOP)
            statuses = exchange(sync, *args)
            if self.at("result missed"):
                self.own.remove(("result missed", self.step))
                raise RanksLost("a failpoint", 0.0)
            return statuses

        def reduced(communicator: Any, *args: Any) -> Any:
            work = reduce(communicator, *args)
            if self.at("in exchange"):
                die()
            return work

        def taken(coordinator: Any, *args: Any) -> Any:
            if self.at("before update"):
                die()
            return take(coordinator, *args)

        def pushed(client: Any, *args: Any) -> Any:
            self.step += 1
            result = push(client, *args)
            if self.at("after update"):
                die()
            return result

        GradientSync.exchange, ReplicatedCoordinator.take = exchanged, taken  # type: ignore[method-assign]
        AllReduceClient.push, Communicator.start_all_reduce = pushed, reduced  # type: ignore[method-assign]


failpoints = Failpoints([word for word in sys.argv[5:] if word.count(":") == 2])
failpoints.install()


def loop(worker: Any) -> None:
    for batch in worker.batches():
        if failpoints.at("raise"):
            raise ValueError("the tape is torn")
        worker.step(batch)


def run() -> Any:
    settings: dict[str, Any] = {"on_death": "continue", "steps": steps, "evaluate_every": steps}
    settings |= {"progress": False, "timeout_s": 30.0, "suspect_after_s": 1.0}
    settings |= {"checkpoint": folder / "ckpt", "checkpoint_every": "3 steps"} if "checkpoint" in sys.argv else {}
    size = os.environ["WORLD_SIZE"]
    run = launch(loop, case.program, f"replicas={size} {case.strategy}", engine=f"distributed:{backend}", **settings)
    return told(run) | {"left": run.left}


keep(folder, "survived", attempt(run))
