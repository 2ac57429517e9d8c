"""Portions of a batch and L-BFGS in worker processes: the bits of virtual time, whoever dies, and torch's steps."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run, train
from tests import oracle
from tests.engine import programs
from tests.engine.lbfgs_cases import ROUNDING, iterated, portioned
from tests.engine.local.test_on_death import dying, dying_within, same

Local = Callable[..., Run]

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("team", ["", " stages=2", " shards=2", " accumulate=2"])
def test_they_are_a_round_of_as_many_replicas(local: Local, team: str) -> None:
    program = programs.program(optimizer=ADAM, clip_norm=0.1)
    run = local(program, f"replicas=2{team} aggregation=sandblaster:portions=4", steps=6)
    accumulate = 2 if "accumulate" in team else 1
    oracle.assert_same(run.model, oracle.one_process(program, 4, 6, accumulate), ROUNDING)
    assert run.summary["updates"] == 6
    assert run.summary["applied"] == 24


@pytest.mark.parametrize("team", ["replicas=3", "replicas=1 stages=2", "replicas=2 shards=2"])
def test_lbfgs_makes_torchs_steps(local: Local, team: str) -> None:
    model, evaluations = iterated("deep")
    run = local(portioned("deep", 5), f"{team} aggregation=sandblaster:portions=5", steps=evaluations)
    oracle.assert_same(run.model, model, ROUNDING)
    assert run.summary["updates"] == evaluations


@pytest.mark.parametrize("team", ["replicas=3", "replicas=2 stages=2", "replicas=2 shards=2"])
def test_it_does_over_synchronous_replicas(local: Local, team: str) -> None:
    model, evaluations = iterated("mlp")
    run = local(portioned("mlp", int(team[9])), team, steps=evaluations)
    oracle.assert_same(run.model, model, ROUNDING)


@pytest.mark.parametrize("on_death", ["continue", "replace"])
@pytest.mark.parametrize("loop", [dying, dying_within])
def test_a_death_in_the_middle_of_a_batch_changes_no_bit(
    local: Local, tmp_path: Path, loop: Any, on_death: str
) -> None:
    program, strategy = portioned("mlp", 13), "replicas=3 aggregation=sandblaster:portions=13"
    whole = local(program, strategy, steps=8)
    at = {(2, 3): "a", (1, 9): "b"}
    run = local(program, strategy, steps=8, on_death=on_death, loop=functools.partial(loop, folder=tmp_path, at=at))
    assert same(whole, run)
    assert sorted(each.replica for each in run.left) == [1, 2]


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("steps", [3, 7, 10])
def test_it_goes_on_in_the_middle_of_a_search(local: Local, tmp_path: Path, steps: int, replicas: int) -> None:
    """With as many replicas as there are then, in worker processes or in virtual time."""
    program, strategy = portioned("stiff", 6), "replicas=2 aggregation=sandblaster:portions=6"
    whole = local(program, strategy, steps=15)
    local(program, strategy, steps=steps, checkpoint=tmp_path / "ckpt")
    strategy = f"replicas={replicas} aggregation=sandblaster:portions=6"
    settings: dict[str, Any] = {"steps": 15, "resume": tmp_path / "ckpt"}
    run = local(program, strategy, **settings)
    assert same(whole, run)
    assert run.summary["updates"] == 15
    virtual = train(program, strategy, engine="virtual", progress=False, **settings)
    oracle.assert_same(virtual.model, whole.state, ROUNDING)


def test_what_is_saved_within_a_batch_goes_on_with_all_of_it(local: Local, tmp_path: Path) -> None:
    program, strategy = portioned("mlp", 13), "replicas=2 aggregation=sandblaster:portions=13"
    whole = local(program, strategy, steps=9)
    local(program, strategy, steps=9, checkpoint=tmp_path, checkpoint_every=1e-6, keep=100)
    for saved in sorted(tmp_path.glob("step-*")):
        assert same(whole, local(program, strategy, steps=9, resume=saved))


def test_replicas_come_and_go(local: Local) -> None:
    program = portioned("mlp", 13)
    whole = local(program, "replicas=1 aggregation=sandblaster:portions=13", steps=6)
    assert same(whole, local(program, "replicas=1..3 aggregation=sandblaster:portions=13", steps=6))
