"""R8: two ranks that train over Gloo on a wire that flips bits, repeats packets, ends connections, is slow."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from injector import Trainee, trainee
from wire import ADDRESSES, INTERFACE, Wire, wire

from rows.contract import Outcome, row

BY_HAND = ("env", sys.executable, str(Path(__file__).parents[1] / "by_hand.py"), "2")
STEPS = 200
"""Twice as many as A is compared after."""


@contextmanager
def on_a_wire(steps: int, **settings: Any) -> Iterator[tuple[Trainee, Wire]]:
    """Context manager: two ranks on a wire of their own."""
    with wire() as carried:
        words = {
            "NAMESPACES": " ".join(carried.namespaces), "MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        launcher = (BY_HAND[0], *(f"{name}={value}" for name, value in words.items()), *BY_HAND[1:])
        given: dict[str, Any] = {"engine": "distributed:gloo", "strategy": "replicas=2", "pause_s": 0.0, "width": 64}
        with trainee(launcher=launcher, steps=steps, **given | settings) as run:
            yield run, carried


def digests(run: Trainee) -> list[str]:
    """Return the digest that each rank printed."""
    lines = (run.folder / "stdout").read_text().splitlines()
    return [json.loads(line)["digest"] for line in lines if line[:1] == "{"]


def undisturbed_digest(steps: int = STEPS) -> str:
    with on_a_wire(steps) as (run, _):
        if run.result() is None:
            raise RuntimeError(f"a run that nothing happened to failed: {run.stderr()[-2000:]}")
        return digests(run)[0]


@row("wire", trials=20)
def bad_wire(trials: int) -> Outcome:
    """R8: what TCP repairs or Paceline names: flips with a wrong sum, repeated packets, cuts, delay, 10 Mbit/s."""
    outcome = Outcome(
        "R8",
        "2 ranks on Gloo; 200 bits flipped, or each packet twice, a connection cut, 50 ms of delay, 10 Mbit/s",
        "all bits as without; a cut ends both ranks with a named error ≤ 10 s; no false death",
    )
    whole, longest = undisturbed_digest(), 0.0
    kinds: dict[str, Callable[[Wire], None]] = {
        "flips": lambda carried: setattr(carried, "flips", 200),
        "repeated": lambda carried: setattr(carried, "repeated", True),
        "cut": lambda carried: setattr(carried, "cut", True),
        "delay": lambda carried: setattr(carried, "delay_s", 0.05),
        "rate": lambda carried: carried.limit("10mbit"),
    }
    for i in range(trials):
        name, act = list(kinds.items())[i % len(kinds)]
        with on_a_wire(STEPS) as (run, carried):
            run.wait_for_step()
            act(carried)
            began = time.monotonic()
            result = run.result()
            took = time.monotonic() - began
            said = run.stderr()
            outcome.figures["flipped"] = outcome.figures.get("flipped", 0) + carried.flipped
            if name == "cut":
                longest = max(longest, took)
                named = said.count("Error: ") and "rank " in said
                failure = "cut: the run went on" if result is not None else f"cut: {took:.1f} s" if took > 10 else None
                outcome.trial(failure, named=bool(named), said=said)
            else:
                same = result is not None and set(digests(run)) == {whole}
                outcome.trial(None if same else f"{name}: {said[-300:] if result is None else 'other bits'}")
    outcome.figures["cut_longest_s"] = longest
    return outcome


@row("wire-flip", trials=30)
def flipped_in_memory(trials: int) -> Outcome:
    """R8: one bit of a tensor, with TCP's sum made to fit: what is found, and what is not."""
    outcome = Outcome(
        "R8",
        "one bit flipped in a tensor under way, with a sum of TCP that fits; 2 ranks on Gloo, 200 updates",
        "ranks that differ are named ≤ 100 updates later; what reaches all ranks alike is not found, and counted here",
    )
    whole, found = undisturbed_digest(), Counter[str]()
    for _ in range(trials):
        with on_a_wire(STEPS) as (run, carried):
            run.wait_for_step()
            carried._draw.seed(outcome.trials)
            carried.mended, carried.flips = True, 1
            result = run.result()
            said = run.stderr()
            ends = set(digests(run))
        if result is None:
            named = "has other parameters" in said
            found["named"] += named
            outcome.trial(None if named else f"ended: {said[-300:]}", named=named, said=said)
        else:
            alike = len(ends) == 1
            found["alike on all ranks, not found" if ends != {whole} else "without effect"] += alike
            outcome.trial(None if alike else "the ranks ended with different parameters")
    outcome.figures |= dict(found)
    return outcome
