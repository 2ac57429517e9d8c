"""Curves in MLflow while a run lasts."""

import re
import time
from collections.abc import Mapping
from typing import Any, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.records import Record
from paceline.core.types import ReplicaId
from paceline.run import Run, require_package

# What names of metrics in MLflow may not have.
_OTHER = re.compile(r"[^\w\-. /]")


@final
class MLflow(Callback):
    """Logs records as metrics over updates, and figures of a loop as ``<name>/replica <r>`` over its steps.

    Program, strategy and engine are parameters of the run.

    Args:
        experiment: name of the experiment, which is made where it is missing.
        tracking_uri: of the server or store; None: as MLflow finds it (``MLFLOW_TRACKING_URI``).
        run_name: name of the run; None: MLflow makes one up.

    Raises:
        InputError: mlflow is not installed.
    """

    def __init__(
        self, experiment: str = "paceline", *, tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        require_package("mlflow", "MLflow()")
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name
        self._client: Any = None
        self.run_id: str | None = None
        """Of the run there, once it has begun."""

    def on_start(self, run: RunHandle) -> None:
        """Begin a run there."""
        from mlflow import MlflowClient  # it is an extra, and slow to import

        self._client = client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        self.run_id = client.create_run(experiment, run_name=self._name).info.run_id
        for name in ("program", "strategy", "engine"):
            client.log_param(self.run_id, name, getattr(run, name))

    def on_record(self, record: Record, run: RunHandle) -> None:
        """Log each figure of the record."""
        self._log({name: value for name, value in record.row().items() if value is not None}, record.updates)

    def on_log(self, replica: ReplicaId, step: int, values: Mapping[str, float], run: RunHandle) -> None:
        """Log each figure."""
        self._log({f"{name}/replica {replica}": value for name, value in values.items()}, step)

    def on_end(self, run: Run | None) -> None:
        """End the run there, as failed if an error has ended it."""
        if self.run_id is not None:
            stopped = None if run is None else run.summary.get("stopped")
            if stopped is not None:
                self._client.set_tag(self.run_id, "stopped", stopped)
            self._client.set_terminated(self.run_id, "FAILED" if run is None else "FINISHED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        for name, value in values.items():
            self._client.log_metric(self.run_id, _OTHER.sub("_", name), value, timestamp=now_ms, step=step)
