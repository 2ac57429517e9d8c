"""Replicas of several workers on Ray compute what one process computes, and live and die as a whole."""

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD, Adam

from paceline import Run, Strategy, WorkerError, train
from paceline.core.mesh import Coordinate
from tests import oracle
from tests.engine import programs
from tests.engine.local import test_on_death
from tests.engine.local.test_own_states import FALLING
from tests.engine.local.test_own_states import PROGRAM as MOMENTUM
from tests.engine.local.test_replica_group import ROUNDING, TEAMS
from tests.engine.local.test_replica_group_failures import pid_of
from tests.engine.ray import server_moments
from tests.engine.ray.commands import pushing

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 6


def reading(worker: Any, *, folder: Path) -> None:
    """The plain loop, in which the first replica keeps a copy of the run's list of workers."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.replica == 0:
            (folder / "seen.json").write_bytes((folder / "run" / "workers.json").read_bytes())


@pytest.mark.parametrize("team", TEAMS[:3])  # others start actors of their own, which takes longest
def test_in_lockstep_they_are_one_process(on_ray: OnRay, tmp_path: Path, team: str) -> None:
    """The run's folder says of each worker which process on which node it is."""
    program = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9), clip_norm=0.05)
    loop, strategy = functools.partial(reading, folder=tmp_path), Strategy.parse(f"replicas=2 {team}")
    run = on_ray(program, strategy, steps=STEPS, loop=loop, out=tmp_path / "run")
    oracle.assert_same(run.model, oracle.one_process(program, 2, STEPS), ROUNDING)
    assert run.summary["updates"] == run.summary["steps"] == STEPS
    rows = [row for row in json.loads((tmp_path / "seen.json").read_text()) if row["role"] == "replica"]
    places = [Coordinate(row["replica"], row["stage"], row["shard"]) for row in rows]
    assert places == [strategy.mesh.coordinate(rank) for rank in range(strategy.workers)]
    assert len({row["pid"] for row in rows}) == len(run.summary["utilisation"]) == strategy.workers
    assert len({row["node"] for row in rows}) == 1
    assert run.summary["optimizer_bytes"] == [0] * strategy.workers


@pytest.mark.parametrize(
    ("team", "policy"),
    [
        ("stages=2 micro_batches=2", "smooth-switch:threshold=loss-driven"),
        ("shards=2", "decoupled:period=2,quorum=1"),
        ("shards=2", "robust:k=1"),
    ],
)  # each policy over each form: tests/test_combinations.py
def test_alone_one_does_what_virtual_time_says(on_ray: OnRay, policy: str, team: str) -> None:
    """Its Δs arrive in one order only."""
    strategy = f"{team} aggregation={policy}"
    virtual = train(MOMENTUM, strategy, engine="virtual", steps=STEPS, progress=False)
    real = on_ray(MOMENTUM, strategy, steps=STEPS)
    oracle.assert_same(real.model, virtual.state, ROUNDING)
    for count in ("updates", "gradients", "applied", "discarded", "staleness"):
        assert real.summary[count] == virtual.summary[count], count


@pytest.mark.parametrize("policy", ["asynchronous", "buffered:k=2,cancel=true", "smooth-switch:every=4"])
@pytest.mark.parametrize("team", ["stages=2 micro_batches=2", "shards=2"])
def test_several_count_each_delta_once(on_ray: OnRay, policy: str, team: str) -> None:
    run = on_ray(programs.program(), f"replicas=3 {team} aggregation={policy}", steps=STEPS)
    assert run.summary["gradients"] + run.summary["cancelled"] == 3 * STEPS
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert sum(run.summary["staleness"].values()) == run.summary["applied"] > 0


@pytest.mark.parametrize("team", ["stages=2 micro_batches=2", "shards=2"])
def test_a_may_be_in_several_servers(on_ray: OnRay, team: str) -> None:
    program = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9), clip_norm=0.05)
    run = on_ray(program, f"replicas=2 servers=2 {team}", steps=STEPS)
    oracle.assert_same(run.model, oracle.one_process(program, 2, STEPS), ROUNDING)
    whole = on_ray(program, f"replicas=2 servers=1 {team}", steps=STEPS)
    assert run.summary["notes"]["server_optimizer_bytes"] == whole.summary["notes"]["server_optimizer_bytes"] > 0


# --------------------------------------------------------------------------------------------------------------- deaths


