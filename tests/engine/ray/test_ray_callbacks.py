"""Callbacks in the main process of a run on actors."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import CallbackError, Run
from tests.callbacks.recording import Recording, assert_ended, assert_whole
from tests.engine import programs

OnRay = Callable[..., Run]

MANY = 10**6


def program() -> Any:
    return programs.program(test=programs.data(samples=20))


def dying(worker: Any) -> None:
    """Replica 1 dies at its third step."""
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 1 and made == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 aggregation=asynchronous servers=2"])
def test_they_are_called_for_all_that_happens(on_ray: OnRay, tmp_path: Path, strategy: str) -> None:
    recording, settings = Recording(), {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "4 steps"}
    run = on_ray(program(), strategy, steps=8, evaluate_every=2, callbacks=[recording], **settings)
    assert_whole(recording, run)
    assert recording.of("checkpoint")[-1] == tmp_path / "ckpt" / f"step-{run.summary['updates']}"
    again = Recording()
    more = on_ray(program(), strategy, steps=12, evaluate_every=2, callbacks=[again], resume=True, **settings)
    assert again.handle.history == more.history
    assert again.of("start")[0][-1] == len(more.history) - len(again.of("record")) == len(run.history)


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 aggregation=asynchronous standby=1"])
def test_one_ends_training(on_ray: OnRay, strategy: str) -> None:
    recording = Recording(stop_after=3)
    run = on_ray(program(), strategy, steps=MANY, evaluate_every=50, callbacks=[recording])
    assert_ended(recording, run, MANY)


def test_one_that_stops_at_the_start_leaves_what_the_run_starts_from(on_ray: OnRay) -> None:
    recording = Recording(stop_at="start")
    run = on_ray(program(), "replicas=2", steps=MANY, callbacks=[recording])
    assert_whole(recording, run)
    assert (run.history[0].updates, run.summary["stopped"]) == (0, "enough")


def test_a_departure_is_told_while_the_run_lasts(on_ray: OnRay) -> None:
    recording = Recording(stop_at="departure")
    run = on_ray(program(), "replicas=2", steps=MANY, loop=dying, callbacks=[recording])
    assert_whole(recording, run)
    assert [each.replica for each in recording.of("departure")] == [1]
    assert run.summary["stopped"] == "enough"


def test_what_one_raises_ends_the_run(on_ray: OnRay) -> None:
    failing = Recording(fails="record")
    with pytest.raises(CallbackError, match=r"callback Recording\.on_record failed: KeyError: 'torn'"):
        on_ray(program(), "replicas=2", steps=MANY, callbacks=[failing])
    assert failing.of("end") == [None]


class KillsTheServer(Recording):
    """Kills it at the third record."""

    def on_record(self, record: Any, run: Any) -> None:
        super().on_record(record, run)
        if len(self.of("record")) == 3:
            rows = json.loads((run.out / "workers.json").read_text())
            os.kill(next(row["pid"] for row in rows if row["role"] == "coordinator"), signal.SIGKILL)


def test_nothing_is_told_twice_or_lost_where_a_standby_takes_over(on_ray: OnRay, tmp_path: Path) -> None:
    recording, strategy = KillsTheServer(), "replicas=2 aggregation=asynchronous standby=1"
    run = on_ray(program(), strategy, steps=400, evaluate_every=40, out=tmp_path / "run", callbacks=[recording])
    assert_whole(recording, run)
    assert "its standby took over" in run.summary["notes"]["server"]
