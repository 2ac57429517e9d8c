"""What happens in a run, as lines of JSON."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import ReplicaId
from paceline.metrics.summary import json_safe
from paceline.run import Run


class JsonLines(Callback):
    """Appends one JSON object a line to a file, each of which a reader finds at once.

    ::

        {"event": "start", "program": "digits", "strategy": "replicas=4", "engine": "local"}
        {"event": "record", "time_s": 0.5, "updates": 20, "test_loss": 0.31, …}
        {"event": "log", "replica": 1, "step": 12, "time_s": 0.6, "values": {"grad_norm": 1.5}}
        {"event": "departure", "replica": 1, "reason": "killed by SIGKILL", "time_s": 0.7}
        {"event": "checkpoint", "path": "ckpt/step-100"}
        {"event": "end", "failed": false, "stopped": null, "interrupted": false}

    Each also has ``at``, seconds since 1970. What JSON lacks (NaN, infinities) is null.

    Args:
        path: of the file; what is in it stays. Its folder is made where it is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_start(self, run: RunHandle) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self.write("start", program=run.program, strategy=run.strategy, engine=run.engine)

    def on_record(self, record: Record, run: RunHandle) -> None:
        """Write the record as it stands in ``history.csv``."""
        self.write("record", **record.row())

    def on_departure(self, exit: ReplicaExit, run: RunHandle) -> None:
        """Write which replica, and why."""
        self.write("departure", **asdict(exit))

    def on_checkpoint(self, path: Path, run: RunHandle) -> None:
        """Write its path."""
        self.write("checkpoint", path=str(path))

    def on_log(self, replica: ReplicaId, step: int, values: Mapping[str, float], run: RunHandle) -> None:
        """Write the figures."""
        self.write("log", replica=replica, step=step, time_s=run.time_s, values=dict(values))

    def on_end(self, run: Run | None) -> None:
        """Write how it has ended, and close the file."""
        summary = {} if run is None else run.summary
        ended = {"stopped": summary.get("stopped"), "interrupted": bool(summary.get("interrupted"))}
        file = self._file
        try:
            self.write("end", failed=run is None, **ended)
        finally:
            self._file = None
            if file is not None:
                file.close()

    def write(self, event: str, **values: Any) -> None:
        """Write one line; raises OSError where the file can't be written."""
        if self._file is not None:
            row = {"event": event, "at": time.time(), **values}
            self._file.write(json.dumps(json_safe(row), ensure_ascii=False) + "\n")
            self._file.flush()
