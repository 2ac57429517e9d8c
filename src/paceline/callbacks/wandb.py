"""Curves in Weights & Biases while a run lasts."""

from collections.abc import Mapping
from typing import Any, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import ReplicaId
from paceline.metrics.summary import json_safe
from paceline.run import Run, require_package


@final
class WandB(Callback):
    """Logs records over ``updates``, and figures of a loop as ``<name>/replica <r>`` over ``step``.

    The run's summary gets that of the run, its configuration program, strategy and engine.

    Args:
        settings: keyword arguments of ``wandb.init``: ``project=``, ``name=``, ``mode="offline"``, …

    Raises:
        InputError: wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        require_package("wandb", "WandB()")
        self._settings = settings
        self._run: Any = None
        self._logged = set[str]()
        """Names that are figures of a loop."""

    def on_start(self, run: RunHandle) -> None:
        """Begin a run there."""
        import wandb  # it is an extra, and slow to import

        config = {"program": run.program, "strategy": run.strategy, "engine": run.engine}
        settings = {**self._settings, "config": config | dict(self._settings.get("config") or {})}
        self._run = wandb.init(**settings)
        self._run.define_metric("*", step_metric="updates")
        self._logged.clear()

    def on_record(self, record: Record, run: RunHandle) -> None:
        """Log each figure of the record."""
        self._run.log({name: value for name, value in record.row().items() if value is not None})

    def on_log(self, replica: ReplicaId, step: int, values: Mapping[str, float], run: RunHandle) -> None:
        """Log each figure."""
        named = {f"{name}/replica {replica}": value for name, value in values.items()}
        for name in named.keys() - self._logged:
            self._logged.add(name)
            self._run.define_metric(name, step_metric="step")
        self._run.log(named | {"step": step})

    def on_departure(self, exit: ReplicaExit, run: RunHandle) -> None:
        """Note in the summary which replica, and why."""
        self._run.summary[f"departure of replica {exit.replica}"] = f"{exit.reason}, at {exit.time_s:.1f} s"

    def on_end(self, run: Run | None) -> None:
        """Upload the summary and end the run there, as failed if an error has ended it."""
        if self._run is not None:
            if run is not None:
                self._run.summary.update(json_safe(run.summary))
            self._run.finish(exit_code=int(run is None))
            self._run = None
