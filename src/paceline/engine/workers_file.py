"""Which processes a run has: a file in its folder, there while the run lasts."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from paceline.core.mesh import Coordinate

PARTIAL = ".workers.json.partial"
"""What it is called until it is whole."""

Where: TypeAlias = Mapping[str, int | str]
"""Of a process: its ``pid``, and the ``node`` that it is on where there are several."""


class WorkersFile:
    """``workers.json`` in the run's folder, there while the run lasts.

    Args:
        folder: of the run; None: nothing is written.
        others: the processes beside the replicas', by their role.
        workers: the replicas' own.
    """

    def __init__(self, folder: Path | None, others: Mapping[str, Where], workers: Mapping[Coordinate, Where]) -> None:
        self._folder = folder
        if folder is None:
            return
        rows: list[dict[str, Any]] = [{"role": role, **where} for role, where in others.items()]
        rows += [{"role": "replica", **place._asdict(), **where} for place, where in workers.items()]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PARTIAL).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        (folder / PARTIAL).replace(folder / "workers.json")

    @property
    def files(self) -> list[Path]:
        """What a killed process would leave."""
        return [self._folder / name for name in (PARTIAL, "workers.json")] if self._folder is not None else []

    def close(self) -> None:
        """Take the file away, and the folder, which is written anew as a whole."""
        if self._folder is not None:
            remove_workers_file(self._folder)


def remove_workers_file(folder: Path) -> None:
    """Remove ``workers.json`` and a folder that holds nothing else; nothing happens where they are gone."""
    for name in (PARTIAL, "workers.json"):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
