"""One rank on each of two hosts: trains, then loses one."""

import signal
import sys
from pathlib import Path
from typing import Any

from paceline import Run, launch, train
from tests.engine import programs
from tests.engine.distributed_cases import CASES, STEPS, attempt, keep, told
from tests.engine.served_cases import SPANNING, at_servers

folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the other has died, and a file is to be written
traced = dict(CASES["momentum"].settings) | {"trace": True}
keep(folder, "momentum", told(CASES["momentum"].run(2, "distributed")))
keep(
    folder,
    "traced",
    told(
        launch(
            lambda w: [w.step(b) for b in w.batches()],
            CASES["momentum"].program,
            "replicas=2",
            engine="distributed",
            progress=False,
            **traced,
        )
    ),
)

given = CASES["momentum"].program


def cut_and_whole(checkpoints: Path) -> list[Run]:
    """Runs of a replica that spans both hosts and keeps optimizers: one in two parts, one whole."""
    strategy = "stages=2 servers=1 aggregation=local-steps:period=2,over=asynchronous"
    settings: dict[str, Any] = {"engine": "distributed", "progress": False}
    whole = train(given, strategy, steps=8, **settings)
    train(given, strategy, steps=4, checkpoint=checkpoints, **settings)
    return [train(given, strategy, steps=8, checkpoint=checkpoints, resume=True, **settings), whole]


strategy = at_servers("replicas=2 servers=2")
for team in SPANNING:
    keep(folder, team, train(given, at_servers(team), engine="distributed", progress=False, steps=STEPS).model)
keep(folder, "kept", [model.state for model in cut_and_whole(folder / "checkpoints")])
keep(folder, "served", train(given, strategy, engine="distributed", progress=False, steps=STEPS).model)


def leaving(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if (made, worker.replica) == (2, 1):
            signal.raise_signal(signal.SIGTERM)
        worker.step(batch)


keep(
    folder,
    "leaving",
    attempt(
        lambda: (
            launch(
                leaving,
                given,
                "replicas=2 servers=1 aggregation=asynchronous",
                engine="distributed",
                progress=False,
                seconds=3.0,
                delay="fraction=1 constant:value=0.01",  # which has not thousands of steps
            ).left
        )
    ),
)


def loop(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if (made, worker.replica) == (2, 1):
            signal.raise_signal(signal.SIGKILL)
        worker.step(batch)


keep(
    folder,
    "killed",
    attempt(
        lambda: launch(
            loop, programs.program(), "replicas=2", steps=5, engine="distributed", progress=False, timeout_s=20
        )
    ),
)
