"""Replicas that die are replaced, left out, or end the run; a replaced one's step is made anew with the same bits."""

import functools
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InputError, Run, WorkerError
from paceline.engine.base import Progress
from tests.engine import programs
from tests.engine.local import leaks, moments
from tests.engine.local.test_local_kills import POLICIES

Local = Callable[..., Run]

STEPS = 6


def dying(worker: Any, *, folder: Path, at: dict[tuple[int, int], str], act: Callable[[], None] = moments.die) -> None:
    """The plain loop, in which each replica and step named dies once."""
    for made, batch in enumerate(worker.batches()):
        mark = folder / at.get((worker.replica, made + 1), "")
        if mark != folder and not mark.exists():
            mark.touch()
            act()
        worker.step(batch)


def dying_within(worker: Any, *, folder: Path, at: dict[tuple[int, int], str]) -> None:
    """The same in the middle of a backward pass."""
    for made, batch in enumerate(worker.batches()):
        mark = folder / at.get((worker.replica, made + 1), "")
        if mark != folder and not mark.exists():
            mark.touch()
            moments.in_the_backward_pass(worker)
        worker.step(batch)


def torn() -> None:
    raise MemoryError("out of it")


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


@pytest.mark.parametrize(
    ("strategy", "model", "loop"),
    [
        ("replicas=3", programs.dropout, dying),
        ("replicas=3", programs.dropout, dying_within),
        ("replicas=2 accumulate=2", programs.batchnorm, dying),
        ("replicas=2 accumulate=2", programs.batchnorm, dying_within),
        ("replicas=2 shards=2", programs.mlp, dying),
        ("replicas=2 stages=2", programs.mlp, dying),
        ("replicas=1", programs.mlp, dying),
        ("replicas=2 aggregation=local-steps:period=2", programs.dropout, dying),
        ("replicas=2 aggregation=local-steps:period=2", programs.dropout, dying_within),
        ("replicas=2 shards=2 aggregation=local-steps:period=2", programs.mlp, dying),
        ("replicas=2 stages=2 aggregation=local-steps:period=2", programs.mlp, dying),
    ],
)
def test_a_replaced_replica_changes_no_bit(local: Local, tmp_path: Path, strategy: str, model: Any, loop: Any) -> None:
    data = programs.data(samples=48)  # no batch has one sample alone
    program = programs.program(model=model, train=data, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    last = int(strategy[9]) - 1
    whole = local(program, strategy, steps=STEPS, on_death="replace")
    # The second death is that of the replica that has taken the place of the first, at its second step.
    at = {(last, 3): "a", (last, 2): "b"}
    run = local(
        program, strategy, steps=STEPS, on_death="replace", loop=functools.partial(loop, folder=tmp_path, at=at)
    )
    assert same(whole, run)
    assert [exit_.replica for exit_ in run.left] == [last, last]
    assert all("killed by SIGKILL" in exit_.reason and "; replaced" in exit_.reason for exit_ in run.left)
    for key in ("updates", "gradients", "discarded", "samples"):
        assert run.summary.get(key) == whole.summary.get(key), key


@pytest.mark.parametrize("policy", POLICIES)
def test_under_any_policy_each_sample_is_used_as_often_as_without_a_death(
    local: Local, tmp_path: Path, policy: str
) -> None:
    at = {(1, 2): "a", (0, 3): "b"}
    loop = functools.partial(dying, folder=tmp_path, at=at)
    run = local(programs.program(), f"replicas=3 aggregation={policy}", steps=STEPS, on_death="replace", loop=loop)
    assert sorted(exit_.replica for exit_ in run.left) == [0, 1]
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    if "cancel" not in policy and "backups" not in policy:  # where attempts are cancelled there are fewer Δs
        each = 2 if policy.startswith(("local-steps", "elastic", "decoupled")) else 1  # micro-steps of a Δ
        assert run.summary["gradients"] * each == 3 * STEPS


def test_samples_are_applied_exactly_once(local: Local, tmp_path: Path) -> None:
    """Trained weights count how often each sample was applied: three epochs, two deaths."""
    at = {(1, 2): "a", (2, 5): "b", (1, 3): "c"}
    loop = functools.partial(dying, folder=tmp_path, at=at)
    strategy = "replicas=3 aggregation=synchronous:combine=sum"
    run = local(moments.counting(), strategy, epochs=3, on_death="replace", loop=loop)
    assert run.state["weight"].tolist() == [3.0] * moments.SAMPLES
    assert len(run.left) == 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["replicas=4", "replicas=2 stages=2"])
