"""R7: hosts that can't reach each other for a while (network namespaces and routes into nothing; needs root)."""

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from injector import Begun, Trainee, inject, trainee, until
from kit.hosts import address, hosts

from rows.contract import Outcome, row, times

RANKS, CUT_S, SUSPECT_S = 4, 10.0, 4.0
SHAPES = {"2/2": {(a, b) for a in (0, 1) for b in (2, 3)}, "3/1": {(a, 3) for a in (0, 1, 2)}, "one-way": {(0, 3)}}
"""Who can't reach whom; one-way: packets from rank 3 to the others are lost, those to it arrive."""


@row("partition", trials=100)
def partition(trials: int) -> Outcome:
    """R7: each shape in turn, for ten seconds, then healed; four ranks under torchrun's environment, over Gloo."""
    outcome = Outcome(
        "R7",
        f"4 ranks, each in a network namespace; {', '.join(SHAPES)} cut for {CUT_S:g} s, suspect_after_s={SUSPECT_S:g}",
        "at most one side makes updates; the other stops ≤ 1 s later; all on again ≤ 5 s after, same bits",
    )
    draw, healed = random.Random(77), list[float]()
    for i in range(trials):
        shape = list(SHAPES)[i % len(SHAPES)]
        with hosts(RANKS) as names, _ranks(names) as runs:
            failure, back, said = _trial(names, runs, shape, draw)
        if back is not None:
            healed.append(back)
        outcome.trial(failure and f"{shape}: {failure}", named="rank" in said or failure is None, said=said)
    outcome.figures |= times(healed, "on_again")
    return outcome


def _trial(
    names: list[str], runs: list[Trainee], shape: str, draw: random.Random
) -> tuple[str | None, float | None, str]:
    """Cut and heal; return what went wrong, how long after the healing all went on, and what was said."""
    if any(run.wait_for(lambda each: each.step >= 5, 90.0) is None for run in runs):
        return "it did not start", None, "".join(run.stderr()[-500:] for run in runs)
    time.sleep(draw.uniform(0.0, 0.5))
    cut = inject("cut", shape)
    for a, b in SHAPES[shape]:
        _route(names, b, a, "add")
        if shape != "one-way":
            _route(names, a, b, "add")
    time.sleep(CUT_S)
    heal = inject("healed", shape)
    for a, b in SHAPES[shape]:
        _route(names, b, a, "del")
        if shape != "one-way":
            _route(names, a, b, "del")
    back = [run.wait_for(lambda each: each.time_s > heal, 30.0) for run in runs]
    ended = [run.ends(60.0) for run in runs]
    results, said = [run.printed() for run in runs], "".join(run.stderr()[-500:] for run in runs)
    steps = [_between(run.all_begun(), cut + SUSPECT_S + 1.0, heal) for run in runs]
    committed = {rank for rank, count in enumerate(steps) if count > 1}
    sides = {0: {0, 1}, 1: {2, 3}} if shape == "2/2" else {0: {0, 1, 2}, 1: {3}}
    if sum(bool(committed & side) for side in sides.values()) > 1:
        return f"both sides made steps while cut: {steps}", None, said
    if None in ended or None in back or None in results:
        on = [each is not None for each in back]
        return f"codes {[run.process.returncode for run in runs]}, on again {on}: {said[-200:]}", None, said
    latest = max(each.time_s for each in back if each is not None) - heal
    same = len({result["parameters"] for result in results if result is not None}) == 1
    return (
        (None if same else "ranks have other bits") or (None if latest <= 5.0 else f"on after {latest:.1f} s"),
        latest,
        said,
    )


def _between(steps: list[Begun], since_s: float, until_s: float) -> int:
    return sum(since_s < each.time_s < until_s for each in steps)


def _route(names: list[str], inside: int, to: int, verb: str) -> None:
    """Lose what a host sends to another, or no longer; a route into nothing is silent."""
    words = ["ip", "-n", names[inside], "route", verb, "blackhole", f"{address(to)}/32"]
    subprocess.run(words, check=False, capture_output=True, timeout=20)


@contextlib.contextmanager
def _ranks(names: list[str]) -> Iterator[list[Trainee]]:
    """Context manager: a rank on each host, in torchrun's environment."""
    with contextlib.ExitStack() as stack:
        given: dict[str, Any] = {"strategy": f"replicas={RANKS}", "engine": "distributed:gloo", "seconds": 25.0}
        given |= {"suspect_after_s": SUSPECT_S, "on_death": "continue", "pause_s": 0.02, "checkpoint": None}
        runs: list[Trainee] = []
        for rank, name in enumerate(names):
            about = {"RANK": rank, "WORLD_SIZE": len(names), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            about |= {"MASTER_ADDR": address(0), "MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": "eth0"}
            words = ["ip", "netns", "exec", name, "env", *(f"{key}={value}" for key, value in about.items())]
            runs.append(stack.enter_context(trainee(launcher=[*words, sys.executable], **given)))
        until(lambda: all(Path(run.folder).exists() for run in runs), 5.0)
        yield runs
