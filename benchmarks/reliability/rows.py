"""Rows of the scorecard: each disturbs real processes so many times, and says what came of it.

A row's numbers to pass are those of its docstring. A trial fails where any of them is missed; nothing is tried again.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from injector import TRAINEE, Trainee, trainee

from paceline.checkpoint.reader import newest
from paceline.core.errors import InputError

STEPS = 400


@dataclass
class Outcome:
    """What came of a row's trials.

    Args:
        row: its number in the scorecard.
        title: what is done.
        passes: the numbers to pass, in words.
    """

    row: str
    title: str
    passes: str
    trials: int = 0
    failures: list[str] = field(default_factory=list[str])
    figures: dict[str, float] = field(default_factory=dict[str, float])

    def trial(self, failure: str | None) -> None:
        """Count a trial; None: it passed."""
        self.trials += 1
        if failure is not None:
            self.failures.append(failure)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that so large a share of them does not exceed."""
    return sorted(values)[max(0, -(-len(values) * round(share * 100) // 100) - 1)]


def undisturbed(**settings: Any) -> dict[str, Any]:
    """Return the result of a run that nothing happens to."""
    with trainee(**settings) as run:
        result = run.result()
    if result is None:
        raise RuntimeError(f"a run that nothing happened to failed: {settings}")
    return result


def kill_a_worker(trials: int) -> Outcome:
    """R1: SIGKILL one of four workers at a random time, synchronous, on_death=replace."""
    return _workers(
        Outcome("R1", "SIGKILL one of 4 workers at a random time", "next update ≤ 3 s, all bits as without a kill"),
        trials, signal.SIGKILL, 3.0, "replicas=4",
    )  # fmt: skip


def kill_a_gang(trials: int) -> Outcome:
    """R1 over replicas of two workers, in stages."""
    return _workers(
        Outcome("R1", "SIGKILL one worker of 2 replicas × 2 stages", "next update ≤ 8 s, all bits as without a kill"),
        trials, signal.SIGKILL, 8.0, "replicas=2 stages=2",
    )  # fmt: skip


def stop_a_worker(trials: int) -> Outcome:
    """R5: SIGSTOP one of four workers, for good; suspect_after_s=2."""
    return _workers(
        Outcome("R5", "SIGSTOP one of 4 workers", "replaced ≤ 5 s with a bound of 2 s, all bits as without a stop"),
        trials, signal.SIGSTOP, 5.0, "replicas=4", suspect_after_s=2.0,
    )  # fmt: skip


def _workers(
    outcome: Outcome, trials: int, signal_number: int, bound_s: float, strategy: str, **settings: Any
) -> Outcome:
    given = {"strategy": strategy, "steps": STEPS, "on_death": "replace"} | settings
    whole, draw, times = undisturbed(**given), random.Random(7), list[float]()
    while outcome.trials < trials:
        with trainee(**given) as run:
            run.wait_for_step()
            hits = 0
            while outcome.trials + hits < trials:
                time.sleep(draw.uniform(0.02, 0.3))
                rows = run.workers()
                if not rows or run.process.poll() is not None:
                    break
                row = draw.choice(rows)
                run.steps()
                hit = time.monotonic()
                try:
                    os.kill(row["pid"], signal_number)
                except ProcessLookupError:
                    break
                # A step that had begun before does not count.
                back = run.wait_for_step(row["replica"], after_s=hit + 0.05)
                if back is None:
                    break
                hits += 1
                times.append(back - hit)
            result = run.result()
        failure = None
        if result is None:
            failure = "the run did not end well"
        elif result["digest"] != whole["digest"]:
            failure = "it ended with other bits"
        for hit_number in range(max(1, hits)):
            late = hits and times[-hits + hit_number] > bound_s
            outcome.trial(failure or (f"back after {times[-hits + hit_number]:.1f} s" if late else None))
    outcome.figures |= {
        "back_median_s": median(times),
        "back_p95_s": percentile(times, 0.95),
        "back_longest_s": max(times),
    }
    return outcome


def kill_main(trials: int) -> Outcome:
    """R10: SIGKILL the main process at a random time of saving, again and again, until the run is through."""
    outcome = Outcome(
        "R10",
        "SIGKILL the main process while it trains and saves every step, resume",
        "always a sound checkpoint, end with all bits as without a kill",
    )
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 60, "pause_s": 0.02}
    whole, draw, lost = undisturbed(**given), random.Random(11), list[float]()
    while outcome.trials < trials:
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            folder, result, reached = Path(name) / "ckpt", None, -1
            saving = {"checkpoint": str(folder), "checkpoint_every": "1 steps", "resume": True}
            while result is None:
                with trainee(**given, **saving) as run:
                    if run.wait_for_step() is None or outcome.trials >= trials:
                        result = run.result()
                        break
                    time.sleep(draw.uniform(0.0, 0.6))
                    if run.process.poll() is not None:
                        result = run.result()
                        break
                    before = max((int(p.name[5:]) for p in folder.glob("step-*")), default=-1)
                    run.process.kill()
                    run.process.wait()
                found, damaged = newest(folder)
                version = -1 if found is None else int(found.folder.name[5:])
                sound = version >= max(before, reached) and not damaged
                outcome.trial(None if sound else f"newest is {version} after {before}, damaged: {damaged}")
                lost.append(version)
                reached = max(reached, version)
            if result is None or result["digest"] != whole["digest"]:
                outcome.trial("the run ended with other bits, or not well")
    outcome.figures["kills"] = len(lost)
    return outcome


def mutate(trials: int) -> Outcome:
    """R11: flip a bit, zero a page, truncate, swap, or remove a file of the newest checkpoint."""
    outcome = Outcome(
        "R11", "mutations of the newest checkpoint's files", "none loads; the file is named; the one before is taken"
    )
    draw = random.Random(13)
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        folder = Path(name) / "ckpt"
        saving = {"checkpoint": str(folder), "checkpoint_every": "20 steps", "keep": 3}
        undisturbed(strategy="replicas=1", steps=60, width=32, **saving)
        sound, older = sorted(folder.iterdir(), key=lambda path: -int(path.name[5:]))[:2]
        files = sorted(path for path in sound.iterdir() if path.is_file())
        kept = {path: path.read_bytes() for path in files}
        for _ in range(trials):
            path = draw.choice(files)
            how = draw.choice(MUTATIONS)
            how(path, older / path.name, draw)
            if path.exists() and path.read_bytes() == kept[path]:
                continue  # the file of the older one was the same
            try:
                found, damaged = newest(folder)
                passed = found is not None and found.folder == older and path.name in damaged[0]
                outcome.trial(None if passed else f"{how.__name__} of {path.name}: {damaged}")
            except (InputError, OSError) as error:
                outcome.trial(f"{how.__name__} of {path.name}: {error}")
            finally:
                path.write_bytes(kept[path])
    return outcome


def flipped_bit(path: Path, _: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zeroed_page(path: Path, _: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content)) // 4096 * 4096
    end = min(len(content), at + 4096)
    content[at:end] = bytes(end - at)
    path.write_bytes(content)


def truncated(path: Path, _: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def of_an_older_one(path: Path, older: Path, _: random.Random) -> None:
    shutil.copyfile(older, path)


def missing(path: Path, _: Path, __: random.Random) -> None:
    path.unlink()


MUTATIONS: list[Callable[[Path, Path, random.Random], None]] = [
    flipped_bit,
    flipped_bit,
    flipped_bit,
    zeroed_page,
    truncated,
    of_an_older_one,
    missing,
]


def full_disk(trials: int) -> Outcome:
    """R12: a disk that is too small for a checkpoint and then has room again (tmpfs of its own; needs root)."""
    outcome = Outcome(
        "R12", "checkpoints on a disk that is full, then not", "training goes on; saved again once there is room"
    )
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", name], check=False)
            if mounted.returncode != 0:
                return outcome
            try:
                filler = Path(name) / "filler"
                filler.write_bytes(bytes(3 << 20))
                saving = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "10 steps", "keep": 1, "width": 64}
                with trainee(strategy="replicas=2", steps=150, pause_s=0.02, **saving) as run:
                    run.wait_for_step()
                    time.sleep(1.0)  # some saves fail meanwhile
                    filler.unlink()
                    result = run.result()
                found, damaged = newest(Path(name) / "ckpt")
                notes = result["notes"] if result is not None else {}
                left = [path.name for path in (Path(name) / "ckpt").iterdir() if not path.name.startswith("step-")]
                passed = found is not None and not damaged and notes.get("checkpoint_failures", 0) and not left
                outcome.trial(None if passed else f"{notes}, {damaged}, left over: {left}")
            finally:
                subprocess.run(["umount", name], check=False)
    return outcome


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


def price(pairs: int) -> Outcome:
    """R20: steps with checkpoints every second and on_death=replace beside steps without; alternating."""
    outcome = Outcome(
        "R20", "all of it on, nothing failing, beside all of it off; alternating", "median step at most 3 % longer"
    )
    ratios: list[float] = []
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 1500, "pause_s": 0.0}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            on = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "1 s", "on_death": "replace"}
            ratios.append(undisturbed(**given, **on)["seconds"] / undisturbed(**given)["seconds"])
    outcome.trial(None if median(ratios) <= 1.03 else f"median ratio {median(ratios):.3f}")
    outcome.figures |= {"median_ratio": median(ratios), "least": min(ratios), "most": max(ratios), "pairs": pairs}
    return outcome


ROWS: dict[str, tuple[Callable[[int], Outcome], int]] = {
    "kill": (kill_a_worker, 100),
    "gang": (kill_a_gang, 40),
    "stop": (stop_a_worker, 30),
    "main": (kill_main, 100),
    "mutate": (mutate, 1000),
    "disk": (full_disk, 10),
    "chaos": (chaos, 300),
    "price": (price, 9),
}
"""Name on the command line -> the row, and its trials (of chaos seconds, of price pairs)."""
