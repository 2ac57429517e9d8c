"""R13, saving: the memory of the process that writes checkpoints, and what its death costs."""

import contextlib
import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from injector import Trainee, living, trainee, undisturbed

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import newest
from paceline.checkpoint.writer import CheckpointWriter
from rows.contract import Outcome, row

STATE_BYTES, TENSORS = 100 << 20, 10


def writers(run: Trainee) -> list[int]:
    """Return the processes of a run that write checkpoints."""
    found: list[int] = []
    for pid in living(str(run.folder)):
        with contextlib.suppress(OSError):
            if b"paceline.checkpoint.writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@row("writer", trials=30)
def writer_dies(trials: int) -> Outcome:
    """R13: kill the writer while it saves, as for want of memory, or leave it no memory to map."""
    outcome = Outcome(
        "R13",
        "the process that writes checkpoints is killed while it saves, or finds no memory",
        "training goes on with the same bits, the next try succeeds, failures are counted; memory ≤ 1.1 × the state",
    )
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 150, "pause_s": 0.01}
    whole, draw = undisturbed(**given), random.Random(31)
    for i in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            saving = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "1 steps", "keep": 2}
            with trainee(**given, **saving) as run:
                run.wait_for_step()
                hits = 0
                for _ in range(3):
                    time.sleep(draw.uniform(0.05, 0.3))
                    hits += sum(_hit(pid, starve=i % 3 == 2) for pid in writers(run))
                result = run.result()
                said = run.stderr()
            found, damaged = newest(Path(name) / "ckpt")
        failed = result["notes"].get("checkpoint_failures", 0) if result is not None else 0
        if result is None:
            failure = f"the run ended badly: {said[-300:]}"
        elif result["digest"] != whole["digest"]:
            failure = "it ended with other bits"
        elif found is None or damaged:
            failure = f"the newest checkpoint is not sound: {damaged}"
        else:
            failure = None
        outcome.trial(failure, named=not failed or "checkpoint" in said, said=said)
        outcome.figures["hits"] = outcome.figures.get("hits", 0) + hits
        outcome.figures["failed_saves"] = outcome.figures.get("failed_saves", 0) + failed
    ratio = memory_of_a_save() / STATE_BYTES
    outcome.trial(None if ratio <= 1.1 else f"its memory is {ratio:.2f} × the state")
    outcome.figures["memory_ratio"] = ratio
    return outcome


def _hit(pid: int, *, starve: bool) -> bool:
    with contextlib.suppress(ProcessLookupError):
        if starve:  # what it has stays, and nothing new can be mapped
            resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        else:
            os.kill(pid, signal.SIGKILL)
        return True
    return False


def memory_of_a_save() -> float:
    """Return the most memory that a writer had while it saved a large state, and the copy of the state, in bytes.

    The copy is in memory that both processes share, and counts once.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        writer = CheckpointWriter(Path(name) / "ckpt", run="ab", keep=1, timeout_s=60.0)
        try:
            values = torch.ones(STATE_BYTES // 4 // TENSORS)
            chunks = [TensorChunk.whole(f"w{i}", values) for i in range(TENSORS)]
            writer.begin(0, [TensorChunk.whole("w", torch.ones(1))], None)
            writer.wait(60.0)
            before = _peak_bytes(writer)
            writer.begin(1, chunks, None)
            result = writer.wait(60.0)
            if result is None or result.error is not None:
                raise RuntimeError(f"a save that nothing happened to failed: {result}")
            return STATE_BYTES + _peak_bytes(writer) - before
        finally:
            writer.close()


def _peak_bytes(writer: CheckpointWriter) -> int:
    return int(Path(f"/proc/{writer._process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
