"""R19: a run whose processes are killed again and again."""

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from injector import TRAINEE, Trainee, trainee, undisturbed

from rows.contract import Outcome, row


@row("chaos", trials=1800)
def chaos(seconds: int) -> Outcome:
    """R19: a random process, worker or main, is killed every few seconds; a supervisor loop starts main again."""
    outcome = Outcome(
        "R19",
        f"a random process, main included, killed every 4 s for {seconds} s under a supervisor loop",
        "no manual action; goodput ≥ 60 %; no process, memory file or descriptor left; all bits as without kills",
    )
    given: dict[str, Any] = {"strategy": "replicas=4", "pause_s": 0.02, "on_death": "replace", "steps": 50}
    rate = 50 / undisturbed(**given)["seconds"]
    steps = int(rate * seconds * 0.6)
    given["steps"] = steps
    draw, kills, began = random.Random(17), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        saving = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "1 s", "resume": True}
        result: dict[str, Any] | None = None
        while result is None and time.monotonic() - began < 4 * seconds:
            with trainee(**given, **saving) as run:
                run.wait_for_step()
                while run.process.poll() is None and result is None:
                    if not _ends_within(run, 4.0) and time.monotonic() - began < seconds:
                        targets = [*(row["pid"] for row in run.workers()), run.process.pid]
                        os.kill(draw.choice(targets), signal.SIGKILL)
                        kills += 1
                if run.process.returncode == 0:
                    result = run.result()
    took = time.monotonic() - began
    whole = undisturbed(**given)
    left = [path.name for path in Path("/dev/shm").glob("*paceline*")]
    alive = subprocess.run(["pgrep", "-f", str(TRAINEE)], check=False, capture_output=True, text=True).stdout.split()
    goodput = steps / rate / took
    same = result is not None and result["digest"] == whole["digest"]
    passed = same and goodput >= 0.6 and not left and not alive
    outcome.trial(None if passed else f"goodput {goodput:.2f}, same bits {same}, left {left}, alive {alive}")
    outcome.figures |= {"kills": kills, "goodput": goodput, "seconds": took}
    return outcome


def _ends_within(run: Trainee, seconds: float) -> bool:
    try:
        run.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
