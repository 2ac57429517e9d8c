"""Which processes a run has: a file in its folder, there while the run lasts."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from paceline.core.types import ReplicaId

PARTIAL = ".workers.json.partial"
"""What it is called until it is whole."""


class Roster:
    """``workers.json`` in the run's folder, there while the run lasts.

    Args:
        folder: of the run; None: nothing is written.
        pids: of the workers, by replica.
        scorer: its process id.
    """

    def __init__(self, folder: Path | None, pids: dict[ReplicaId, int], scorer: int) -> None:
        self._folder = folder
        if folder is not None:
            rows: list[dict[str, Any]] = [
                {"role": "coordinator", "pid": os.getpid()},
                {"role": "scorer", "pid": scorer},
            ]
            rows += [{"role": "replica", "replica": r, "stage": 0, "shard": 0, "pid": p} for r, p in pids.items()]
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / PARTIAL
            beside.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
            beside.replace(folder / "workers.json")

    def close(self) -> None:
        """Take the file away, and the folder, which is written anew as a whole."""
        if self._folder is not None:
            remove_roster(self._folder)


def remove_roster(folder: Path) -> None:
    """Remove ``workers.json`` and a folder that holds nothing else; nothing happens where they are gone."""
    for name in (PARTIAL, "workers.json"):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
