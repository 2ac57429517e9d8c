"""R1, R4, R5: workers that are killed, two at a time as well, stopped, or hold their interpreter."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from injector import Trainee, inject, trainee, undisturbed

from rows.contract import Outcome, row, times

STEPS = 400
SUSPECT_S = 2.0

Hits = list[tuple[int, float, float]]
"""Replica, when it was hit, and how long it took until another began its step."""


@row("kill", trials=100)
def kill_a_worker(trials: int) -> Outcome:
    """R1: SIGKILL one of four workers at a random time, synchronous, on_death=replace."""
    outcome = Outcome(
        "R1", "SIGKILL one of 4 workers at a random time", "next update ≤ 3 s, all bits as without a kill"
    )
    _disturb(outcome, trials, _killed, 3.0, strategy="replicas=4")
    _stops_by_name(outcome)
    return outcome


@row("gang", trials=40)
def kill_a_gang(trials: int) -> Outcome:
    """R1 over replicas of two workers, in stages."""
    outcome = Outcome("R1", "SIGKILL one worker of 2 replicas × 2 stages", "next update ≤ 8 s, all bits as without")
    return _disturb(outcome, trials, _killed, 8.0, strategy="replicas=2 stages=2")


@row("pair", trials=40)
def kill_two(trials: int) -> Outcome:
    """R4: SIGKILL two of four workers at once."""
    outcome = Outcome("R4", "SIGKILL 2 of 4 workers at once", "both back ≤ 8 s, all bits as without")
    return _disturb(outcome, trials, _two_killed, 8.0, strategy="replicas=4")


@row("starting", trials=40)
def kill_the_replacement(trials: int) -> Outcome:
    """R4: SIGKILL a worker, and the one that takes its place while it starts."""
    outcome = Outcome("R4", "SIGKILL one of 4 workers, then its replacement while it starts", "back ≤ 8 s, all bits")
    return _disturb(outcome, trials, _killed_while_starting, 8.0, strategy="replicas=4")


@row("meanwhile", trials=40)
def kill_another_meanwhile(trials: int) -> Outcome:
    """R4: SIGKILL a worker, and another while the replacement of the first starts."""
    outcome = Outcome(
        "R4", "SIGKILL one of 4 workers, then another while its replacement starts", "both back ≤ 8 s, all bits"
    )
    return _disturb(outcome, trials, _another_killed_meanwhile, 8.0, strategy="replicas=4")


@row("stop", trials=30)
def stop_a_worker(trials: int) -> Outcome:
    """R5: SIGSTOP one of four workers; SIGCONT after 30 s, if it still lives then."""
    outcome = Outcome(
        "R5", "SIGSTOP one of 4 workers for 30 s", f"back ≤ 3 s with a bound of {SUSPECT_S:g} s, all bits as without"
    )
    return _disturb(outcome, trials, _stopped, 3.0, strategy="replicas=4", suspect_after_s=SUSPECT_S)


@row("interpreter", trials=30)
def hold_the_interpreter(trials: int) -> Outcome:
    """R5: a C function that one worker calls holds its interpreter for 20 s, its threads included."""
    outcome = Outcome(
        "R5",
        "one of 4 workers holds its GIL for 20 s",
        f"back ≤ 5 s with a bound of {SUSPECT_S:g} s, all bits as without",
    )
    given = {"strategy": "replicas=4", "steps": 40, "on_death": "replace", "suspect_after_s": SUSPECT_S}
    whole, draw, backs = undisturbed(**given), random.Random(5), list[float]()
    for _ in range(trials):
        replica, step = draw.randrange(4), draw.randrange(5, 30)
        with trainee(**given, hold={"point": "interpreter", "replica": replica, "step": step}) as run:
            held = run.wait_for(lambda each, at=(replica, step): (each.replica, each.step) == at)
            back = run.wait_for(
                lambda each, r=replica, h=held: each.replica == r and h is not None and each.pid != h.pid
            )
            result = run.result()
        late = None
        if held is not None and back is not None:
            inject("GIL held from", f"{held.time_s:.3f} by {held.pid}")
            backs.append(back.time_s - held.time_s)
            late = f"back after {backs[-1]:.1f} s" if backs[-1] > 5.0 else None
        outcome.trial(ending(result, whole, run) or late, named=_named(result, replica, "silent for"))
    outcome.figures |= times(backs, "back")
    return outcome


def ending(result: dict[str, Any] | None, whole: dict[str, Any], run: Trainee) -> str | None:
    """Return what is wrong with the end of a run; None: it is that of the undisturbed one."""
    if result is None:
        return f"the run did not end well: {run.process.returncode}"
    return None if result["digest"] == whole["digest"] else "it ended with other bits"


def _named(result: dict[str, Any] | None, replica: int, cause: str) -> bool:
    left = [] if result is None else result["left"]
    return any(text.startswith(f"replica {replica}:") and cause in text for text in left)


def _disturb(
    outcome: Outcome,
    trials: int,
    hit: Callable[[Trainee, random.Random], Hits | None],
    bound_s: float,
    **settings: Any,
) -> Outcome:
    """Hit workers of long runs at random times, one hit after the other, and compare each run's end."""
    given = {"steps": STEPS, "on_death": "replace"} | settings
    whole, draw, backs = undisturbed(**given), random.Random(7), list[float]()
    while outcome.trials < trials:
        hits = list[Hits]()
        with trainee(**given) as run:
            run.wait_for_step()
            while outcome.trials + len(hits) < trials:
                time.sleep(draw.uniform(0.02, 0.3))
                if run.process.poll() is not None or not run.workers():
                    break
                done = hit(run, draw)
                if done is None:  # the run was at its end
                    break
                hits.append(done)
            result = run.result()
        failure = ending(result, whole, run)
        if failure is not None and not hits:
            outcome.trial(failure)
        for each in hits:
            longest = max(back for _, _, back in each)
            backs.append(longest)
            cause = "silent for" if hit is _stopped else "SIGKILL"
            named = all(_named(result, replica, cause) for replica, _, _ in each)
            outcome.trial(failure or (f"back after {longest:.1f} s" if longest > bound_s else None), named=named)
    outcome.figures |= times(backs, "back")
    return outcome


