"""Portions of a batch and L-BFGS over servers that each have a slice of A: torch's steps, whoever dies."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import InputError, Run
from paceline.engine.base import Watcher
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine.lbfgs_cases import ROUNDING, iterated, portioned
from tests.engine.local.test_on_death import dying
from tests.engine.ray.test_ray_failures import once, training

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]


@pytest.mark.parametrize(
    ("servers", "team"),
    [(2, "replicas=3"), (1, "replicas=2"), (5, "replicas=2"), (2, "replicas=2 stages=2"), (3, "replicas=1 shards=2")],
)
def test_lbfgs_makes_torchs_steps(on_ray: OnRay, servers: int, team: str) -> None:
    """Products of vectors are sums over slices, on which all servers agree."""
    model, evaluations = iterated("stiff")
    strategy = f"{team} servers={servers} aggregation=sandblaster:portions=7"
    run = on_ray(portioned("stiff", 7), strategy, steps=evaluations)
    oracle.assert_same(run.model, model, ROUNDING)
    assert run.summary["updates"] == evaluations


def test_what_compresses_is_no_gradient(on_ray: OnRay) -> None:
    with pytest.raises(InputError, match="leave compression out"):
        on_ray(portioned("mlp", 2), "replicas=2 compression=fp16", steps=2)


@pytest.mark.parametrize("on_death", ["continue", "replace"])
@pytest.mark.parametrize("servers", [2, 1])
def test_a_replicas_death_changes_no_bit(on_ray: OnRay, short: Path, servers: int, on_death: str) -> None:
    program, strategy = portioned("mlp", 13), f"replicas=3 servers={servers} aggregation=sandblaster:portions=13"
    whole = on_ray(program, strategy, steps=8)
    loop = functools.partial(dying, folder=short, at={(2, 3): "a", (1, 9): "b"})
    run = on_ray(program, strategy, steps=8, on_death=on_death, loop=loop)
    oracle.assert_same(run.model, whole.state, 0)
    assert sorted(each.replica for each in run.left) == [1, 2]


@pytest.mark.parametrize("servers", [2, 1])
def test_nor_does_a_servers(on_ray: OnRay, engine: RayEngine, watched: list[Watcher], servers: int) -> None:
    """Its standby has the same history of the search."""
    program = portioned("stiff", 7)
    strategy = f"replicas=2 servers={servers} standby=1 aggregation=sandblaster:portions=7"
    whole, died = on_ray(program, strategy, steps=30), list[int]()

    def kill() -> None:
        pool = engine._pool
        assert pool is not None
        died.append(pool.locations[pool.server].pid)
        os.kill(died[0], signal.SIGKILL)

    watched.append(once(lambda progress: training(progress) and progress.updates > 5, kill))
    run = on_ray(program, strategy, steps=30)
    oracle.assert_same(run.model, whole.state, 0)
    assert died
