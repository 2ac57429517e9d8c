"""R13: memory limits, of one worker and of the process that writes a checkpoint (cgroup version 1; needs root)."""

import contextlib
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from injector import inject, living, trainee, undisturbed, until

from rows.contract import Outcome, row, times
from rows.disk import tmpfs
from rows.workers import ending

GROUPS = Path("/sys/fs/cgroup/memory")
STATE_BYTES = 3 * 4 * 25_000_000
"""Of W4: parameters and two moments."""


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Context manager: a cgroup whose processes are killed by the kernel where they want more memory than that."""
    group = GROUPS / f"paceline-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().split(), 20.0)
        group.rmdir()


@row("memory", trials=30)
def worker_out_of_memory(trials: int) -> Outcome:
    """R13: a worker that allocates more than the limit of its cgroup."""
    outcome = Outcome(
        "R13",
        "1 of 4 workers allocates 256 MB in a cgroup of 64 MB",
        "the kernel kills it; back ≤ 8 s; SIGKILL named; all bits as without",
    )
    given: dict[str, Any] = {"strategy": "replicas=4", "steps": 40, "on_death": "replace"}
    whole, draw, backs = undisturbed(**given), random.Random(13), list[float]()
    for _ in range(trials):
        replica, step = draw.randrange(4), draw.randrange(3, 30)
        with (
            memory_group(64 << 20) as group,
            trainee(**given, hold={"point": "allocate", "replica": replica, "step": step}) as run,
        ):
            held = run.folder / "held"
            until(
                lambda run=run, held=held: (held.exists() and held.read_text() != "") or run.process.poll() is not None
            )
            pid = int(held.read_text())
            (group / "cgroup.procs").write_text(str(pid))
            at = inject("limit of 64 MB for", pid)
            (run.folder / "go").touch()
            back = run.wait_for(lambda each, r=replica, pid=pid: each.replica == r and each.pid != pid)
            failures = int((group / "memory.failcnt").read_text())
            result = run.result()
        failure = ending(result, whole, run)
        if back is not None:
            backs.append(back.time_s - at)
            failure = failure or (f"back after {backs[-1]:.1f} s" if backs[-1] > 8.0 else None)
        failure = failure or (None if failures else "the limit was not hit")
        left = [] if result is None else result["left"]
        named = any(text.startswith(f"replica {replica}: killed by SIGKILL") for text in left)
        outcome.trial(failure, named=named, said=str(left))
    outcome.figures |= times(backs, "back")
    return outcome


@row("memory-save", trials=30)
def writer_out_of_memory(trials: int) -> Outcome:
    """R13: the process that writes checkpoints is killed by the kernel for want of memory."""
    outcome = Outcome(
        "R13",
        "the writer of checkpoints hits the limit of its cgroup during a save",
        "training goes on; the failure is said; saved again; the end has all bits",
    )
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 120, "checkpoint_every": "10 steps", "pause_s": 0.02}
    whole, draw = undisturbed(**given), random.Random(14)
    for _ in range(trials):
        # A tmpfs: its pages are charged to who writes them, and can't be written elsewhere to make room.
        with memory_group(1 << 20) as group, tmpfs() as disk, trainee(**given, checkpoint=f"{disk}/ckpt") as run:
            folder = disk / "ckpt"
            until(lambda folder=folder: any(folder.glob("step-*")), 60.0)
            time.sleep(draw.uniform(0.0, 0.3))
            for pid in living(str(run.folder)):
                if b"writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    inject("limit of 1 MB for", pid)
                    (group / "cgroup.procs").write_text(str(pid))
            result = run.result()
            said = run.stderr()
        failure = ending(result, whole, run)
        notes = {} if result is None else result["notes"]
        if failure is None and not (notes["checkpoint_failures"] and notes["checkpoint_updates"] == 120):
            failure = f"{notes}"
        outcome.trial(failure, named="the process that wrote it ended (killed by SIGKILL)" in said, said=said)
    return outcome


@row("memory-peak", trials=3)
def memory_of_saving(trials: int) -> Outcome:
    """R13: what saving W4 takes in memory, beside the same run without."""
    outcome = Outcome(
        "R13",
        "asynchronous saves of W4 (300 MB) beside none",
        "peak at most 1.1 times the state larger, main and writer",
    )
    given: dict[str, Any] = {"workload": "W4", "strategy": "replicas=1", "steps": 12, "samples": 256, "pause_s": 0.2}
    more: list[float] = []
    for _ in range(trials):
        without, saving = _peak(**given, checkpoint=None), _peak(**given, checkpoint_every="4 steps")
        more.append((saving - without) / STATE_BYTES)
        outcome.trial(None if more[-1] <= 1.1 else f"{more[-1]:.2f} times the state more")
    outcome.figures |= {"more_of_the_state_most": max(more)}
    return outcome


def _peak(**settings: Any) -> int:
    """Return the most memory that all processes of a run had together; the trainee computes no digests meanwhile."""
    peak = 0
    with trainee(**settings, digests=False) as run:
        while run.process.poll() is None:
            peak = max(peak, sum(map(_own_bytes, living(str(run.folder)))))
            time.sleep(0.05)
        if run.printed() is None:
            raise RuntimeError(f"a run that nothing happened to failed: {settings}\n{run.stderr()[-2000:]}")
    return peak


def _own_bytes(pid: int) -> int:
    """Return a process's memory without files, shared pages divided by the number of their users."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kinds = dict(line.split(":") for line in lines[1:])
        return sum(int(kinds[kind].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem")) * 1024
    return 0