def signalling(worker: Any, *, folder: Path, whom: Coordinate, at: dict[int, str]) -> None:
    """The plain loop, in which a replica's first worker kills one of its workers before some of its steps, once."""
    for made, batch in enumerate(worker.batches(), 1):
        mark = folder / at.get(made, "")
        if worker.replica == whom.replica and mark != folder and not mark.exists():
            mark.touch()
            os.kill(pid_of(whom, folder / "run"), signal.SIGKILL)
        worker.step(batch)


@pytest.mark.parametrize(
    ("team", "whom"),
    [
        ("stages=2", Coordinate(1, 1, 0)),
        ("stages=2", Coordinate(1, 0, 0)),
        ("shards=2", Coordinate(1, 0, 1)),
        ("stages=2 aggregation=local-steps:period=2", Coordinate(1, 1, 0)),
    ],
)
def test_one_that_loses_a_worker_is_replaced_without_a_change_of_one_bit(
    on_ray: OnRay, tmp_path: Path, team: str, whom: Coordinate
) -> None:
    program = programs.program(train=programs.data(samples=48), optimizer=functools.partial(Adam, lr=0.01))
    whole = on_ray(program, f"replicas=2 {team}", steps=STEPS)
    loop = functools.partial(signalling, folder=tmp_path, whom=whom, at={3: "a"})
    run = on_ray(program, f"replicas=2 {team}", steps=STEPS, loop=loop, on_death="replace", out=tmp_path / "run")
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.left[0].reason.endswith("; replaced")
    assert run.left[0].reason.startswith(f"its worker of stage {whom.stage}, shard {whom.shard}: ")
    assert test_on_death.same(whole, run)


def test_or_the_others_go_on_without_it(on_ray: OnRay, tmp_path: Path) -> None:
    loop = functools.partial(signalling, folder=tmp_path, whom=Coordinate(1, 0, 1), at={3: "a"})
    run = on_ray(
        programs.program(),
        "replicas=2 shards=2 aggregation=asynchronous",
        steps=STEPS,
        loop=loop,
        on_death="continue",
        out=tmp_path / "run",
    )
    assert [exit_.replica for exit_ in run.left] == [1]
    assert STEPS + 2 <= run.summary["gradients"] < 2 * STEPS


def test_or_the_run_ends_and_names_it(on_ray: OnRay, tmp_path: Path) -> None:
    loop = functools.partial(signalling, folder=tmp_path, whom=Coordinate(1, 0, 1), at={3: "a"})
    settings = {"loop": loop, "on_death": "stop", "out": tmp_path / "run"}
    with pytest.raises(WorkerError, match="replica 1 died: its worker of stage 0, shard 1: its process ended"):
        on_ray(programs.program(), "replicas=2 shards=2", steps=STEPS, **settings)


def test_a_server_that_dies_is_followed_by_its_standby(on_ray: OnRay, tmp_path: Path) -> None:
    whole = on_ray(MOMENTUM, "replicas=2 stages=2", steps=STEPS)
    build = functools.partial(server_moments.model, MOMENTUM.model, "forwarded", 7, tmp_path / "died")
    program = programs.program(model=build, train=MOMENTUM.train, optimizer=MOMENTUM.optimizer)
    run = on_ray(program, "replicas=2 stages=2 standby=1", steps=STEPS)
    assert (tmp_path / "died").exists()
    assert test_on_death.same(whole, run)


# --------------------------------------------------------------------------------------------------------- other ways


@pytest.mark.parametrize("way", ["memory", "bytes", "calls"])
def test_whatever_way_they_push(on_ray: OnRay, way: str) -> None:
    program = programs.program(optimizer=MOMENTUM.optimizer)
    run = on_ray(program, "replicas=2 shards=2", steps=STEPS, loop=functools.partial(pushing, way=way))
    oracle.assert_same(run.model, oracle.one_process(program, 2, STEPS), ROUNDING)


@pytest.mark.parametrize(
    ("strategy", "program"),
    [
        ("replicas=2 stages=2", MOMENTUM),
        ("replicas=2 shards=2", FALLING),
        ("replicas=2 stages=2 aggregation=local-steps:period=2,outer=nesterov", FALLING),
        ("replicas=2 shards=2 aggregation=local-steps:period=2", MOMENTUM),
    ],
)
def test_they_go_on_from_a_checkpoint(on_ray: OnRay, tmp_path: Path, strategy: str, program: Any) -> None:
    whole = on_ray(program, strategy, steps=16)
    on_ray(program, strategy, steps=6, checkpoint=tmp_path, checkpoint_every="2 steps")
    run = on_ray(program, strategy, steps=16, checkpoint=tmp_path, resume=True)
    assert "new optimizers" not in run.summary["notes"]["resumed"]
    assert test_on_death.same(whole, run)
    assert run.summary["steps"] == 16
