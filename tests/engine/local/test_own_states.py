"""What replicas keep from Δ to Δ, their optimizers above all, outlives a run and comes back with it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run, train
from paceline.checkpoint.reader import newest
from paceline.engine.local import own_state
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

PROGRAM = programs.program(
    train=programs.data(samples=48), optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
)
# Its state is none of the vectors that a kernel has, and its learning rate falls.
FALLING = programs.program(
    train=programs.data(samples=48),
    optimizer=functools.partial(torch.optim.NAdam, lr=0.01),
    scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5),
)


@pytest.mark.parametrize(
    ("strategy", "program"),
    [
        ("replicas=2 aggregation=local-steps:period=2", PROGRAM),
        ("replicas=2 aggregation=local-steps:period=2,outer=nesterov", FALLING),
        ("replicas=2 shards=2 aggregation=local-steps:period=2", PROGRAM),
        ("replicas=2 stages=2 aggregation=local-steps:period=2,outer=nesterov", FALLING),
        # Of several replicas, real time decides who comes first.
        ("replicas=1 aggregation=hogwild", PROGRAM),
        ("replicas=1 aggregation=hogwild", FALLING),
    ],
)
def test_a_run_that_was_cut_ends_as_one_that_was_not(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, program: Any
) -> None:
    monkeypatch.setattr(own_state, "ANSWER_S", 60.0)
    whole = local(program, strategy, steps=16)
    local(program, strategy, steps=6, checkpoint=tmp_path, checkpoint_every="100 steps")
    for saving in ({"resume": tmp_path}, {"checkpoint": tmp_path, "resume": True}):
        run = local(program, strategy, steps=16, **saving)
        assert "new optimizers" not in run.summary["notes"]["resumed"]
        oracle.assert_same(whole.model, run.state, 0)


@pytest.mark.parametrize("program", [PROGRAM, FALLING])
@pytest.mark.parametrize("policy", ["elastic-averaging:period=2,elasticity=0.2", "local-steps:period=2"])
def test_what_replicas_go_on_with_is_what_they_had(local: Local, tmp_path: Path, policy: str, program: Any) -> None:
    """Saved once more before a step: under elastic averaging the next encounter is with a newer A, so ends differ."""
    strategy = f"replicas=3 aggregation={policy}"
    local(program, strategy, steps=6, checkpoint=tmp_path / "a")
    local(program, strategy, steps=6, resume=tmp_path / "a", checkpoint=tmp_path / "b")
    (one, _), (other, _) = newest(tmp_path / "a"), newest(tmp_path / "b")
    assert one is not None
    assert other is not None
    names = one.names("replica/")
    assert any("/optimizer/" in name for name in names)
    assert names == other.names("replica/")
    assert all(torch.equal(one.read(name), other.read(name)) for name in names)
    heads = [checkpoint.manifest.head["run"]["engine"]["replicas"] for checkpoint in (one, other)]
    assert heads[0] == heads[1]


@pytest.mark.parametrize("program", [PROGRAM, FALLING])
def test_however_a_replica_is_cut(local: Local, tmp_path: Path, program: Any) -> None:
    """Saved in one form, and once more in another one before a step."""
    policy = "aggregation=elastic-averaging:period=2,elasticity=0.2"
    local(program, f"replicas=2 shards=2 {policy}", steps=6, checkpoint=tmp_path / "a")
    local(program, f"replicas=2 stages=2 {policy}", steps=6, resume=tmp_path / "a", checkpoint=tmp_path / "b")
    local(program, f"replicas=2 {policy}", steps=6, resume=tmp_path / "b", checkpoint=tmp_path / "c")
    run = local(program, f"replicas=2 shards=2 {policy}", steps=6, resume=tmp_path / "c", checkpoint=tmp_path / "d")
    assert "new optimizers" not in run.summary["notes"]["resumed"]
    one, *others = [newest(tmp_path / folder)[0] for folder in "abcd"]
    assert one is not None
    names = sorted(one.names("replica/"))
    assert {name.split("/")[1] for name in names if "/optimizer/" in name} == {"0", "1"}
    for other in others:
        assert other is not None
        assert names == sorted(other.names("replica/"))
        assert all(torch.equal(one.read(name), other.read(name)) for name in names)


@pytest.mark.parametrize("policy", ["elastic-averaging:period=2,elasticity=0.2", "hogwild"])
def test_each_replica_has_a_state_of_its_own_in_the_checkpoint(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(own_state, "ANSWER_S", 60.0)
    strategy = f"replicas=3 aggregation={policy}"
    run = local(PROGRAM, strategy, steps=12, checkpoint=tmp_path, checkpoint_every="2 steps")
    assert run.summary["notes"]["checkpoint_failures"] == 0
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    prefixes = {name.partition("optimizer/")[0] for name in checkpoint.names("replica/") if "optimizer/" in name}
    assert prefixes == {f"replica/{replica}/" for replica in range(3)}
    again = local(PROGRAM, f"replicas=4 aggregation={policy}", steps=20, checkpoint=tmp_path, resume=True)
    assert "with new optimizers in replicas 3" in again.summary["notes"]["resumed"]


def test_they_move_between_engines(local: Local, tmp_path: Path) -> None:
    """Local SGD in lockstep is the same on both."""
    strategy = "replicas=2 aggregation=local-steps:period=2"
    whole = local(PROGRAM, strategy, steps=16)
    local(PROGRAM, strategy, steps=6, checkpoint=tmp_path)
    virtual = train(PROGRAM, strategy, engine="virtual", steps=10, checkpoint=tmp_path, resume=True, progress=False)
    run = local(PROGRAM, strategy, steps=16, checkpoint=tmp_path, resume=True)
    for each in (virtual, run):
        assert "new optimizers" not in each.summary["notes"]["resumed"]
    for name, value in whole.state.items():
        # The same sums; virtual time computes the gradients of several replicas at once.
        torch.testing.assert_close(run.state[name], value, rtol=1e-12, atol=1e-14)
