"""Replicas of several workers: who dies, fails or hangs, who is told of it, and what is told of all of them."""

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InputError, PacelineError, Run, Strategy, WaitTimeoutError, WorkerError, train
from paceline.core.mesh import Coordinate, Mesh
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.control_block import BEING_WRITTEN
from paceline.engine.local.engine import LocalEngine
from paceline.engine.local.fault_injection import EventScript
from paceline.engine.local.replica_group_worker import ArenaMemory
from paceline.engine.spmd.replica_group import PartDone, ShardIO
from paceline.engine.spmd.shard_views import StageSharding
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatLayout, FlatState
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 6

PIPELINES = "replicas=2 stages=2 micro_batches=2 aggregation=asynchronous"


def signalling(worker: Any, *, folder: Path, whom: Coordinate, number: int, step: int) -> None:
    """The plain loop, but the first worker of one replica sends a signal to another one before one of its steps."""
    for made, batch in enumerate(worker.batches(), 1):
        if (worker.replica, made) == (whom.replica, step):
            os.kill(pid_of(whom, folder), number)
        worker.step(batch)


def pid_of(whom: Coordinate, folder: Path) -> int:
    rows = json.loads((folder / "workers.json").read_text())
    workers = [row for row in rows if row["role"] == "replica"]
    return next(row["pid"] for row in workers if whom == (row["replica"], row["stage"], row["shard"]))


@pytest.mark.parametrize(
    ("team", "place"),
    [
        ("stages=2 micro_batches=2", Coordinate(1, 1, 0)),
        ("shards=2", Coordinate(1, 0, 1)),
        ("shards=2", Coordinate(1, 0, 0)),
    ],
)
def test_a_replica_leaves_with_the_first_of_its_workers_that_is_killed(
    local: Local, tmp_path: Path, team: str, place: Coordinate
) -> None:
    loop = functools.partial(signalling, folder=tmp_path / "run", whom=place, number=signal.SIGKILL, step=3)
    strategy = Strategy.parse(f"replicas=2 aggregation=asynchronous {team}")
    run = local(programs.program(), strategy, steps=STEPS, loop=loop, out=tmp_path / "run")
    reason = f"killed by SIGKILL (stage {place.stage}, shard {place.shard})"
    assert [(d.replica, d.reason) for d in run.left] == [(1, reason)]
    assert run.summary["gradients"] == run.summary["applied"] == run.summary["updates"]
    assert run.summary["gradients"] == STEPS + 2  # two of replica 1, which died at its third
    assert run.summary["steps"] == STEPS


def test_a_script_kills_a_whole_replica(local: Local) -> None:
    """What lies in the buffer stays good."""
    strategy = Strategy.parse("replicas=2 stages=2 micro_batches=2 aggregation=buffered:k=2")
    script = EventScript().order((1, 1), (0, 1)).kill(replica=1, step=1, when="taken")
    run = local(programs.program(), strategy, steps=STEPS, script=script)
    assert [d.replica for d in run.left] == [1]
    assert run.summary["updates"] == STEPS
    assert run.summary["applied"] == STEPS + 1


def test_where_all_have_died_the_run_fails(local: Local, tmp_path: Path) -> None:
    loop = functools.partial(
        signalling, folder=tmp_path / "run", whom=Coordinate(0, 1, 0), number=signal.SIGKILL, step=2
    )
    strategy = Strategy.parse("stages=2 micro_batches=2 aggregation=asynchronous")
    with pytest.raises(WorkerError, match=r"every replica died: 0 killed by SIGKILL \(stage 1, shard 0\)"):
        local(programs.program(), strategy, steps=STEPS, loop=loop, out=tmp_path / "run")


def with_a_class_too_many(worker: Any) -> None:
    """The plain loop, but the third batch has targets of which there can be no loss."""
    for made, batch in enumerate(worker.batches(), 1):
        worker.step((batch.input, torch.full_like(batch.target, 7)) if made == 3 else batch)


