"""Deaths, errors and Ctrl-C on actors: the others go on, or the caller is told; no Δ is lost or used twice."""

import functools
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from paceline import NonFiniteError, Run, WorkerError
from paceline.core.errors import WaitTimeoutError
from paceline.engine.base import Progress, Watcher
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine import programs
from tests.engine.local import commands, moments, test_local_kills, test_on_death

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 6
ENDLESS = 10**6
MAIN = os.getpid()


def once(when: Callable[[Progress], bool], act: Callable[[], None]) -> Watcher:
    """Does something the first time that a run stands so."""
    done: list[Progress] = []

    def watch(progress: Progress) -> None:
        if not done and when(progress):
            done.append(progress)
            act()

    return watch


def training(progress: Progress) -> bool:
    return progress.phase == "training" and progress.updates > 0


# --------------------------------------------------------------------------------------------------------------- deaths


def test_the_others_go_on_without_a_replica_that_dies(on_ray: OnRay) -> None:
    loop = functools.partial(moments.loop, replica=1, step=3, prepare=moments.in_the_backward_pass)
    run = on_ray(programs.program(), "replicas=3", steps=STEPS, loop=loop)
    assert [d.replica for d in run.left] == [1]
    assert "its process ended" in run.left[0].reason
    assert 0 < run.left[0].time_s <= run.summary["seconds"]
    oracle.assert_same(run.model, test_local_kills.without_one(STEPS, 1, after=2), 1e-12)  # sums in another order
    assert run.summary["gradients"] == 3 * STEPS - 4


