"""R20: what fault tolerance costs where nothing fails, and how a run ends that is asked to."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from injector import inject, living, torchrun, trainee, undisturbed, until

from paceline.checkpoint.reader import newest
from rows.contract import Outcome, row, times

OFF: dict[str, Any] = {"checkpoint": None, "on_death": None}
STEPS = {"W1": 1500, "W2": 200, "W3": 60}


def _price(workload: str, pairs: int) -> Outcome:
    """Compare steps with checkpoints every five seconds and on_death=replace with steps without either."""
    outcome = Outcome(
        "R20", f"{workload}: all of it on, nothing failing, beside all of it off", "median step ≤ 3 % longer"
    )
    given: dict[str, Any] = {"workload": workload, "strategy": "replicas=2", "steps": STEPS[workload], "pause_s": 0.0}
    # All samples are evaluated at the start and at the end, on a core that steps would have.
    given |= {"samples": 2048 if workload == "W1" else 256, "evaluate_every": STEPS[workload]}
    ratios: list[float] = []
    for i in range(pairs):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            sides = {
                "on": {"checkpoint": f"{name}/ckpt", "checkpoint_every": "5 s", "on_death": "replace"},
                "off": OFF,
            }
            order = ("on", "off") if i % 2 else ("off", "on")  # who goes first takes turns
            took = {side: undisturbed(**given, **sides[side])["seconds"] for side in order}
        ratios.append(took["on"] / took["off"])
        outcome.trial(None)
    if median(ratios) > 1.03:
        outcome.failures.append(f"median ratio {median(ratios):.3f}")
    outcome.figures |= {"median_ratio": median(ratios), "least": min(ratios), "most": max(ratios)}
    return outcome


@row("price", trials=15)
def price_w1(pairs: int) -> Outcome:
    """R20: W1."""
    return _price("W1", pairs)


@row("price-w2", trials=15)
def price_w2(pairs: int) -> Outcome:
    """R20: W2."""
    return _price("W2", pairs)


@row("price-w3", trials=15)
def price_w3(pairs: int) -> Outcome:
    """R20: W3."""
    return _price("W3", pairs)


@row("stall", trials=5)
def stall(trials: int) -> Outcome:
    """R20: for how long saves of W4 stop training, beside how long the writing of one takes."""
    outcome = Outcome(
        "R20", "W4 (300 MB) saved while it trains", "training stands still ≤ 5 % of the time of a synchronous save"
    )
    given: dict[str, Any] = {"workload": "W4", "strategy": "replicas=1", "steps": 16, "samples": 512, "pause_s": 0.0}
    shares: list[float] = []
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            notes = undisturbed(**given, checkpoint=f"{name}/ckpt", checkpoint_every="8 steps")["notes"]
            synchronous = _synchronous_save(Path(name))
        each = notes["checkpoint_stall_s"] / notes["checkpoints"]
        shares.append(each / synchronous)
        outcome.trial(None if shares[-1] <= 0.05 else f"{each:.3f} s of {synchronous:.2f} s")
    outcome.figures |= {"stall_share_median": median(shares), "stall_share_most": max(shares)}
    return outcome


def _synchronous_save(folder: Path) -> float:
    """Return how long a synchronous save of the same bytes takes: torch.save, flushed to the disk."""

    content = [torch.randn(25_000_000) for _ in range(3)]
    began = time.monotonic()
    with (folder / "plain.pt").open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - began


def _ends(outcome: Outcome, trials: int, number: int, settings: dict[str, Any]) -> Outcome:
    """Ask runs to end at random times: saved and ended in five seconds, nothing left."""
    draw, took = random.Random(20), list[float]()
    for _ in range(trials):
        with trainee(strategy="replicas=4", steps=100_000, **settings) as run:
            run.wait_for_step()
            time.sleep(draw.uniform(0.0, 1.0))
            hit = inject(number, run.process.pid)
            ended = run.ends(30.0) is not None
            took.append(time.monotonic() - hit)
            clean = until(lambda run=run: not living(str(run.folder)), 5.0)
            results, said = run.all_printed(), run.stderr()
            found, damaged = newest(run.folder / "end") if (run.folder / "end").exists() else (None, [])
        saved = found is not None and not damaged and bool(results)
        saved = saved and found is not None and int(found.folder.name[5:]) == results[-1]["updates"]
        interrupted = bool(results) and all(each["interrupted"] for each in results)
        good = ended and clean and saved and interrupted and took[-1] <= 5.0
        failure = f"ended {ended} after {took[-1]:.1f} s, nothing left {clean}, saved {saved}, {said[-100:]}"
        outcome.trial(None if good else failure)
    outcome.figures |= times(took, "ended")
    return outcome


ENDS = "the end saved and the run returned ≤ 5 s, no process after 5 s more"


@row("sigterm", trials=100)
def sigterm(trials: int) -> Outcome:
    """R20: SIGTERM on the local engine."""
    return _ends(Outcome("R20", "SIGTERM, 4 local workers", ENDS), trials, signal.SIGTERM, {})


@row("ctrl-c", trials=100)
def interrupt(trials: int) -> Outcome:
    """R20: SIGINT on the local engine."""
    return _ends(Outcome("R20", "SIGINT, 4 local workers", ENDS), trials, signal.SIGINT, {})


@row("sigterm-ranks", trials=20)
def sigterm_ranks(trials: int) -> Outcome:
    """R20: SIGTERM of torchrun, which hands it on to its ranks."""
    settings = {"launcher": torchrun(4), "engine": "distributed:gloo"}
    return _ends(Outcome("R20", "SIGTERM of torchrun, 4 ranks", ENDS), trials, signal.SIGTERM, settings)
