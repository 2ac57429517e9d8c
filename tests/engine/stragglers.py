"""Loops of replicas of which one is late until the others have gone on without it; workers import this module."""

import threading
from pathlib import Path
from typing import Any

from tests.engine.local import moments

LONG_S = 300.0
"""Within it a busy host has made a few steps."""


def wait_for(path: Path) -> None:
    never = threading.Event()
    for _ in range(int(LONG_S / 0.01)):
        if path.exists():
            return
        never.wait(0.01)
    raise AssertionError(f"{path} is not there")


def late(worker: Any, *, late: int, until: int, folder: Path, dies: bool = False) -> None:
    """Replica ``late`` begins, or dies, once replica 0 is at this step."""
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 0 and made == until:
            (folder / "went-on").touch()
        if worker.replica == late and made == 0:
            wait_for(folder / "went-on")
            if dies:
                moments.die()
        worker.step(batch)
