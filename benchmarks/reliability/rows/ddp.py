"""What plain DistributedDataParallel on Gloo does under torchrun, in the rows where it can be asked."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from injector import TRAINEE, Begun, Trainee, inject, living, torchrun, trainee, until

from rows.contract import DDP, Observed, compared

SCRIPT = TRAINEE.with_name("ddp.py")
GIVEN: dict[str, Any] = {"script": SCRIPT, "launcher": torchrun(4), "steps": 300, "pause_s": 0.02}


def _started(run: Trainee, step: int = 10) -> dict[int, Begun]:
    """Wait until each rank has begun a step; return its newest."""
    if not until(lambda: len({each.replica for each in run.all_begun() if each.step >= step}) == 4, 90.0):
        raise RuntimeError(f"DDP did not start:\n{run.stderr()[-2000:]}")
    return {each.replica: each for each in run.all_begun()}


def _killed(trials: int, count: int, point: str = "") -> Observed:
    """SIGKILL so many ranks; once torchrun has to end, and once it may start all again."""
    ends, steps = list[float](), list[int]()
    for i in range(trials):
        with trainee(**GIVEN) as run:
            ranks = _started(run)
            for rank in random.Random(i).sample(sorted(ranks), count):
                hit = inject(signal.SIGKILL, ranks[rank].pid)
            run.ends(60.0)
            ends.append(time.monotonic() - hit)
            steps.append(max(each.step for each in run.all_begun()))
    with trainee(**GIVEN | {"launcher": torchrun(4, "--max-restarts", "3")}) as run:
        ranks = _started(run)
        hit = inject(signal.SIGKILL, ranks[1].pid)
        pids = {each.pid for each in ranks.values()}
        again = run.wait_for(lambda each: each.pid not in pids, 60.0)
    told = f"the run ends{point}, all steps lost; --max-restarts begins all ranks anew"
    figures = {"ends_median_s": median(ends), "steps_lost_median": median(steps)}
    if again is not None:
        told += f", at step {again.step}"
        figures["restarted_s"] = again.time_s - hit
    return Observed(trials, told, figures)


@compared("kill", DDP)
def kill(trials: int) -> Observed:
    return _killed(trials, 1)


@compared("protocol", DDP)
def at_any_point(trials: int) -> Observed:
    return _killed(trials, 1, " wherever in a step the kill comes")


@compared("pair", DDP)
def kill_two(trials: int) -> Observed:
    return _killed(trials, 2)


@compared("memory", DDP)
def out_of_memory(trials: int) -> Observed:
    return _killed(trials, 1, " by the kernel's SIGKILL (exit code -9, the memory is not named)")


@compared("coordinator", DDP)
def kill_the_agent(trials: int) -> Observed:
    """SIGKILL torchrun, which holds the store of the rendezvous."""
    left = list[int]()
    for _ in range(trials):
        with trainee(**GIVEN) as run:
            _started(run)
            inject(signal.SIGKILL, run.process.pid)
            run.process.wait()
            until(lambda run=run: not living(str(run.folder)), 10.0)
            left.append(len(living(str(run.folder))))
    return Observed(trials, "SIGKILL of torchrun: its ranks are not ended", {"ranks_after_10_s_median": median(left)})


@compared("stop", DDP, trials=2)
def stop(trials: int) -> Observed:
    """SIGSTOP for 30 s, with torch's own timeout of 30 minutes."""
    still = list[float]()
    for _ in range(trials):
        with trainee(**GIVEN) as run:
            ranks = _started(run)
            hit = inject(signal.SIGSTOP, ranks[1].pid)
            time.sleep(30.0)
            inject(signal.SIGCONT, ranks[1].pid)
            run.begun()
            again = run.wait_for(lambda each, pid=ranks[0].pid: each.pid == pid, 60.0)
            still.append((again.time_s if again else time.monotonic()) - hit)
    return Observed(
        trials, "all ranks stand still until it goes on; nothing is said", {"still_median_s": median(still)}
    )


