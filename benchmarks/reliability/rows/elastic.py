"""What torchft and Ray Train do where workers are killed or stopped; both are asked for by ``--python``.

They are in no environment of Paceline: ``--python`` names the interpreter of one that has them.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import injector
from injector import TRAINEE, Begun, Trainee, inject, trainee, until

from rows.contract import RAY_TRAIN, TORCHFT, Observed, compared

Systems = dict[str, dict[str, Any]]

SYSTEMS: Systems = {
    TORCHFT: {"script": TRAINEE.with_name("torchft_trainee.py"), "module": "torchft"},
    RAY_TRAIN: {"script": TRAINEE.with_name("ray_trainee.py"), "module": "ray.train.torch"},
}


def _unusable(name: str) -> str | None:
    """Return why a system can't be run; None: it can."""
    words = [injector.other_python, "-c", f"import {SYSTEMS[name]['module']}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:160]


def _disturbed(name: str, trials: int, hit: Callable[[dict[int, Begun]], list[Begun]], number: int) -> Observed:
    """Signal some of four workers; time until the others go on, and until all take part again."""
    reason = _unusable(name)
    if reason is not None:
        return Observed(0, f"not run: {reason}")
    others, all_again, lost = list[float](), list[float](), list[int]()
    for _ in range(trials):
        given = {"script": SYSTEMS[name]["script"], "launcher": [injector.other_python], "steps": 100_000}
        with trainee(**given, pause_s=0.02, checkpoint_every=20) as run:
            newest = _started(run)
            hits = hit(newest)
            at = max(inject(number, each.pid) for each in hits)
            replicas, pids = {each.replica for each in hits}, {each.pid for each in hits}
            reached = max(each.step for each in run.all_begun())
            found = run.wait_for(lambda each, r=replicas, at=at: each.replica not in r and each.time_s > at + 0.3, 60.0)
            run.read = 0
            again = run.wait_for(lambda each, r=replicas, p=pids: each.replica in r and each.pid not in p, 60.0)
            others += [] if found is None else [found.time_s - at]
            all_again += [] if again is None else [again.time_s - at]
            lost += [] if again is None else [max(0, reached - again.step)]
            if number == signal.SIGSTOP:
                for each in hits:
                    inject(signal.SIGCONT, each.pid)
    figures = {"others_median_s": median(others)} if others else {}
    figures |= {"all_again_median_s": median(all_again), "steps_lost_median": median(lost)} if all_again else {}
    return Observed(trials, f"{len(others)} go on, {len(all_again)} with all workers again", figures)


def _started(run: Trainee) -> dict[int, Begun]:
    if not until(lambda: len({each.replica for each in run.all_begun() if each.step >= 30}) == 4, 120.0, 0.05):
        raise RuntimeError(f"it did not start:\n{run.stderr()[-2000:]}")
    time.sleep(random.uniform(0.0, 0.3))
    return {each.replica: each for each in run.all_begun()}


def _one(newest: dict[int, Begun]) -> list[Begun]:
    return [newest[2]]


def _two(newest: dict[int, Begun]) -> list[Begun]:
    return [newest[1], newest[2]]


for _name in SYSTEMS:
    for _row, _hit, _number in (
        ("kill", _one, signal.SIGKILL),
        ("pair", _two, signal.SIGKILL),
        ("stop", _one, signal.SIGSTOP),
    ):

        @compared(_row, _name, trials=3)
        def _observe(trials: int, name: str = _name, hit: Any = _hit, number: int = _number) -> Observed:
            return _disturbed(name, trials, hit, number)