def _killed(run: Trainee, draw: random.Random) -> Hits | None:
    return _hit(run, [draw.choice(run.workers())], signal.SIGKILL)


def _two_killed(run: Trainee, draw: random.Random) -> Hits | None:
    return _hit(run, draw.sample(run.workers(), 2), signal.SIGKILL)


def _killed_while_starting(run: Trainee, draw: random.Random) -> Hits | None:
    row = draw.choice(run.workers())
    if _hit_one(run, row, signal.SIGKILL) is None:
        return None
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and run.process.poll() is None:
        after = [each for each in run.workers() if each["replica"] == row["replica"] and each["pid"] != row["pid"]]
        if after:
            time.sleep(draw.uniform(0.0, 0.04))  # it begins its first step after about 0.06 s
            return _hit(run, after, signal.SIGKILL)
    return None


def _another_killed_meanwhile(run: Trainee, draw: random.Random) -> Hits | None:
    first, second = draw.sample(run.workers(), 2)
    at = _hit_one(run, first, signal.SIGKILL)
    if at is None:
        return None
    time.sleep(draw.uniform(0.0, 0.05))
    return _hit(run, [second], signal.SIGKILL, [(first["replica"], at)])


def _stopped(run: Trainee, draw: random.Random) -> Hits | None:
    row = draw.choice(run.workers())
    at = _hit_one(run, row, signal.SIGSTOP)
    hits = None if at is None else _backs(run, [(row["replica"], at)])
    if at is not None and hits is not None:
        while _lives(row["pid"]) and time.monotonic() < at + 30.0:
            time.sleep(0.01)
        if _lives(row["pid"]):
            inject(signal.SIGCONT, row["pid"])
    return hits


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _hit(
    run: Trainee, rows: list[dict[str, Any]], number: int, before: list[tuple[int, float]] | None = None
) -> Hits | None:
    """Signal some workers, and wait until others have taken their places; None: the run was at its end."""
    hit = [*(before or [])]
    for each in rows:
        at = _hit_one(run, each, number)
        if at is None:
            return None
        hit.append((each["replica"], at))
    return _backs(run, hit)


def _hit_one(run: Trainee, row: dict[str, Any], number: int) -> float | None:
    run.begun()
    try:
        return inject(number, row["pid"])
    except ProcessLookupError:
        return None


def _backs(run: Trainee, hit: list[tuple[int, float]]) -> Hits | None:
    waiting, hits = dict(hit), Hits()

    def back(begun: Any) -> bool:
        at = waiting.get(begun.replica)
        if at is not None and begun.time_s > at + 0.05:  # a step that had begun before does not count
            hits.append((begun.replica, at, begun.time_s - at))
            del waiting[begun.replica]
        return not waiting

    return None if run.wait_for(back) is None else hits


def _stops_by_name(outcome: Outcome) -> None:
    """Note whether on_death=stop ends with one error that names replica, step and cause."""
    with trainee(strategy="replicas=4", steps=STEPS, on_death="stop") as run:
        run.wait_for_step()
        row = run.workers()[2]
        inject(signal.SIGKILL, row["pid"])
        run.ends()
        said = run.stderr()
    if re.search(r"WorkerError: replica 2 died at its step \d+: killed by SIGKILL", said) is None:
        outcome.unnamed.append(said[-300:])
