"""R19: a run whose processes are killed again and again, main under a supervisor loop."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from injector import inject, living, trainee, undisturbed, until

from rows.contract import Outcome, row

KILL_EVERY_S = 15.0
RAY = {"engine": "ray", "strategy": "replicas=4 standby=1"}


@row("chaos", trials=1800, stated=1)
def chaos(seconds: int) -> Outcome:
    """R19: workers and main, on the local engine."""
    return _soak(_outcome("workers and main", seconds), seconds, {"strategy": "replicas=4"})


@row("chaos-server", trials=600, stated=1)
def chaos_on_ray(seconds: int) -> Outcome:
    """R19: replicas, the server, which has a standby, and main, on Ray."""
    return _soak(_outcome("replicas, server and main on Ray", seconds), seconds, RAY)


def _outcome(whom: str, seconds: int) -> Outcome:
    return Outcome(
        "R19",
        f"one of {whom} SIGKILLed every {KILL_EVERY_S:g} s for {seconds} s and more, under a supervisor loop",
        "no manual action; goodput ≥ 60 %; nothing left over; descriptors +0, memory +5 % at most; all bits as without",
    )


def _soak(outcome: Outcome, seconds: int, settings: dict[str, Any]) -> Outcome:
    """Kill while a run lasts that takes the time without a kill, so longer; start main again where it was hit."""
    given = settings | {"pause_s": 0.02, "on_death": "replace"}
    rate = 200 / undisturbed(**given, steps=200)["seconds"]
    given["steps"] = steps = int(rate * seconds)
    draw, kills, began, growth = random.Random(17), 0, time.monotonic(), list[tuple[int, int]]()
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    due, result, processes = began + KILL_EVERY_S, None, list[int]()
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        saving = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "5 s", "resume": True}
        while result is None and time.monotonic() < began + 3 * seconds + 60:
            with trainee(**given, **saving) as run:
                run.wait_for_step()
                while run.process.poll() is None and time.monotonic() < began + 3 * seconds + 60:
                    growth += _size(run.process.pid)
                    time.sleep(min(1.0, max(0.01, due - time.monotonic())))
                    if time.monotonic() < due:
                        continue
                    targets = [each["pid"] for role in ("replica", "coordinator") for each in run.workers(role)]
                    due += KILL_EVERY_S
                    try:
                        inject(signal.SIGKILL, draw.choice([*targets, run.process.pid]))
                        kills += 1
                    except ProcessLookupError:
                        continue
                result = run.result(10.0)
                until(lambda run=run: not living(str(run.folder)), 15.0)
                processes += living(str(run.folder))
    took = time.monotonic() - began
    whole = undisturbed(**given | {"pause_s": 0.0}, bound_s=2 * seconds + 60.0)  # the pauses change no bit
    goodput = steps / rate / took
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name not in shared and "paceline" in path.name]
    same = result is not None and result["digest"] == whole["digest"]
    grown = _growth(growth)
    passed = same and goodput >= 0.6 and not left and not processes and grown["descriptors"] <= 0
    passed = passed and grown["memory"] <= 1.05
    said = f"goodput {goodput:.2f}, same bits {same}, left {left} {processes}, grown {grown}"
    outcome.trial(None if passed else said)
    outcome.figures |= {"kills": kills, "goodput": goodput, "seconds": took, "descriptors_more": grown["descriptors"]}
    outcome.figures |= {"memory_times": grown["memory"]}
    return outcome


def _size(pid: int) -> list[tuple[int, int]]:
    """Return the descriptors and resident bytes of a process; nothing if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return [(len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))]
    except (OSError, IndexError):
        return []


def _growth(sizes: list[tuple[int, int]]) -> dict[str, float]:
    """Compare the median of main in the last tenth of the time with that in the second tenth."""
    tenth = max(1, len(sizes) // 10)
    early, late = sizes[tenth : 2 * tenth] or sizes, sizes[-tenth:]

    def middle(part: list[tuple[int, int]], which: int) -> int:
        return sorted(each[which] for each in part)[len(part) // 2] if part else 0

    more = middle(late, 0) - middle(early, 0)
    return {"descriptors": more, "memory": middle(late, 1) / max(1, middle(early, 1))}
