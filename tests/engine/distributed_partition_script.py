"""A rank of a host that may be cut off: writes down each update that it makes, until it is told that it is enough."""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline import launch
from paceline.core.errors import PacelineError
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator
from tests.engine import programs

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
log = (folder / f"log.{rank}").open("a", buffering=1)
apply = ReplicatedCoordinator.apply


def written(coordinator: Any, action: Any) -> None:
    apply(coordinator, action)
    content = b"".join(v.numpy().tobytes() for v in coordinator._shard.state.parameters)
    log.write(f"{coordinator.decisions.version + 1} {time.monotonic()} {hashlib.sha256(content).hexdigest()}\n")


ReplicatedCoordinator.apply = written  # type: ignore[method-assign]


def loop(worker: Any) -> None:
    for batch in worker.batches():
        if (folder / "enough").exists():
            return
        worker.step(batch)


settings: dict[str, Any] = {
    "seconds": 300.0,
    "evaluate_every": 300.0,
    "timeout_s": float(sys.argv[3]),
    "progress": False,
}
settings["delay"] = "fraction=1 constant:value=0.02"  # a step takes time: else logs grow by thousands of lines
settings |= {"on_death": "continue", "suspect_after_s": float(sys.argv[2])}
try:
    replicas = os.environ["WORLD_SIZE"]
    run = launch(loop, programs.program(), f"replicas={replicas}", engine="distributed:gloo", **settings)
    outcome = "ended well " + " ".join(str(each.replica) for each in run.left)
except PacelineError as error:
    outcome = f"{type(error).__name__}: {error}"
(folder / f".ended.{rank}").write_text(outcome)
(folder / f".ended.{rank}").rename(folder / f"ended.{rank}")
