"""Ranks with callbacks, each of which leaves how its own were called."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline import CallbackError, PacelineError, train
from tests.callbacks.recording import Recording
from tests.engine import programs
from tests.engine.distributed_cases import keep, told

folder, what = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
QUIET: dict[str, Any] = {"engine": "distributed", "progress": False, "steps": 10**6}
program = programs.program(test=programs.data(samples=20))


def stopped() -> None:
    for strategy in ("replicas=2", "replicas=1 stages=2", "replicas=2 aggregation=asynchronous"):
        recording = Recording(stop_after=3)
        run = train(program, strategy, evaluate_every=4, callbacks=[recording], **QUIET)
        keep(folder, strategy, (recording.names(), told(run)))


def failing() -> None:
    for strategy in ("replicas=2", "replicas=2 aggregation=asynchronous"):
        try:
            train(program, strategy, evaluate_every=4, callbacks=[Recording(fails="record")], **QUIET)
        except CallbackError as error:
            keep(folder, strategy, [type(error).__name__, str(error)])
    try:
        train(program, "replicas=2", callbacks=[Recording()] if rank == 0 else [], **QUIET)
    except PacelineError as error:
        keep(folder, "different", [type(error).__name__, str(error)])


def dying(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 0 and made == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


def survivor() -> None:
    recording = Recording()
    settings = QUIET | {"steps": 20, "evaluate_every": 4, "on_death": "continue"}
    train(program, "replicas=2", loop=dying, callbacks=[recording], **settings)
    keep(folder, "survivor", (recording.names(), len(recording.handle.history), recording.of("departure")))


{"stopped": stopped, "failing": failing, "survivor": survivor}[what]()
