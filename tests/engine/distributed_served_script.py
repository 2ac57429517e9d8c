"""Ranks with servers of A train what is asked for, and each leaves what it has found."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline import PacelineError, launch, train
from paceline.comm import recycling
from tests.engine import programs
from tests.engine.distributed_cases import keep
from tests.engine.served_cases import AHEAD, LOCKSTEP, POLICIES, STEPS, TEAMS, at_servers, program

folder, what, *words = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
QUIET: dict[str, Any] = {"engine": "distributed", "progress": False, "evaluate_every": 10**6}


def lockstep() -> None:
    for name, (given, more, _) in LOCKSTEP.items():
        run = train(given, at_servers(f"replicas={size} {more}"), steps=STEPS, **QUIET)
        keep(Path(folder), name, (run.model, run.summary["updates"]))


def teams() -> None:
    before = dict(os.environ)
    for more in TEAMS:
        given = program(model=programs.wide, clip_norm=0.5)
        run = train(given, at_servers(f"replicas={size // 2} {more}"), steps=4, **QUIET)
        keep(Path(folder), more, (run.model, len(run.summary["parameter_bytes"])))
    assert dict(os.environ) == before


def ahead() -> None:
    for form in AHEAD[size]:
        strategy = f"replicas=1 aggregation=asynchronous pull_ahead=true {form}"
        run = train(program(model=programs.wide, clip_norm=0.5), strategy, steps=STEPS, **QUIET)
        keep(Path(folder), form, (run.model, run.summary["staleness"]))


def policies() -> None:
    for policy in POLICIES:
        run = train(program(), f"replicas={size} servers=2 aggregation={policy}", steps=STEPS, trace=True, **QUIET)
        keep(Path(folder), policy, (run.model, run.summary, sorted({span.replica for span in run.spans})))


def compressed() -> None:
    run = train(program(), f"replicas={size} aggregation=asynchronous compression=fp16", steps=STEPS, **QUIET)
    keep(Path(folder), "compressed", run.summary)


def resumed() -> None:
    settings = {**QUIET, "checkpoint": f"{folder}/ckpt"}
    strategy = at_servers(f"replicas={size} servers=2")
    train(program(), strategy, steps=4, **settings)
    run = train(program(), strategy, steps=STEPS, resume=True, **settings)
    keep(Path(folder), "resumed", run.model)


def loop(worker: Any) -> None:
    """At its fourth step the rank of these words does what they say: raise, die, sleep, or ask to end."""
    who, deed = int(words[0]), words[1]
    for made, batch in enumerate(worker.batches()):
        if made == 3 and rank == who:
            if deed == "raise":
                raise ValueError("as it was asked to")
            if deed == "die":
                signal.raise_signal(signal.SIGKILL)
            if deed == "stop":
                signal.raise_signal(signal.SIGSTOP)
            if deed == "interrupt":
                signal.raise_signal(signal.SIGINT)
        worker.step(batch)


def ended() -> None:
    options = eval(words[2])
    slow = "fraction=1 constant:value=0.01"  # a run of seconds has not thousands of steps
    settings: dict[str, Any] = {**QUIET, "seconds": 1.5, "timeout_s": 60.0, "delay": slow, **options}
    strategy = settings.pop("strategy", "aggregation=asynchronous")
    try:
        run = launch(loop, program(), f"replicas={size} {strategy}", **settings)
    except (PacelineError, ValueError) as error:
        keep(Path(folder), "ended", (type(error).__name__, str(error), [], False))
    else:
        left = [(exit.replica, exit.reason) for exit in run.left]
        keep(Path(folder), "ended", ("", run.summary["updates"], left, run.summary["interrupted"]))


recycling.LEAST_BYTES = 8
globals()[what]()
