"""A rank that dies at its first start, or trains until the one that was started again has made some steps."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline import launch
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator
from paceline.engine.run_context import is_main
from tests.engine.distributed_cases import CASES, attempt, keep, told

folder, backend, case, dying = Path(sys.argv[1]), sys.argv[2], CASES[sys.argv[3]], int(sys.argv[4])
rank, apply = int(os.environ["RANK"]), ReplicatedCoordinator.apply
again = rank == dying and (folder / "died").exists()
rounds: list[list[tuple[int, int, int, int]]] = []
"""Replica, stream and number of the batch, and micro-steps of the replica before it, of each Δ of a round."""


def noted(coordinator: Any, action: Any) -> None:
    replicas = [arrival.replica for arrival, _ in action.deltas]
    batches, clocks = coordinator.batches, [position.clock for position in coordinator.decisions.positions]
    rounds.append([(r, batches[r].stream, batches[r].first, clocks[r] - batches[r].size) for r in replicas])
    apply(coordinator, action)


ReplicatedCoordinator.apply = noted  # type: ignore[method-assign]


def loop(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if rank == dying and not again and made == 3:
            (folder / "died").touch()
            signal.raise_signal(signal.SIGKILL)
        if again and made == 5:
            (folder / "enough").touch()
        if (folder / "enough").exists():
            return
        worker.step(batch)


def run() -> Any:
    settings: dict[str, Any] = {"on_death": "continue", "seconds": 90.0, "evaluate_every": 90.0, "progress": False}
    settings["delay"] = "fraction=1 constant:value=0.01"  # the others train meanwhile, though not thousands of steps
    strategy, engine = f"replicas={os.environ['WORLD_SIZE']} {case.strategy}", f"distributed:{backend}"
    if "wrong" in sys.argv and again:
        settings["seconds"] = 95.0
    run = launch(loop, case.program, strategy, engine=engine, **settings)
    return told(run) | {"left": run.left, "rounds": rounds, "main": is_main(engine)}


keep(folder, "survived", attempt(run))