def test_kills_from_outside_at_any_time(local: Local, tmp_path: Path, strategy: str, seed: int) -> None:
    whole = local(programs.program(), strategy, steps=40, on_death="replace")
    before, draw, killed = leaks.files(), random.Random(seed), list[int]()
    at = set(draw.sample(range(5, 35), 3))

    def watch(progress: Progress) -> None:
        """Kill a worker once so many updates were made."""
        if progress.phase == "training" and at and progress.updates >= min(at):
            at.remove(min(at))
            rows = json.loads((tmp_path / "run" / "workers.json").read_text())
            killed.append(draw.choice([row["pid"] for row in rows if row["role"] == "replica"]))
            os.kill(killed[-1], signal.SIGKILL)

    def slowly(worker: Any) -> None:
        for batch in worker.batches():
            threading.Event().wait(0.01)
            worker.step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.engine.loop.TICK_S", 0.0)
        patch.setattr("paceline.api.train.watcher", lambda *_: nullcontext(watch))
        run = local(programs.program(), strategy, steps=40, on_death="replace", loop=slowly, out=tmp_path / "run")
    assert same(whole, run)
    assert len(killed) == len(run.left) == 3
    assert not leaks.since(before)


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 shards=2"])
def test_an_exception_is_a_death_where_asked(local: Local, tmp_path: Path, strategy: str) -> None:
    loop = functools.partial(dying, folder=tmp_path, at={(1, 3): "a"}, act=torn)
    whole = local(programs.program(), strategy, steps=STEPS, on_death="replace")
    run = local(programs.program(), strategy, steps=STEPS, on_death="replace", loop=loop)
    assert same(whole, run)
    assert "MemoryError: out of it" in run.left[0].reason
    (tmp_path / "a").unlink()
    run = local(programs.program(), strategy, steps=STEPS, on_death="continue", loop=loop)
    assert [exit_.replica for exit_ in run.left] == [1]
    (tmp_path / "a").unlink()
    for on_death in (None, "stop"):
        with pytest.raises(WorkerError, match="MemoryError: out of it"):
            local(programs.program(), strategy, steps=STEPS, on_death=on_death, loop=loop)
        (tmp_path / "a").unlink()


def always(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 1 and made == 0:
            torn()
        worker.step(batch)


def test_one_that_dies_at_the_same_step_again_and_again_ends_the_run(local: Local) -> None:
    with pytest.raises(WorkerError, match=r"replica 1 died 4 times at its step 1: raised MemoryError: out of it"):
        local(programs.program(), "replicas=2", steps=STEPS, on_death="replace", loop=always)


def test_a_death_ends_the_run_where_asked(local: Local, tmp_path: Path) -> None:
    loop = functools.partial(dying, folder=tmp_path, at={(1, 3): "a"})
    with pytest.raises(WorkerError, match=r"replica 1 died at its step 3: killed by SIGKILL; write on_death='replace'"):
        local(programs.program(), "replicas=3", steps=STEPS, on_death="stop", loop=loop)


def test_replicas_of_several_workers_can_be_left_out_of_one_update(local: Local, tmp_path: Path) -> None:
    loop = functools.partial(dying, folder=tmp_path, at={(1, 3): "a"})
    run = local(programs.program(), "replicas=2 shards=2", steps=STEPS, on_death="continue", loop=loop)
    assert [exit_.replica for exit_ in run.left] == [1]
    assert (run.summary["updates"], run.summary["gradients"]) == (STEPS, STEPS + 2)


@pytest.mark.parametrize(
    ("settings", "strategy", "said"),
    [
        ({"on_death": "replce"}, "replicas=2", "did you mean 'replace'"),
        ({"on_death": "replace", "engine": "virtual"}, "replicas=2", "has no replicas that could die"),
        ({"on_death": "continue"}, "stages=2 schedule=pipedream micro_batches=4", "write schedule=1f1b"),
        ({"on_death": "replace"}, "replicas=2 shards=2 shard_optimizer=true", "leave shard_optimizer out"),
    ],
)
def test_what_can_not_be_survived_is_refused(settings: dict[str, Any], strategy: str, said: str) -> None:
    from paceline.api.train import check

    with pytest.raises(InputError, match=said):
        check(programs.program(), strategy, steps=1, **settings)
