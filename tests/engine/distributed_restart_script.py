"""Trains under torchrun --max-restarts; at the first start rank 1 is killed once a checkpoint is there."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paceline import launch
from tests.engine import programs

backend, folder = sys.argv[1], Path(sys.argv[2])
rank, starts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
STEPS, KILLED_AT = 12, 7


def loop(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if (made, rank, starts) == (KILLED_AT, 1, 0) and "whole" not in sys.argv:
            deadline = time.monotonic() + 60
            while not list(folder.glob("step-*")) and time.monotonic() < deadline:
                os.sched_yield()
            signal.raise_signal(signal.SIGKILL)
        worker.step(batch)


settings = {"checkpoint": folder, "checkpoint_every": "2 steps", "resume": True, "progress": False}
run = launch(loop, programs.program(), "replicas=2", engine=f"distributed:{backend}", steps=STEPS, **settings)
if rank == 0:
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in run.state.values())).hexdigest()
    print(f"start {starts}: {run.summary['updates']} updates, {digest}; {run.summary['notes'].get('resumed')}")