def _rows_of(run: Trainee) -> list[dict[str, Any]]:
    run.ends(90.0)
    return run.all_printed()


def _faulty(trials: int, point: str, told: Callable[[list[list[dict[str, Any]]]], str]) -> Observed:
    seen = list[list[dict[str, Any]]]()
    for i in range(trials):
        hold = {"point": point, "replica": i % 4, "step": 10}
        with trainee(**GIVEN | {"steps": 120, "pause_s": 0.0}, hold=hold) as run:
            seen.append(_rows_of(run))
    return Observed(trials, told(seen))


@compared("nan", DDP)
def not_finite(trials: int) -> Observed:
    def told(seen: list[list[dict[str, Any]]]) -> str:
        bad = sum(bool(ranks) and not any(rank["finite"] for rank in ranks) for ranks in seen)
        return f"{bad} of {len(seen)} runs end with exit code 0 and no finite parameter on any rank"

    return _faulty(trials, "nan", told)


@compared("flip", DDP)
def flipped_weight(trials: int) -> Observed:
    def told(seen: list[list[dict[str, Any]]]) -> str:
        other = sum(len({rank["parameters"] for rank in ranks}) > 1 for ranks in seen)
        return f"{other} of {len(seen)} runs end with exit code 0 and other parameters on one rank"

    return _faulty(trials, "flip", told)


@compared("main", DDP, trials=20)
def killed_while_saving(trials: int) -> Observed:
    """SIGKILL of all ranks at a random time of ``torch.save`` over the same name, as most scripts do."""
    draw, torn = random.Random(1), 0
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        path = Path(name, "last.pt")
        for _ in range(trials):
            given = GIVEN | {"launcher": torchrun(1), "pause_s": 0.0, "steps": 100_000, "workload": "W1"}
            with trainee(**given, checkpoint=str(path), checkpoint_every=1) as run:
                run.wait_for(lambda each: each.step > 5, 60.0)
                time.sleep(draw.uniform(0.0, 0.2))
                for pid in living(str(run.folder)):
                    inject(signal.SIGKILL, pid)
            try:
                torch.load(path, weights_only=True)
            except Exception:
                torn += 1
                path.unlink()
    return Observed(trials, f"{torn} of {trials} times the only checkpoint could not be read afterwards")


@compared("mutate", DDP, trials=200)
def mutated(trials: int) -> Observed:
    """One bit of a ``torch.save`` file flipped, read with ``weights_only=True``; and truncated files."""
    draw, silent, truncated = random.Random(2), 0, 0
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        path = Path(name, "last.pt")
        state = {"weight": torch.randn(200, 1000), "moment": torch.randn(200, 1000)}
        torch.save(state, path)
        sound = path.read_bytes()
        for _ in range(trials):
            content = bytearray(sound)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            silent += _loads(path)
            path.write_bytes(sound[: draw.randrange(len(sound))])
            truncated += _loads(path)
    return Observed(trials, f"flipped bit: {silent} of {trials} load silently; truncated: {truncated} of {trials} do")


