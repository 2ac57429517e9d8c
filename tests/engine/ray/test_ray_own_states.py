"""What replicas keep from Δ to Δ, their optimizers above all, comes back with them: in another run or actor."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run, train
from paceline.checkpoint.reader import newest
from tests.engine import programs
from tests.engine.local import test_on_death
from tests.engine.local.test_own_states import FALLING, PROGRAM
from tests.engine.ray import server_moments
from tests.engine.ray.commands import pushing

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

IN_LOCKSTEP = "aggregation=local-steps:period=2"
STEPS = 12


@pytest.mark.parametrize("program", [PROGRAM, FALLING])
def test_a_run_that_was_cut_ends_as_one_that_was_not(on_ray: OnRay, tmp_path: Path, program: Any) -> None:
    strategy = f"replicas=2 {IN_LOCKSTEP},outer=nesterov"
    whole = on_ray(program, strategy, steps=16)
    on_ray(program, strategy, steps=6, checkpoint=tmp_path, checkpoint_every="2 steps")
    for saving in ({}, {"checkpoint": tmp_path / "further"}):
        run = on_ray(program, strategy, steps=16, resume=tmp_path, **saving)
        assert "new optimizers" not in run.summary["notes"]["resumed"]
        assert test_on_death.same(whole, run)


@pytest.mark.parametrize("policy", ["elastic-averaging:period=2,elasticity=0.2", "local-steps:period=2"])
def test_what_replicas_go_on_with_is_what_they_had(on_ray: OnRay, tmp_path: Path, policy: str) -> None:
    """Saved once more before a step, and by the other engine."""
    strategy = f"replicas=3 aggregation={policy}"
    on_ray(FALLING, strategy, steps=6, checkpoint=tmp_path / "a")
    on_ray(FALLING, strategy, steps=6, resume=tmp_path / "a", checkpoint=tmp_path / "b")
    train(FALLING, strategy, engine="local", steps=6, resume=tmp_path / "b", checkpoint=tmp_path / "c", progress=False)
    found = [newest(tmp_path / folder)[0] for folder in "abc"]
    one, *others = [checkpoint for checkpoint in found if checkpoint is not None]
    names = one.names("replica/")
    assert {name.split("/")[1] for name in names if "/optimizer/" in name} == {"0", "1", "2"}
    assert len(others) == 2
    for other in others:
        assert names == other.names("replica/")
        assert all(torch.equal(one.read(name), other.read(name)) for name in names)
        assert one.manifest.head["run"]["engine"]["replicas"] == other.manifest.head["run"]["engine"]["replicas"]


@pytest.mark.parametrize(
    ("way", "dying"),
    [
        ("memory", test_on_death.dying),
        ("memory", test_on_death.dying_within),
        ("bytes", test_on_death.dying_within),
        ("calls", test_on_death.dying_within),
    ],
)
def test_with_a_replica_that_is_replaced(on_ray: OnRay, tmp_path: Path, way: str, dying: Any) -> None:
    strategy = f"replicas=2 {IN_LOCKSTEP}"
    whole = on_ray(PROGRAM, strategy, steps=STEPS)
    dying = functools.partial(dying, folder=tmp_path, at={(1, 6): "a", (1, 3): "b"})
    loop = functools.partial(pushing, way=way, loop=dying)
    run = on_ray(PROGRAM, strategy, steps=STEPS, on_death="replace", loop=loop)
    assert [exit_.replica for exit_ in run.left] == [1, 1]
    assert test_on_death.same(whole, run)


def test_and_with_a_server_that_dies_before(on_ray: OnRay, tmp_path: Path) -> None:
    """The standby has had what they keep with their Δs."""
    whole = on_ray(PROGRAM, f"replicas=2 {IN_LOCKSTEP}", steps=STEPS)
    build = functools.partial(server_moments.model, PROGRAM.model, "forwarded", 9, tmp_path / "died")
    loop = functools.partial(test_on_death.dying, folder=tmp_path, at={(1, 8): "a"})
    program = programs.program(model=build, train=PROGRAM.train, optimizer=PROGRAM.optimizer)
    run = on_ray(program, f"replicas=2 standby=1 {IN_LOCKSTEP}", steps=STEPS, on_death="replace", loop=loop)
    assert not run.summary["notes"]["server"].endswith("at update 0")
    assert [exit_.replica for exit_ in run.left] == [1]
    assert test_on_death.same(whole, run)
