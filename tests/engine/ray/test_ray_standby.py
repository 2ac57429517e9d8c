"""A server that is killed at any moment: its standby takes over, with the bits and counts of a run without a death."""

import functools
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from paceline import InputError, Run, Strategy, WorkerError
from paceline.api.train import check
from paceline.checkpoint.reader import newest
from paceline.engine.base import Progress, Watcher
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine import programs
from tests.engine.local import moments, test_on_death
from tests.engine.ray import server_moments

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 12

ADAM: dict[str, Any] = {
    "optimizer": functools.partial(Adam, lr=0.01),
    "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5),
}


LONG_S = 300.0
"""Within it a busy host starts another standby."""


def wait_for(path: Path) -> None:
    never = threading.Event()
    for _ in range(int(LONG_S / 0.02)):
        if path.exists():
            return
        never.wait(0.02)
    raise AssertionError(f"{path} is not there")


def waiting(worker: Any, *, folder: Path, at: list[int]) -> None:
    """The plain loop, in which replica 0 waits before each of these steps until main has done what it does then."""
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 0 and made in at:
            (folder / f"at-{made}").touch()
            wait_for(folder / f"done-{made}")
        worker.step(batch)


class At:
    """Main does something before some steps, once the server has a standby, unless that does not matter."""

    def __init__(
        self, engine: RayEngine, folder: Path, at: list[int], act: Callable[[], None], *, guarded: bool = True
    ) -> None:
        self.engine, self.folder, self.left, self.act, self.guarded = engine, folder, sorted(at), act, guarded
        self.loop = functools.partial(waiting, folder=folder, at=at)

    def __call__(self, progress: Progress) -> None:
        pool = self.engine._pool
        guarded = not self.guarded or (pool is not None and pool.standby is not None)
        if self.left and guarded and (self.folder / f"at-{self.left[0]}").exists():
            step = self.left.pop(0)
            self.act()
            (self.folder / f"done-{step}").touch()


def kill(engine: RayEngine, actor: str) -> None:
    assert engine._pool is not None
    os.kill(engine._pool.locations[getattr(engine._pool, actor)].pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", server_moments.MOMENTS)
@pytest.mark.parametrize("number", [1, 5, 12])
def test_it_may_die_between_any_two_messages(on_ray: OnRay, tmp_path: Path, moment: str, number: int) -> None:
    whole = on_ray(programs.program(**ADAM), "replicas=2", steps=STEPS)
    model = functools.partial(server_moments.model, programs.mlp, moment, number, tmp_path / "died")
    run = on_ray(programs.program(model=model, **ADAM), "replicas=2 standby=1", steps=STEPS)
    assert (tmp_path / "died").exists()
    assert test_on_death.same(whole, run)
    for key in ("updates", "gradients", "applied", "discarded", "staleness"):
        assert run.summary[key] == whole.summary[key], key
    assert "its standby took over at update" in run.summary["notes"]["server"]
    assert run.left == []


@pytest.mark.parametrize("seed", [0])
def test_again_and_again(on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path, seed: int) -> None:
    """Each time that there is a new standby; now and then it is the standby that dies, or a replica."""
    whole = on_ray(programs.program(**ADAM), "replicas=3", steps=STEPS)
    draw = random.Random(seed)
    at, deaths = draw.sample(range(1, STEPS), 4), ["server", "standby", "server", draw.choice(["server", "standby"])]
    act = At(engine, tmp_path, at, lambda: kill(engine, deaths.pop(0)))
    watched.append(act)
    settings: dict[str, Any] = {
        "evaluate_every": 3,
        "checkpoint": tmp_path / "ckpt",
        "checkpoint_every": "2 steps",
        "timeout_s": LONG_S,
    }
    run = on_ray(programs.program(**ADAM), "replicas=3 standby=1", steps=STEPS, loop=act.loop, **settings)
    assert deaths == act.left == []
    assert test_on_death.same(whole, run)
    assert run.summary["gradients"] == whole.summary["gradients"]
    assert [record.updates for record in run.history] == list(range(0, STEPS + 1, 3))
    checkpoint, damaged = newest(tmp_path / "ckpt")
    assert checkpoint is not None
    assert (checkpoint.manifest.head["version"], damaged) == (STEPS, [])
    saved = checkpoint.read(next(iter(run.state)))
    assert torch.equal(saved, run.state[next(iter(run.state))])


def audited(worker: Any, *, folder: Path, at: list[int]) -> None:
    """The plain loop, whose replicas write down each Δ of theirs that was acknowledged, by the grant that followed."""
    with (folder / f"acknowledged-{worker.replica}").open("a", encoding="utf-8") as file:
        for made, batch in enumerate(worker.batches()):
            print(made, file=file, flush=True)
            if worker.replica == 0 and made in at:
                (folder / f"at-{made}").touch()
                wait_for(folder / f"done-{made}")
            worker.step(batch)


@pytest.mark.parametrize("policy", ["stale-synchronous:bound=2,combine=sum", "synchronous:combine=sum"])
def test_no_acknowledged_update_is_lost(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path, policy: str
) -> None:
    """Trained weights count how often each sample was applied."""
    at = [3, 8]
    act = At(engine, tmp_path, at, lambda: kill(engine, "server"))
    watched.append(act)
    loop = functools.partial(audited, folder=tmp_path, at=at)
    run = on_ray(
        moments.counting(), f"replicas=3 aggregation={policy} standby=1", steps=STEPS, loop=loop, timeout_s=LONG_S
    )
    assert act.left == []
    expected, data = torch.zeros(moments.SAMPLES, dtype=torch.float64), oracle.order(moments.counting(), 3)
    for replica, step in itertools.product(range(3), range(STEPS)):
        expected[torch.as_tensor(data.batch(replica, step))] += 1
    assert torch.equal(run.state["weight"], expected)
    acknowledged = sum(len((tmp_path / f"acknowledged-{r}").read_text().split()) - 1 for r in range(3))
    assert run.summary["applied"] == run.summary["gradients"] == 3 * STEPS >= acknowledged


def test_large_deltas_are_read_from_the_object_store(on_ray: OnRay, tmp_path: Path) -> None:
    program = functools.partial(programs.program, optimizer=functools.partial(Adam, lr=0.01))
    whole = on_ray(program(model=large), "replicas=2", steps=4)
    mark = tmp_path / "died"
    model = functools.partial(server_moments.model, large, "acknowledged", 5, mark)
    run = on_ray(program(model=model), "replicas=2 standby=1", steps=4)
    assert mark.exists()
    assert test_on_death.same(whole, run)


def large() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 3)).double()