def _loads(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@compared("disk", DDP, trials=3)
def full_disk(trials: int) -> Observed:
    """``torch.save`` on a full disk."""
    ended, torn = 0, 0
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", name], check=True)
            try:
                path = Path(name, "last.pt")
                given = GIVEN | {"launcher": torchrun(1)}
                with trainee(**given, checkpoint=str(path), checkpoint_every=10) as run:
                    run.wait_for(lambda each: each.step > 25, 60.0)
                    Path(name, "filler").write_bytes(bytes(os.statvfs(name).f_bavail * os.statvfs(name).f_frsize))
                    path.unlink()
                    Path(name, "more").write_bytes(bytes(1 << 21))
                    run.ends(60.0)
                    ended += run.process.returncode != 0
                torn += not _loads(path)
            finally:
                subprocess.run(["umount", "-l", name], check=False)
    return Observed(
        trials, f"the exception of torch.save ends {ended} of {trials} runs; {torn} times no checkpoint is left"
    )


@compared("samples", DDP, trials=2)
def samples(trials: int) -> Observed:
    """Kills over an epoch under --max-restarts, resuming from the newest of checkpoints every 10 steps."""
    wrong = list[float]()
    for i in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            saving = {"checkpoint": f"{name}/last.pt", "checkpoint_every": 10}
            given = GIVEN | {"launcher": torchrun(4, "--max-restarts", "9"), "steps": 32}
            with trainee(**given, **saving) as run:
                ranks = _started(run, 12 + i)
                inject(signal.SIGKILL, ranks[2].pid)
                run.ends(90.0)
                lines = [line.split() for line in (run.folder / "indices").read_text().splitlines()]
        last = {(words[0], words[2], i): words[3:] for i, words in enumerate(lines)}
        used = Counter(index for own in last.values() for index in own)
        wrong.append(sum(used[str(i)] != 1 for i in range(4096)))
    return Observed(trials, "after one kill in an epoch", {"samples_not_once_median": median(wrong), "of": 4096})


@compared("price", DDP, trials=3)
def synchronous_save(trials: int) -> Observed:
    """SIGTERM to torchrun: what is saved, and the exit code."""
    codes = Counter[int | None]()
    for _ in range(trials):
        with trainee(**GIVEN) as run:
            _started(run)
            inject(signal.SIGTERM, run.process.pid)
            run.ends(60.0)
            codes[run.process.returncode] += 1
    told = ", ".join(f"{count} × {code}" for code, count in codes.items())
    return Observed(trials, f"SIGTERM: exit code {told}; nothing is saved but what the script has saved before")


@compared("straggler", DDP, trials=2)
def straggler(trials: int) -> Observed:
    """One rank has a tenth of a core."""
    from rows.pace import slow_group

    shares = list[float]()
    for _ in range(trials):
        with slow_group(0.1) as group, trainee(**GIVEN | {"pause_s": 0.0, "steps": 100_000}) as run:
            ranks = _started(run, 20)
            time.sleep(2.0)
            at = inject("a tenth of a core for", ranks[2].pid)
            (group / "cgroup.procs").write_text(str(ranks[2].pid))
            time.sleep(4.0)
            times = [each.time_s for each in run.all_begun() if each.replica == 0]
            shares.append(sum(t > at for t in times) / 4.0 / (sum(at - 2.0 < t <= at for t in times) / 2.0))
            for pid in living(str(run.folder)):
                inject(signal.SIGKILL, pid)
    return Observed(trials, "all wait for it; nothing is said", {"goodput_median": median(shares)})


@compared("chaos", DDP, trials=60)
def chaos(seconds: int) -> Observed:
    """A rank killed every 15 s for so many seconds, under --max-restarts, saving every 20 steps."""
    draw = random.Random(3)
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        saving = {"checkpoint": f"{name}/last.pt", "checkpoint_every": 20}
        given = GIVEN | {"launcher": torchrun(4, "--max-restarts", "999"), "steps": 1_000_000}
        with trainee(**given, **saving) as run:
            _started(run, 20)
            began = time.monotonic()
            kills, free = 0, None
            while time.monotonic() < began + seconds and run.process.poll() is None:
                time.sleep(15.0)
                newest = {each.replica: each for each in run.all_begun()}
                if free is None:
                    free = newest[0].step / (newest[0].time_s - run.all_begun()[0].time_s)
                with_pid = draw.choice(sorted(newest.values()))
                try:
                    inject(signal.SIGKILL, with_pid.pid)
                    kills += 1
                except ProcessLookupError:
                    continue
            reached = max(each.step for each in run.all_begun())
    rate = reached / (time.monotonic() - began)
    goodput = rate / free if free else 0.0
    return Observed(1, f"{kills} kills of ranks in {seconds} s under --max-restarts", {"goodput": goodput})