def test_another_takes_its_place_and_makes_its_step_anew(on_ray: OnRay, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if (worker.replica, k) == (1, 2) and not died.exists():
                died.touch()
                moments.die()
            worker.step(batch)

    assert_nothing_was_lost(on_ray, loop)


def test_one_that_waits_takes_its_place(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path
) -> None:
    spare: list[int] = []

    def wait_for_spare() -> None:
        assert engine._pool is not None
        spare.append(ray.get(engine._pool.spare.place.remote()).pid)
        (tmp_path / "there").touch()

    def loop(worker: Any) -> None:
        (tmp_path / f"{worker.replica} {os.getpid()}").touch()
        for k, batch in enumerate(worker.batches()):
            if (worker.replica, k) == (1, 2) and not (tmp_path / "died").exists():
                commands.eventually((tmp_path / "there").exists)
                (tmp_path / "died").touch()
                moments.die()
            worker.step(batch)

    watched.append(once(lambda progress: progress.phase == "training", wait_for_spare))
    assert_nothing_was_lost(on_ray, loop)
    assert len([*tmp_path.glob("1 *")]) == 2
    assert (tmp_path / f"1 {spare[0]}").exists()


def test_another_goes_on_after_a_delay_in_which_one_was_killed(
    on_ray: OnRay, watched: list[Watcher], tmp_path: Path
) -> None:
    """A thousand seconds, of which it is told: nobody misses it, and nobody waits for its end."""
    died = tmp_path / "died"

    def loop(worker: Any) -> None:
        pause = worker._client.pause

        def last(seconds: float) -> None:
            (tmp_path / "partial").write_text(str(os.getpid()))
            (tmp_path / "partial").rename(died)
            pause(seconds)

        for k, batch in enumerate(worker.batches()):
            here = (worker.replica, k) == (1, 2) and not died.exists()
            worker._client.pause = last if here else lambda seconds: None
            worker.step(batch)

    watched.append(once(lambda _: died.exists(), lambda: os.kill(int(died.read_text()), signal.SIGKILL)))
    assert_nothing_was_lost(on_ray, loop, delay="fraction=1 constant:value=1000", timeout_s=30)


def assert_nothing_was_lost(on_ray: OnRay, loop: Callable[[Any], None], servers: str = "", **settings: Any) -> None:
    """Replica 1 dies at its third step; trained weights count how often each sample was applied."""
    policy = "stale-synchronous:bound=0,combine=sum"  # nobody runs ahead, so the others are there when it is back
    strategy = f"replicas=3 aggregation={policy} {servers}"
    run = on_ray(moments.counting(), strategy, steps=STEPS, loop=loop, on_death="replace", **settings)
    assert [d.replica for d in run.left] == [1]
    assert run.left[0].reason.endswith("; replaced")
    expected, data = torch.zeros(moments.SAMPLES, dtype=torch.float64), oracle.order(moments.counting(), 3)
    for replica, step in itertools.product(range(3), range(STEPS)):
        expected[torch.as_tensor(data.batch(replica, step))] += 1
    assert torch.equal(run.state["weight"], expected)
    assert run.summary["gradients"] == run.summary["applied"] == 3 * STEPS
    assert run.summary["discarded"] == run.summary["cancelled"] == 0


@pytest.mark.parametrize(
    ("strategy", "model", "dying"),
    [
        ("replicas=3", programs.dropout, test_on_death.dying_within),
        ("replicas=2 accumulate=2", programs.batchnorm, test_on_death.dying),
        ("replicas=1", programs.mlp, test_on_death.dying_within),
    ],
)
def test_a_replaced_replica_changes_no_bit(
    on_ray: OnRay, tmp_path: Path, strategy: str, model: Any, dying: Any
) -> None:
    data = programs.data(samples=48)  # no batch has one sample alone
    program = programs.program(model=model, train=data, optimizer=functools.partial(Adam, lr=0.01))
    last = int(strategy[9]) - 1
    whole = on_ray(program, strategy, steps=STEPS)
    # The second death is that of the replica that has taken the place of the first, at its second step.
    loop = functools.partial(dying, folder=tmp_path, at={(last, 3): "a", (last, 2): "b"})
    run = on_ray(program, strategy, steps=STEPS, on_death="replace", loop=loop)
    assert test_on_death.same(whole, run)
    assert [exit_.replica for exit_ in run.left] == [last, last]
    for key in ("updates", "gradients", "discarded", "samples"):
        assert run.summary.get(key) == whole.summary.get(key), key


@pytest.mark.parametrize(
    "policy", ["buffered:k=2,cancel=true", "asynchronous", "local-steps:period=3", "smooth-switch"]
)
def test_under_any_policy_each_sample_is_used_as_often(on_ray: OnRay, tmp_path: Path, policy: str) -> None:
    loop = functools.partial(test_on_death.dying, folder=tmp_path, at={(1, 2): "a", (0, 3): "b"})
    run = on_ray(programs.program(), f"replicas=3 aggregation={policy}", steps=STEPS, on_death="replace", loop=loop)
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    each = 3 if "period" in policy else 1
    assert (run.summary["gradients"] + run.summary["cancelled"]) * each == 3 * STEPS


def test_one_that_dies_at_the_same_step_again_and_again_ends_the_run(on_ray: OnRay) -> None:
    with pytest.raises(WorkerError, match=r"replica 1 died 4 times at its step 1: raised MemoryError: out of it"):
        on_ray(programs.program(), "replicas=2", steps=STEPS, on_death="replace", loop=test_on_death.always)


def test_all_of_them(on_ray: OnRay) -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
            moments.die()

    with pytest.raises(WorkerError, match=r"every replica died: . its process ended .*; . its process ended"):
        on_ray(programs.program(), "replicas=2 aggregation=asynchronous", steps=STEPS, loop=loop)


def test_with_the_server_a_is_lost(on_ray: OnRay, engine: RayEngine, watched: list[Watcher]) -> None:
    def kill() -> None:
        assert engine._pool is not None
        os.kill(engine._pool.locations[engine._pool.server].pid, signal.SIGKILL)

    watched.append(once(training, kill))
    with pytest.raises(WorkerError, match="the server died, and A with it: its process ended"):
        on_ray(programs.program(), "replicas=2", steps=ENDLESS)


def test_without_the_scorer_the_server_scores(on_ray: OnRay) -> None:
    """Ten points are to be scored, and all are; the scorer dies at its first."""
    main = MAIN

    def accuracy(output: Tensor, target: Tensor) -> float:
        if os.getpid() != main and os.sched_getscheduler(0) == os.SCHED_IDLE:
            moments.die()
        return 0.5

    program = programs.program(test=programs.data(), metrics={"accuracy": accuracy})
    run = on_ray(program, "replicas=2", steps=STEPS, evaluate_every=1)
    assert [record.updates for record in run.history] == list(range(STEPS + 1))
    assert {record.test_accuracy for record in run.history} == {0.5}


# --------------------------------------------------------------------------------------------------------------- errors


class BrokenError(RuntimeError):
    """What these programs raise."""


class Broken(nn.Module):
    def __init__(self, main: int) -> None:
        super().__init__()
        self.main, self.inner = main, programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.main:
            raise BrokenError("it broke")
        return self.inner(x)


def test_a_replicas_own_traceback_reaches_the_caller(on_ray: OnRay) -> None:
    main = MAIN
    with pytest.raises(WorkerError, match=r"(?s)(replica [01]|the scorer) failed: .*BrokenError: it broke") as failure:
        on_ray(programs.program(model=lambda: Broken(main)), "replicas=2", steps=STEPS)
    assert 'raise BrokenError("it broke")' in str(failure.value)


def test_the_loops_too(on_ray: OnRay) -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            worker.step(batch)
            if worker.replica == 1 and k == 3:
                raise KeyError("no such thing")

    with pytest.raises(WorkerError, match="replica 1 failed: KeyError: 'no such thing'"):
        on_ray(programs.program(), "replicas=2", steps=ENDLESS, loop=loop)


def test_a_model_that_is_built_in_main_alone(on_ray: OnRay) -> None:
    main = MAIN

    def model() -> nn.Module:
        if os.getpid() != main:
            raise BrokenError("not here")
        return programs.mlp()

    with pytest.raises(WorkerError, match=r"(?s)failed: .*BrokenError: not here"):
        on_ray(programs.program(model=model), "replicas=2", steps=STEPS)


def infinite(output: Tensor, target: Tensor) -> Tensor:
    """Infinite for a batch whose first target is of class 0."""
    return nn.functional.cross_entropy(output, target) * (float("inf") if target[0] == 0 else 1.0)


def test_a_delta_that_is_not_finite_ends_the_run(on_ray: OnRay) -> None:
    with pytest.raises(NonFiniteError, match=r"the Δ of replica \d at its step \d is not finite"):
        on_ray(programs.program(loss=infinite), "replicas=2", steps=20)


def test_or_is_discarded_and_counted(on_ray: OnRay) -> None:
    run = on_ray(programs.program(loss=infinite), "replicas=2", steps=STEPS, on_nonfinite="skip")
    assert run.summary["nonfinite"] == run.summary["discarded"] > 0
    assert all(torch.isfinite(v).all() for v in run.state.values())


def test_who_says_nothing_is_named(on_ray: OnRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.ray.ray_run.GRACE_S", 1.0)  # it will not end by itself
    loop = functools.partial(moments.loop, replica=1, step=2, prepare=moments.hang)
    with pytest.raises(WaitTimeoutError, match="the server, replica 0 waited 2 s for replica 1 at its step 2"):
        on_ray(programs.program(), "replicas=2", steps=STEPS, loop=loop, timeout_s=2)


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def twice() -> None:
    ctrl_c()
    ctrl_c()


def test_ctrl_c_ends_training_with_what_there_is(on_ray: OnRay, watched: list[Watcher]) -> None:
    before = signal.getsignal(signal.SIGINT)
    watched.append(once(training, ctrl_c))
    run = on_ray(programs.program(), "replicas=2", steps=ENDLESS)
    assert run.summary["interrupted"]
    assert run.left == []
    assert run.history[-1].updates == run.summary["updates"] > 0
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_one_does_not_wait_for_a_step_that_never_ends(on_ray: OnRay, watched: list[Watcher]) -> None:
    loop = functools.partial(moments.loop, replica=1, step=2, prepare=moments.hang)
    watched.append(once(lambda p: p.gradients == 3, twice))
    run = on_ray(programs.program(), "replicas=2", steps=ENDLESS, loop=loop, timeout_s=1000)
    assert run.summary["interrupted"]
    assert run.summary["updates"] == 1


def test_while_it_starts(on_ray: OnRay, watched: list[Watcher]) -> None:
    watched.append(once(lambda p: p.phase == "starting", ctrl_c))
    run = on_ray(programs.program(), "replicas=2", steps=ENDLESS)
    assert run.summary["interrupted"]
    assert run.summary["updates"] == run.summary["gradients"] == 0
    assert all(torch.equal(run.state[n], v) for n, v in programs.program().build().state_dict().items())


def raising(folder: Path, worker: Any) -> None:
    """The plain loop, in which replica 1 raises once, at its third step."""
    for k, batch in enumerate(worker.batches()):
        if (worker.replica, k) == (1, 2) and not (folder / "raised").exists():
            (folder / "raised").touch()
            raise MemoryError("out of it")
        worker.step(batch)


@pytest.mark.parametrize(("on_death", "gradients"), [("replace", 2 * STEPS), ("continue", STEPS + 2)])
def test_an_exception_is_a_death_where_asked(on_ray: OnRay, tmp_path: Path, on_death: str, gradients: int) -> None:
    loop = functools.partial(raising, tmp_path)
    run = on_ray(programs.program(), "replicas=2", steps=STEPS, loop=loop, on_death=on_death)
    replaced = "; replaced" if on_death == "replace" else ""
    assert [(d.replica, d.reason) for d in run.left] == [(1, f"raised MemoryError: out of it{replaced}")]
    assert run.summary["gradients"] == gradients


def test_a_death_ends_the_run_where_asked(on_ray: OnRay) -> None:
    loop = functools.partial(moments.loop, replica=1, step=3, prepare=lambda _: moments.die())
    with pytest.raises(WorkerError, match=r"replica 1 died: its process ended .* write on_death='replace'"):
        on_ray(programs.program(), "replicas=2", steps=STEPS, loop=loop, on_death="stop")
    assert on_ray(programs.program(), "replicas=2", steps=STEPS).left == []  # the dead actor is none of the next run's