def test_two_deaths_in_a_row_end_the_run(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path
) -> None:
    def both() -> None:
        kill(engine, "standby")
        kill(engine, "server")

    act = At(engine, tmp_path, [2], both)
    watched.append(act)
    with pytest.raises(WorkerError, match=r"the server died.*, and A with it"):
        on_ray(programs.program(), "replicas=2 standby=1", steps=STEPS, loop=act.loop, timeout_s=LONG_S)


def test_while_replicas_are_replaced(on_ray: OnRay, tmp_path: Path) -> None:
    whole = on_ray(programs.program(model=programs.dropout), "replicas=3", steps=STEPS)
    model = functools.partial(server_moments.model, programs.dropout, "forwarded", 9, tmp_path / "died")
    loop = functools.partial(test_on_death.dying, folder=tmp_path, at={(1, 3): "a", (2, 7): "b"})
    run = on_ray(programs.program(model=model), "replicas=3 standby=1", steps=STEPS, on_death="replace", loop=loop)
    assert (tmp_path / "died").exists()
    assert test_on_death.same(whole, run)
    assert sorted(exit_.replica for exit_ in run.left) == [1, 2]


@pytest.mark.parametrize("strategy", ["replicas=2 standby=2", "replicas=2 standby=-1", "standby=true"])
def test_another_number_is_refused(strategy: str) -> None:
    with pytest.raises(InputError, match=r"write standby=[01]|standby=true"):
        Strategy.parse(strategy)


@pytest.mark.parametrize("engine", ["local", "virtual", "distributed"])
def test_other_engines_have_none(engine: str) -> None:
    with pytest.raises(InputError, match=r"standby=1 is supported by engine='ray' alone, not by .*; leave it out, or"):
        check(programs.program(), "replicas=2 standby=1", engine=engine, steps=1)


def test_it_has_a_text_form() -> None:
    assert str(Strategy(replicas=2, standby=1)) == "replicas=2 standby=1"
    assert Strategy.parse("standby=1") == Strategy(standby=1)
