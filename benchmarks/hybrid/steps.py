"""Runs of the local engine by turns: time of a step, bytes sent, memory of a worker; what virtual time predicts."""

import os
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from kit.machine import machine
from kit.sheet import Sheet
from meshes import Mesh, Size, program
from rich.progress import Progress

import paceline
from paceline.engine.local.engine import LocalEngine

CLOSE = 1e-2
"""How far a parameter may be from that of one process after a round, of its largest element: all add up the same
float32 products, in another order, and the biases of keys, whose gradient is 0, are nothing but that."""

ALONE = Mesh(1, 1, 1)

PREDICTED = 15
"""Steps of virtual time, whose mean is the prediction: each is put together of other measured pieces."""


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    rounds: int
    steps: int
    """Of a run; where workers share cores as many fewer."""

    def of(self, mesh: Mesh) -> int:
        """Steps of one run of a mesh; the first ones of a run are slower, so that there are some at least."""
        return max(min(self.steps, 10), self.steps * cores() // max(mesh.workers, cores()))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


class Runs:
    """Of all meshes of so many workers.

    Args:
        engine: with processes at hand.
        size: of the model.
        pace: of the measurement.
        predicts: whether virtual time is asked as well, where each worker has a core.
    """

    def __init__(self, engine: LocalEngine, size: Size, pace: Pace, *, predicts: bool) -> None:
        self._engine, self._size, self._pace, self._predicts = engine, size, pace, predicts
        self._program = program(size)

    def measure(self, some: Sequence[Mesh], sheet: Sheet, bar: Progress) -> None:
        """A row for each; in each round, one process and then all of them."""
        alone: list[float] = []
        found: dict[Mesh, list[paceline.Run]] = {mesh: [] for mesh in some}
        predicted: dict[Mesh, list[float]] = {mesh: [] for mesh in some}
        for turn in range(self._pace.rounds):
            steps = self._pace.of(some[0])
            one = self._run(ALONE, steps)
            alone.append(_step_s(one))
            for mesh in some[:: -1 if turn % 2 else 1]:
                found[mesh].append(self._run(mesh, steps))
                _check(mesh, found[mesh][-1], one)
                if self._predicts and mesh.workers <= cores():
                    predicted[mesh].append(self._predict(mesh))
                what = f"{mesh.strategy}, round {turn + 1} of {self._pace.rounds}"
                bar.update(bar.task_ids[0], description=what, advance=1)
        for mesh, runs in found.items():
            ratio = median(_step_s(run) / one for run, one in zip(runs, alone, strict=True))
            sheet.put(_row(mesh, runs, ratio, predicted[mesh]) | self._said() | machine())

    def _run(self, mesh: Mesh, steps: int) -> paceline.Run:
        words: dict[str, Any] = {"steps": steps, "evaluate_every": steps, "progress": False}
        return paceline.train(self._program, mesh.strategy, engine=self._engine, **words)

    def _predict(self, mesh: Mesh) -> float:
        words: dict[str, Any] = {"steps": PREDICTED, "evaluate_every": PREDICTED, "progress": False}
        run = paceline.train(self._program, mesh.strategy, engine="virtual", times="measured", **words)
        return float(run.summary["seconds"]) / PREDICTED

    def _said(self) -> dict[str, Any]:
        return {"rounds": self._pace.rounds, **self._size._asdict()}


def _step_s(run: paceline.Run) -> float:
    return float(run.summary["step_time_s"])


def _check(mesh: Mesh, run: paceline.Run, one: paceline.Run) -> None:
    """Raise AssertionError where a mesh has not trained the same model."""
    for name, value in one.state.items():
        largest, apart = float(value.abs().max()), float((run.state[name] - value).abs().max())
        assert apart <= CLOSE * largest, f"{mesh.strategy}: {name} is {apart:g} from one process's, of {largest:g}"


def _row(mesh: Mesh, runs: Sequence[paceline.Run], ratio: float, predicted: Sequence[float]) -> dict[str, Any]:
    def largest(name: str) -> int:
        return max((value for run in runs for value in run.summary.get(name, ()) if value is not None), default=0)

    return {
        **mesh._asdict(),
        "step_ms": f"{1e3 * median(map(_step_s, runs)):.3f}",
        "of_one": f"{ratio:.3f}",
        "predicted_ms": f"{1e3 * median(predicted):.3f}" if predicted else "",
        "of_predicted": f"{median(_step_s(r) / p for r, p in zip(runs, predicted, strict=True)):.3f}"
        if predicted
        else "",
        "sent_bytes": round(median(run.summary["payload_bytes_per_step"] or 0 for run in runs)),
        "parameter_bytes": largest("parameter_bytes"),
        "saved_bytes": largest("peak_saved_bytes"),
        "memory_bytes": largest("peak_memory_bytes"),
    }
