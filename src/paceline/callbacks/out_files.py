"""What is in a run's folder while it lasts, for ``paceline watch`` and TensorBoard.

::

    while the run lasts     workers.json   progress.jsonl   [events of TensorBoard]
    once it is saved        summary.json, history.csv, …    [events of TensorBoard]
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.callbacks.json_lines import JsonLines
from paceline.callbacks.tensorboard import TensorBoard
from paceline.core.types import Seconds
from paceline.engine.base import Progress
from paceline.engine.worker_metrics import PROGRESS_NAME, remove_workers_file
from paceline.run import Run

# Least time between two lines of progress, and the part of the run's time that it grows to: 2000 lines in a day.
EVERY_S: Seconds = 1.0
EVERY_PART = 1 / 300


@final
class ProgressFile(JsonLines):
    """Writes ``progress.jsonl``; where the disk is full lines are missing, and the run goes on.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / PROGRESS_NAME)
        self._next_s: Seconds = 0.0
        self._remarks: tuple[str, ...] = ()

    def on_start(self, run: RunHandle) -> None:
        """Open the file, and say which process writes it; what was recorded before the run was resumed follows."""
        with contextlib.suppress(OSError):
            super().on_start(run)
        self.write("process", pid=os.getpid(), host=socket.gethostname())
        for record in run.history:
            self.on_record(record, run)

    def progress(self, progress: Progress) -> None:
        """Write how far training is, now and then, and as soon as there are other remarks about replicas."""
        if progress.time_s < self._next_s and progress.remarks == self._remarks:
            return
        self._remarks = progress.remarks
        self._next_s = progress.time_s + max(EVERY_S, progress.time_s * EVERY_PART)
        names = ("phase", "fraction", "time_s", "updates", "gradients", "threshold", "loss", "remarks")
        self.write("progress", **{name: getattr(progress, name) for name in names})

    def on_end(self, run: Run | None) -> None:
        """Write the last line, and close the file."""
        with contextlib.suppress(OSError):
            super().on_end(run)

    def write(self, event: str, **values: Any) -> None:
        """Write one line, if there is room for it."""
        with contextlib.suppress(OSError):
            super().write(event, **values)


@final
class OutFiles:
    """The files of one run.

    Args:
        folder: of the run, which does not exist yet; None: there are no files.
        tensorboard: whether TensorBoard's events are among them.
    """

    def __init__(self, folder: Path | None, tensorboard: bool) -> None:
        self._folder = folder
        self._file = None if folder is None else ProgressFile(folder)
        self.callbacks: list[Callback] = [] if self._file is None else [self._file]
        if folder is not None and tensorboard:
            self.callbacks.append(TensorBoard(folder))

    def progress(self, progress: Progress) -> None:
        """Take the newest progress."""
        if self._file is not None:
            self._file.progress(progress)

    def remove(self) -> Mapping[str, bytes]:
        """Remove the files, and the folder if there is nothing else in it; return those that are kept, by name."""
        kept = dict[str, bytes]()
        if self._folder is None:
            return kept
        for path in self._folder.glob("events.out.tfevents.*"):
            kept[path.name] = path.read_bytes()
            path.unlink()
        remove_workers_file(self._folder)
        return kept