@pytest.mark.parametrize(
    ("team", "where"),
    [
        ("stages=2 micro_batches=2", r"stage 1, shard 0\): stage 1, micro-batch 0"),
        ("shards=2", r"stage 0, shard \d\): "),
    ],
)
def test_an_error_in_one_worker_ends_the_run_and_says_where(local: Local, team: str, where: str) -> None:
    """The last stage alone makes losses."""
    strategy = Strategy.parse(f"aggregation=asynchronous {team}")
    with pytest.raises(WorkerError, match=rf"^replica 0 \({where}.*: IndexError: Target 7"):
        local(programs.program(), strategy, steps=STEPS, loop=with_a_class_too_many)


@pytest.mark.parametrize("place", [Coordinate(0, 0, 0), Coordinate(0, 1, 0)])
def test_a_worker_that_hangs_is_missed(local: Local, tmp_path: Path, place: Coordinate) -> None:
    loop = functools.partial(signalling, folder=tmp_path / "run", whom=place, number=signal.SIGSTOP, step=2)
    strategy = Strategy.parse("stages=2 micro_batches=2 aggregation=asynchronous")
    with pytest.raises(WaitTimeoutError, match=r"replica 0.* waited 3 s |waited 3 s for replica 0"):
        local(programs.program(), strategy, steps=STEPS, loop=loop, out=tmp_path / "run", timeout_s=3)


def interrupting(worker: Any, *, folder: Path) -> None:
    """The plain loop, but before its third step the first replica's sends main what Ctrl-C does."""
    for made, batch in enumerate(worker.batches(), 1):
        if (worker.replica, made) == (0, 3):
            rows = json.loads((folder / "workers.json").read_text())
            os.kill(next(row["pid"] for row in rows if row["role"] == "coordinator"), signal.SIGINT)
        worker.step(batch)


def test_ctrl_c_ends_all_workers(local: Local, tmp_path: Path) -> None:
    loop = functools.partial(interrupting, folder=tmp_path / "run")
    run = local(programs.program(), PIPELINES, steps=100_000, loop=loop, out=tmp_path / "run")
    assert run.summary["interrupted"]
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert not run.left


# ----------------------------------------------------------------------------------------------------- what is told


def copying(worker: Any, *, folder: Path) -> None:
    """The plain loop; the losses that it sees, and who there is, are left beside the run's folder."""
    losses = [worker.step(batch) for batch in worker.batches()]
    said = {"losses": losses, "workers": json.loads((folder / "run" / "workers.json").read_text())}
    (folder / f"replica {worker.replica}").write_text(json.dumps(said))


def test_all_workers_are_told_of(local: Local, tmp_path: Path) -> None:
    program = programs.program()
    strategy = Strategy.parse("replicas=2 stages=2 shards=[2,1] micro_batches=2 aggregation=asynchronous")
    loop = functools.partial(copying, folder=tmp_path)
    run = local(program, strategy, steps=3, loop=loop, out=tmp_path / "run", trace=True)
    places = [(r, *rest) for r in (0, 1) for rest in ((0, 0), (0, 1), (1, 0))]
    for replica in (0, 1):
        said = json.loads((tmp_path / f"replica {replica}").read_text())
        workers = [row for row in said["workers"] if row["role"] == "replica"]
        assert [(row["replica"], row["stage"], row["shard"]) for row in workers] == places
        assert len({row["pid"] for row in workers}) == 6
        assert len(said["losses"]) == 3
        assert all(0 < loss < 10 for loss in said["losses"])
    for action in ("pull", "forward", "backward", "push"):
        assert {(s.replica, s.stage, s.shard) for s in run.spans if s.action == action} == set(places)
    assert len(run.summary["utilisation"]) == 6
    assert run.summary["steps"] == 3


def test_counts_and_staleness_of_teams_that_run_freely(local: Local) -> None:
    """Of two replicas that are at most one step apart, one makes at most three updates while the other makes a step."""
    strategy = Strategy.parse("replicas=2 stages=2 micro_batches=2 aggregation=stale-synchronous:bound=1")
    run = local(programs.program(), strategy, steps=12)
    assert run.summary["updates"] == run.summary["gradients"] == run.summary["applied"] == 24
    assert sum(run.summary["staleness"].values()) == 24
    assert max(map(int, run.summary["staleness"])) <= 3


