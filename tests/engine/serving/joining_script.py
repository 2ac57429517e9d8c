"""A script that joins a server, or is one, in a process of its own; killed or interrupted at a moment that it is told.

python joining_script.py FOLDER MOMENT    joins; is killed at the moment, or goes on until the server ends
python joining_script.py FOLDER serve     serves until Ctrl-C
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.engine.server.push_stream import PushStream
from paceline.engine.serving import client
from tests.engine.serving.serving_cases import gradient_step, start

BATCH = torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)

# Step at which a process is killed that is killed at one.
STEP = 3


def killed(*_: Any, **__: Any) -> None:
    """Be no more."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, which is the end of this process when it is called for a time."""
    calls = 0

    @functools.wraps(method)
    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == STEP:
            killed()
        return method(*args, **options)

    return counted


def half(stream: PushStream, *args: Any, **options: Any) -> None:
    """Send the beginning of a push."""
    stream._socket.sendall(b"\0" * 5)
    killed()


def before_leaving(run_replica: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loop of a replica, whose end is that of this process."""

    def run(*args: Any) -> None:
        run_replica(*args)
        killed()

    return run


def prepare(moment: str) -> None:
    """Have this process be killed at the moment."""
    if moment == "joined":
        client.run_replica = killed
    elif moment == "push":
        PushStream.push = half
    elif moment == "pushed":
        PushStream.receive = at_step(PushStream.receive)
    elif moment == "received":
        PushStream.push = at_step(PushStream.push)
    elif moment == "leaving":
        client.run_replica = before_leaving(client.run_replica)
    elif moment == "connected":
        client.JoinedServer.join = killed


def join(folder: Path, moment: str) -> None:
    """Join, train until the server ends, or the moment comes."""
    prepare(moment)
    model, optimizer = start()
    with paceline.join(model=model, optimizer=optimizer, address=folder / "run"):
        step = 0
        while moment != "leaving" or step < STEP:
            gradient_step(model, BATCH)
            if moment == "raises" and step == STEP:
                raise ValueError("it is my own")
            if moment == "computing" and step == STEP:
                killed()
            optimizer.step()
            step += 1
            if moment == "interrupted" and step == STEP:
                os.kill(os.getpid(), signal.SIGINT)


def serve(folder: Path) -> None:
    """Serve until Ctrl-C, and say what came of it."""
    model, optimizer = start()
    strategy = "replicas=1..2 aggregation=asynchronous"
    run = paceline.serve(model=model, optimizer=optimizer, out=folder / "run", strategy=strategy, seconds=600.0)
    print(run.summary["updates"], run.summary["interrupted"], run.summary["signal"])


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "serve":
        serve(where)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            join(where, what)
