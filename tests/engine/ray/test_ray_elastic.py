"""Replicas on Ray come and go within bounds, by request and by death; each sample of an epoch is used once."""

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline import Run
from paceline.engine.scaling import scale
from tests.engine import programs
from tests.engine.local import moments
from tests.engine.local.commands import eventually

OnRay = Callable[..., Run]


def gated(worker: Any, *, folder: Path, gates: dict[int, str], pause_s: float = 0.0) -> None:
    """The plain loop; before so many steps of its own a replica waits for a mark."""
    for made, batch in enumerate(worker.batches()):
        if made in gates:
            eventually((folder / gates[made]).exists)
        threading.Event().wait(pause_s)
        worker.step(batch)


class Outside:
    """What another shell does to a run.

    Args:
        folder: of the run, its ``out``; marks are made beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self) -> dict[int, int]:
        """Return the pids of the replicas, by number."""
        rows = json.loads((self.folder / "workers.json").read_text())
        return {row["replica"]: row["pid"] for row in rows if row["role"] == "replica"}

    def scaled(self, replicas: int) -> None:
        eventually((self.folder / "workers.json").exists)
        scale(self.folder, replicas, timeout_s=60.0)
        eventually(lambda: len(self.rows()) == replicas)

    def mark(self, name: str) -> None:
        (self.folder.parent / name).touch()


@pytest.fixture
def train_beside(on_ray: OnRay, outside: Outside) -> Callable[..., Run]:
    """Trains in this thread, as Ray wants it, while another one acts; returns a run whose weights count samples."""

    def run(strategy: str, *, epochs: int, loop: Callable[[Any], None], acts: Callable[[], None]) -> Run:
        # Replicas wait for others that start, which takes long where the machine is busy: nobody is suspected.
        patient = {"timeout_s": 120.0, "suspect_after_s": 120.0}
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(acts)
            program = moments.counting_any_batch()
            run = on_ray(program, strategy, epochs=epochs, loop=loop, out=outside.folder, **patient)
            acting.result(timeout=60.0)
        assert run.state["weight"].tolist() == [float(epochs)] * moments.SAMPLES
        return run

    return run


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "run")


def test_replicas_join_and_leave(train_beside: Callable[..., Run], outside: Outside, tmp_path: Path) -> None:
    """Two of three leave while the first one waits, long before the end of the data."""

    def acts() -> None:
        outside.scaled(3)
        outside.mark("up")
        outside.scaled(1)
        outside.mark("down")

    def first_waits(worker: Any) -> None:
        gates = {2: "up", 20: "down"} if worker.replica == 0 else {2: "up"}
        gated(worker, folder=tmp_path, gates=gates, pause_s=0.01 if worker.replica else 0.0)

    run = train_beside("replicas=1..3 aggregation=asynchronous", epochs=150, loop=first_waits, acts=acts)
    assert len(run.summary["utilisation"]) == 3
    assert not run.left


def test_there_are_as_many_as_the_cluster_has_room_for(
    train_beside: Callable[..., Run], outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with two cores comes, as far as the driver sees."""
    cores = [1]
    monkeypatch.setattr("paceline.engine.ray.cluster.Cluster.cores", lambda self: [*cores])

    def acts() -> None:
        eventually((outside.folder / "workers.json").exists)
        assert len(outside.rows()) == 1
        cores.append(2)
        eventually(lambda: len(outside.rows()) == 3)
        outside.mark("go")

    loop = functools.partial(gated, folder=tmp_path, gates={2: "go"})
    run = train_beside("replicas=1..3 aggregation=asynchronous", epochs=6, loop=loop, acts=acts)
    assert len(run.summary["utilisation"]) == 3


@pytest.mark.parametrize("policy", ["asynchronous", "synchronous:combine=sum"])
def test_one_that_joins_takes_its_share_and_one_that_dies_leaves_its(
    train_beside: Callable[..., Run], outside: Outside, tmp_path: Path, policy: str
) -> None:
    def acts() -> None:
        outside.scaled(3)
        os.kill(outside.rows()[2], signal.SIGKILL)
        outside.mark("go")

    loop = functools.partial(gated, folder=tmp_path, gates={2: "go"})
    run = train_beside(f"replicas=1..3 aggregation={policy}", epochs=6, loop=loop, acts=acts)
    assert [exit_.replica for exit_ in run.left] == [2]


def test_no_fewer_than_the_bound(train_beside: Callable[..., Run], outside: Outside, tmp_path: Path) -> None:
    def acts() -> None:
        eventually((outside.folder / "workers.json").exists)
        os.kill(outside.rows()[1], signal.SIGKILL)
        outside.mark("go")

    loop = functools.partial(gated, folder=tmp_path, gates={1: "go"})
    run = train_beside("replicas=2..3 aggregation=asynchronous", epochs=4, loop=loop, acts=acts)
    assert [exit_.reason.endswith("; replaced") for exit_ in run.left] == [True]


@pytest.mark.parametrize("team", ["stages=2", "shards=2"])
def test_replicas_of_several_workers_come_and_go_as_one(
    on_ray: OnRay, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, team: str
) -> None:
    """The second one joins, leaves and joins again, while the first one waits; each batch is given out once."""
    monkeypatch.setattr("paceline.engine.ray.cluster.Cluster.cores", lambda self: [3])

    def acts() -> None:
        eventually((outside.folder / "workers.json").exists)
        assert len(outside.rows()) == 1
        outside.scaled(2)
        outside.mark("up")
        scale(outside.folder, 1, timeout_s=60.0)
        outside.mark("asked")
        eventually(lambda: len(outside.rows()) == 1)
        outside.mark("down")
        outside.scaled(2)

    def loop(worker: Any) -> None:
        if worker.replica == 0:
            gated(worker, folder=tmp_path, gates={2: "up", 20: "down", 40: "back"})
        else:
            (tmp_path / ("back" if (tmp_path / "down").exists() else "there")).touch()
            gated(worker, folder=tmp_path, gates={5: "asked"}, pause_s=0.01)

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(acts)
        settings = {"loop": loop, "out": outside.folder, "timeout_s": 120.0, "suspect_after_s": 120.0}
        run = on_ray(programs.program(), f"replicas=1..2 {team} aggregation=asynchronous", epochs=40, **settings)
        acting.result(timeout=60.0)
    assert run.summary["gradients"] == run.summary["applied"] == 40 * 13  # 50 = 12 · 4 + 2
    assert len(run.summary["utilisation"]) == 4
    assert not run.left
