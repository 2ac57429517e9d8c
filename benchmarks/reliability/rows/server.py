"""R3: the process that holds A is killed: main on this host, the server's actor on Ray, with a standby or without."""

import random
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from injector import BOUND_S, Trainee, inject, living, trainee, undisturbed, until

from rows.contract import Outcome, row, times
from rows.workers import ending

RAY: dict[str, Any] = {"engine": "ray", "steps": 400, "pause_s": 0.01, "on_death": "replace"}


@row("coordinator", trials=50)
def kill_main(trials: int) -> Outcome:
    """R3: SIGKILL of main, without whom there is no A; another main goes on from the newest checkpoint."""
    outcome = Outcome(
        "R3",
        "SIGKILL the main process of 4 workers; start it again",
        "all processes ended ≤ 10 s, no shared memory left; goes on, at most one interval lost",
    )
    given: dict[str, Any] = {"strategy": "replicas=4", "steps": 300, "checkpoint_every": "20 steps", "resume": True}
    whole, draw, ended, back = undisturbed(**given), random.Random(3), list[float](), list[float]()
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            saving = {"checkpoint": f"{name}/ckpt"}
            with trainee(**given, **saving) as run:
                until(lambda folder=Path(name): any(folder.glob("ckpt/step-*")), 60.0)
                time.sleep(draw.uniform(0.0, 0.5))
                hit = inject(signal.SIGKILL, run.process.pid)
                run.process.wait()
                gone = until(lambda run=run: not living(str(run.folder)), 10.0)
                ended.append(time.monotonic() - hit)
                done, said = max(each.step for each in run.all_begun()), run.stderr()
                left = [path.name for path in Path("/dev/shm").glob("*paceline*")]
            with trainee(**given, **saving) as run:
                started = run.wait_for_step()
                back.append((started or time.monotonic()) - hit)
                result = run.result()
        failure = ending(result, whole, run)
        if not gone or left:
            failure = f"processes left: {not gone}, shared memory left: {left}"
        elif result is not None and _from(result) < done - 1 - 20 - 20:  # one interval, and the save under way
            failure = f"{done} steps had begun, went on from {_from(result)}"
        outcome.trial(failure, named="for the main process was killed" in said, said=said)
    outcome.figures |= times(ended, "all_ended") | times(back, "back")
    return outcome


def _from(result: dict[str, Any]) -> int:
    found = re.search(r"update (\d+)", str(result["notes"].get("resumed", "")))
    return int(found[1]) if found else 0


@row("server", trials=50)
def kill_the_server(trials: int) -> Outcome:
    """R3: SIGKILL of Ray's server actor without a standby."""
    outcome = Outcome(
        "R3", "SIGKILL the server of 4 replicas on Ray, no standby", "ends ≤ 10 s with one error that names it, saved"
    )
    draw, ended = random.Random(4), list[float]()
    for _ in range(trials):
        with trainee(strategy="replicas=4", **RAY, timeout_s=60.0) as run:
            pid = _server(run)
            time.sleep(draw.uniform(0.1, 1.0))
            hit = inject(signal.SIGKILL, pid)
            took = run.ends(30.0)
            ended.append(time.monotonic() - hit)
            code, said = run.process.returncode, run.stderr()
            gone = until(lambda run=run: not living(str(run.folder)), 10.0)
        failure = None if took is not None and ended[-1] <= 10.0 and code else f"after {ended[-1]:.1f} s: {code}"
        failure = failure or (None if gone else "processes are left")
        outcome.trial(failure, named="WorkerError: the server died" in said, said=said)
    outcome.figures |= times(ended, "ended")
    return outcome


@row("standby", trials=50)
def kill_a_server_with_a_standby(trials: int) -> Outcome:
    """R3: SIGKILL of Ray's server actor, whose standby takes over; steps that were acknowledged are in the end's A."""
    return _killed(trials, 5, "standby=1", ["coordinator"], "SIGKILL the server of 4 replicas on Ray, standby=1")


@row("servers", trials=50)
def kill_one_of_several_servers(trials: int) -> Outcome:
    """R3: SIGKILL of any of two servers and their standbys, of which each has a slice of A, in turn."""
    roles = ["coordinator", "server 1", "standby", "standby of server 1"]
    injection = "SIGKILL one of 2 servers or a standby of 4 replicas on Ray, in turn, servers=2 standby=1"
    return _killed(trials, 6, "servers=2 standby=1", roles, injection)


def _killed(trials: int, seed: int, servers: str, roles: Sequence[str], injection: str) -> Outcome:
    """Kill a process in each trial, of these roles in turn, whose work another one has as well."""
    outcome = Outcome("R3", injection, "next step ≤ 3 s, no acknowledged update lost, all bits as without")
    given = {"strategy": f"replicas=4 {servers}", **RAY}
    whole, draw, back = undisturbed(**given), random.Random(seed), list[float]()
    for trial in range(trials):
        role = roles[trial % len(roles)]
        with trainee(**given) as run:
            pid = _server(run, role)
            time.sleep(draw.uniform(0.1, 1.0))
            run.begun()
            hit = inject(signal.SIGKILL, pid)
            acknowledged = _acknowledged(run)
            # Steps that had been granted before go on for a moment.
            again = run.wait_for(lambda each, steps=acknowledged: each.step > steps.get(each.replica, 0) + 2)
            if again is not None:
                back.append(again.time_s - hit)
            result = run.result()
        failure = ending(result, whole, run)
        if failure is None and result is not None and result["applied"] < 4 * RAY["steps"]:
            failure = f"{result['applied']} applied of {4 * RAY['steps']}"
        if failure is None and (again is None or back[-1] > 3.0):
            failure = f"next step after {back[-1] if back else 0:.1f} s"
        named = result is not None and "standby" in str(result["notes"]) + str(result["left"])
        outcome.trial(failure, named=named, said=f"{role}: {result and (result['notes'], result['left'])}")
    outcome.figures |= times(back, "back")
    return outcome


def _server(run: Trainee, role: str = "coordinator") -> int:
    """Wait for training; return the process of an actor that has A, or a slice of it."""
    if run.wait_for_step() is None:
        raise RuntimeError(f"the run did not start in {BOUND_S:g} s: {run.process.poll()}\n{run.stderr()[-2000:]}")
    until(lambda: bool(run.workers(role)), 30.0)
    return int(run.workers(role)[0]["pid"])


def _acknowledged(run: Trainee) -> dict[int, int]:
    """Return the newest step of each replica; that it has begun means that the one before was acknowledged."""
    newest: dict[int, int] = {}
    for each in run.all_begun():
        newest[each.replica] = max(each.step, newest.get(each.replica, 0))
    return newest
