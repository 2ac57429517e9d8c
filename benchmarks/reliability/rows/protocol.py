"""R2: a worker killed at each point of the protocol, of the saves, and of the start of the one that replaces it."""

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from failpoints import MAIN_POINTS, WORKER_POINTS
from injector import BOUND_S, Trainee, inject, living, trainee, undisturbed

from rows.contract import Outcome, row
from rows.workers import ending

POINTS = (*WORKER_POINTS, *MAIN_POINTS, "writing", "joining")
REPLICAS, SEEDS = 4, 5
GIVEN: dict[str, Any] = {"strategy": f"replicas={REPLICAS}", "steps": 20, "pause_s": 0.0, "on_death": "replace"}
SAVING = {"checkpoint_every": "2 steps", "pause_s": 0.02}


@row("protocol", trials=len(POINTS) * REPLICAS * SEEDS)
def kill_at_a_point(trials: int) -> Outcome:
    """R2: each point × each replica × so many seeds, spread evenly where there are fewer trials."""
    outcome = Outcome(
        "R2",
        "SIGKILL a worker at a point of the protocol: " + ", ".join(POINTS),
        "all end with all bits as without a kill",
    )
    cases = [(point, replica, seed) for seed in range(SEEDS) for replica in range(REPLICAS) for point in POINTS]
    whole = undisturbed(**GIVEN)
    for i in range(trials):
        point, replica, seed = cases[i if trials == len(cases) else (i * 9) % len(cases)]  # 9: each point in turn
        failure = _trial(point, replica, random.Random(f"{point} {replica} {seed}"), whole)
        outcome.trial(None if failure is None else f"{point}, replica {replica}, seed {seed}: {failure}")
    return outcome


def _trial(point: str, replica: int, draw: random.Random, whole: dict[str, Any]) -> str | None:
    """Kill a worker at a point; return what went wrong."""
    given, step = dict(GIVEN), draw.randrange(3, 15)
    if point in ("staging", "writing"):
        given |= SAVING
        step = draw.randrange(1, 5)
    if point in (*WORKER_POINTS, *MAIN_POINTS):
        given["hold"] = {"point": point, "replica": replica, "step": step}
    with trainee(**given) as run:
        if point == "writing":
            reached = _kill_while_writing(run, replica, step, draw)
        elif point == "joining":
            reached = _kill_twice(run, replica, step, draw)
        else:
            reached = _wait(run, (run.folder / "held").exists)
            if reached:
                inject(f"at {point}: ", replica)
                _kill(run, replica)
            (run.folder / "go").touch()
        result = run.result()
        failure = None if reached else "the run did not come to the point"
        if failure is None and result is not None and not any("SIGKILL" in text for text in result["left"]):
            failure = f"nobody was killed: {result['left']}"
        return failure or ending(result, whole, run)


def _kill(run: Trainee, replica: int) -> int:
    """Kill the present worker of a replica; return its id."""
    pid = next(row["pid"] for row in run.workers() if row["replica"] == replica)
    inject(signal.SIGKILL, pid)
    return int(pid)


def _kill_while_writing(run: Trainee, replica: int, saves: int, draw: random.Random) -> bool:
    """Suspend the writer in the middle of a save, kill a worker, and in half of the cases the writer as well."""
    folder = run.folder / "end"

    def partial() -> bool:
        complete = len(list(folder.glob("step-*"))) if folder.exists() else 0
        return complete >= min(saves, 3) and any(folder.glob(".step-*.partial"))

    if not _wait(run, partial):
        return False
    writer = next((pid for pid in living(str(run.folder)) if b"writer_process" in _words(pid)), None)
    if writer is None:
        return False
    inject(signal.SIGSTOP, writer)
    _kill(run, replica)
    time.sleep(draw.uniform(0.0, 0.1))
    if draw.random() < 0.5:
        inject(signal.SIGKILL, writer)
    else:
        inject(signal.SIGCONT, writer)
    return True


def _kill_twice(run: Trainee, replica: int, step: int, draw: random.Random) -> bool:
    """Kill a worker at a step, and the next one of its replica while it starts."""
    if run.wait_for(lambda each: (each.replica, each.step) == (replica, step)) is None:
        return False
    first = _kill(run, replica)

    def replaced() -> bool:
        return any(row["replica"] == replica and row["pid"] != first for row in run.workers())

    if not _wait(run, replaced):
        return False
    time.sleep(draw.uniform(0.0, 0.05))
    _kill(run, replica)
    return True


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _wait(run: Trainee, condition: Any) -> bool:
    """Wait until something is true of a run; False: it has ended before."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        if condition():
            return True
        try:
            run.process.wait(0.001)
            return False
        except subprocess.TimeoutExpired:
            continue
    return False