# ---------------------------------------------------------------------------------- all parts read one version of A


class Nothing(Replica):
    """Its Δ is as it was."""

    def adopt(self, state: FlatState) -> None:
        self.seen = [vector.clone() for vector in state.parameters]

    def advance(self, batch: Batch, clock: int) -> float:
        return 0.5

    def finish(self, out: FlatState) -> Measured:
        for vector in out.parameters:
            vector.fill_(2.0)
        return Measured(0.5, 4, True)


class Half:
    """A stage that has the first layer."""

    def __init__(self, layout: FlatLayout) -> None:
        self.mesh, self.place = Mesh(1, (1, 1)), Coordinate(0, 0, 0)
        parts = [layout.part({name for name in layout.parameter_names if name.startswith(at)}) for at in ("0", "2")]
        self.stages = [StageSharding({}, [part]) for part in parts]
        self.state = parts[0].new()


def half() -> tuple[ParameterArena, ShardIO, Nothing]:
    layout = FlatLayout.of(programs.mlp())
    store, inner = ParameterArena(ArenaLayout(layout, 1, 1, 0, workers=1)), Nothing()
    return store, ShardIO(ArenaMemory(store, 0), Coordinate(0, 0, 0), Half(layout), inner, lambda: None), inner


def test_a_part_is_read_and_written_by_name() -> None:
    store, part, inner = half()
    store.version(0).parameters[0].copy_(torch.arange(store.layout.state.parameters[0].elements))
    part.adopt(0, 0, reset=False)
    whole = dict(store.version(0).named())
    assert torch.equal(inner.seen[0], torch.cat([whole["0.weight"].reshape(-1), whole["0.bias"]]))
    assert part.finish(0) == PartDone(0, True, 4, 0.5)
    written = {name: sorted(set(tensor.reshape(-1).tolist())) for name, tensor in store.delta(0, 0).named()}
    assert written == {"0.weight": [2.0], "0.bias": [2.0], "2.weight": [0.0], "2.bias": [0.0]}
    store.close()


@pytest.mark.parametrize("stamp", [1, BEING_WRITTEN])
def test_a_part_that_would_read_another_version_says_so(stamp: int) -> None:
    store, part, _ = half()
    store.control.versions[0] = stamp
    with pytest.raises(
        PacelineError, match=rf"replica 0 \(stage 0, shard 0\) was sent version 0 of A, but read {stamp}"
    ):
        part.adopt(0, 0, reset=False)
    store.close()


def test_parts_of_one_delta_that_read_two_versions_are_refused() -> None:
    with pytest.raises(PacelineError, match=r"read versions \[4, 5\] of A"):
        PartDone.merge([PartDone(5, True, 4, 0.1), PartDone(4, True, 4, 0.1)])


def test_a_delta_is_finite_if_all_its_parts_are() -> None:
    nan = float("nan")
    assert PartDone.merge([PartDone(1, True, 4, nan), PartDone(1, True, 4, 0.1)]) == Measured(0.1, 4, True)
    assert not PartDone.merge([PartDone(1, False, 4, nan), PartDone(1, True, 4, 0.1)]).finite
    assert not PartDone.merge([PartDone(1, True, 4, nan), PartDone(1, True, 4, nan)]).finite
    assert PartDone.merge([PartDone(1, True, 0, nan), PartDone(1, True, 0, nan)]).finite


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("stages=2 aggregation=hogwild", "replicas write one A in place"),
        ("shards=2 aggregation=hogwild", "replicas write one A in place"),
        ("stages=2 schedule=pipedream aggregation=asynchronous", "each stage moves its weights by itself"),
        ("stages=2 schedule=pipedream aggregation=synchronous:backups=0 replicas=2", "write replicas=1"),
    ],
)
def test_refusals(strategy: str, words: str) -> None:
    with LocalEngine() as engine, pytest.raises(InputError, match=words):
        train(programs.program(), Strategy.parse(strategy), engine=engine, steps=2, progress=False)
