"""Curves in TensorBoard while a run lasts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.records import Record
from paceline.core.types import ReplicaId
from paceline.run import Run, require_package, write_scalars


@final
class TensorBoard(Callback):
    """Writes events that ``tensorboard --logdir FOLDER`` shows as they come.

    Fields of records are scalars over updates; figures of a loop are ``<name>/replica <r>`` over its steps. The time of
    an event is training time, so that the relative time axis compares runs.

    Args:
        folder: of the events; one for each run.

    Raises:
        InputError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        require_package("tensorboard", "TensorBoard()")
        self.folder = Path(folder)
        self._events: Any = None

    def on_start(self, run: RunHandle) -> None:
        """Open a file of events."""
        from torch.utils.tensorboard import SummaryWriter  # it is an extra, and slow to import

        self._events = SummaryWriter(str(self.folder))

    def on_record(self, record: Record, run: RunHandle) -> None:
        """Write each figure of the record."""
        write_scalars(self._events, record)
        self._events.flush()

    def on_log(self, replica: ReplicaId, step: int, values: Mapping[str, float], run: RunHandle) -> None:
        """Write each figure; they are there for readers at the next record, or after two minutes."""
        for name, value in values.items():
            self._events.add_scalar(f"{name}/replica {replica}", value, step, walltime=run.time_s)

    def on_end(self, run: Run | None) -> None:
        """Close the file."""
        if self._events is not None:
            self._events.close()
