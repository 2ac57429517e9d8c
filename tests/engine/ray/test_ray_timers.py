"""Policies with a timer on Ray: the server wakes at deadlines, and so does the standby that has followed it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import Aggregation, Decoupled, Run, Strategy
from paceline.engine.base import Watcher
from paceline.engine.ray.engine import RayEngine
from tests.engine import programs, stragglers
from tests.engine.ray.test_ray_standby import LONG_S, At, kill
from tests.engine.timed_policies import EverySecond

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

PROGRAM = programs.program(train=programs.data(samples=48))  # no Δ without a sample, which alone would be discarded


def test_the_server_wakes_at_deadlines(on_ray: OnRay) -> None:
    """All wait for ticks alone."""
    run = on_ray(PROGRAM, Strategy(replicas=2, aggregation=EverySecond(0.01)), steps=6)
    assert run.summary["applied"] == run.summary["gradients"] == 12
    assert run.summary["updates"] >= 6


@pytest.mark.parametrize("dies", [False, True])
def test_a_late_replica_holds_nobody_up(on_ray: OnRay, tmp_path: Path, dies: bool) -> None:
    loop = functools.partial(stragglers.late, late=2, until=10, folder=tmp_path, dies=dies)
    strategy = "replicas=3 aggregation=decoupled:period=2,quorum=2,grace=0.5"
    run = on_ray(PROGRAM, strategy, steps=16, on_death="continue", loop=loop)
    assert [exit_.replica for exit_ in run.left] == [2] * dies
    assert run.summary["applied"] == run.summary["gradients"]
    assert run.summary["updates"] >= 4


def test_rounds_of_all_that_wait_are_diloco(on_ray: OnRay) -> None:
    """Whoever comes first, sums are in the order of replicas."""
    one, other = (
        on_ray(PROGRAM, f"replicas=3 aggregation={policy}", steps=9)
        for policy in ("decoupled:period=3,quorum=all,hold=true", "local-steps:period=3,outer=nesterov")
    )
    assert all(bool((one.state[name] == value).all()) for name, value in other.state.items())


@pytest.mark.parametrize(
    "policy", [EverySecond(0.02), Decoupled(period=1, quorum=2, grace=0.5)], ids=["timer", "grace"]
)
def test_the_standby_goes_on_with_the_timer(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path, policy: Aggregation[Any]
) -> None:
    """The server dies while replica 0 waits, and others may: what they have sent is merged by the standby's clock."""
    act = At(engine, tmp_path, [3, 8], lambda: kill(engine, "server"))
    watched.append(act)
    strategy = Strategy(replicas=3, aggregation=policy, standby=1)
    run = on_ray(PROGRAM, strategy, steps=12, loop=act.loop, timeout_s=LONG_S)
    assert act.left == []
    assert "its standby took over" in run.summary["notes"]["server"]
    assert run.summary["applied"] == run.summary["gradients"] == 36
