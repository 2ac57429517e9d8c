"""Several servers with a standby each: any dies at any moment, and the run has the bits of one without a death."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from paceline import Run, WorkerError
from paceline.checkpoint.reader import newest
from paceline.engine.base import Watcher
from paceline.engine.ray.engine import RayEngine
from paceline.engine.server.messages import Member
from tests import oracle
from tests.engine import programs
from tests.engine.local import test_on_death
from tests.engine.ray import several_moments
from tests.engine.ray.several_moments import Dying
from tests.engine.ray.test_ray_standby import LONG_S, At, kill

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 8

PROGRAM: dict[str, Any] = {
    "optimizer": functools.partial(Adam, lr=0.01),
    "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5),
    "clip_norm": 0.05,
}
"""Each update adds up norms over all servers."""

SERVERS = "replicas=2 servers=2"

DEATHS = [
    *((Member(0), moment) for moment in several_moments.FIRSTS),
    (Member(0), "waits for numbers"),
    *((Member(1), moment) for moment in ("adds up", "is sent a slice", "has taken an event", "saves")),
    (Member(0, standby=True), "is sent an event"),
    (Member(1, standby=True), "is sent a slice"),
]
"""Others of the moments went as well; these are those that differ."""


@pytest.mark.parametrize(("member", "moment"), DEATHS, ids=lambda value: str(getattr(value, "label", value)))
def test_one_dies_at_a_moment(on_ray: OnRay, tmp_path: Path, member: Member, moment: str) -> None:
    settings: dict[str, Any] = {"steps": STEPS, "evaluate_every": 2, "timeout_s": LONG_S}
    whole = on_ray(programs.program(**PROGRAM), SERVERS, **settings)
    number = 1 if moment == "saves" else 5
    model = Dying(programs.mlp, member, moment, number, tmp_path / "died")
    saved: dict[str, Any] = {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "3 steps"}
    run = on_ray(programs.program(model=model, **PROGRAM), f"{SERVERS} standby=1", **settings, **saved)
    assert (tmp_path / "died").exists()
    oracle.assert_same(run.model, whole.state, 0)
    for key in ("updates", "gradients", "applied", "discarded", "staleness"):
        assert run.summary[key] == whole.summary[key], key
    assert [record.updates for record in run.history] == [*range(0, STEPS + 1, 2)]
    lost = "the server died" if member == Member(0) else f"{member.label} {'was lost' if member.standby else 'died'}"
    assert lost in run.summary["notes"]["server"]
    assert run.left == []
    checkpoint, damaged = newest(tmp_path / "ckpt")
    assert checkpoint is not None
    assert (checkpoint.manifest.head["version"], damaged) == (STEPS, [])


def test_all_but_one_of_each_slice(on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path) -> None:
    """One after the other; what is left of the three servers and their standbys trains to the end."""
    whole = on_ray(programs.program(**PROGRAM), "replicas=2 servers=3", steps=STEPS)
    deaths = iter(["server", "others 1", "other_standbys 0"])
    act = At(engine, tmp_path, [1, 3, 5], lambda: kill_one(engine, next(deaths)), guarded=False)
    watched.append(act)
    strategy = "replicas=2 servers=3 standby=1"
    run = on_ray(programs.program(**PROGRAM), strategy, steps=STEPS, loop=act.loop, timeout_s=LONG_S)
    assert next(deaths, None) is None
    oracle.assert_same(run.model, whole.state, 0)


def kill_one(engine: RayEngine, which: str) -> None:
    name, *index = which.split()
    pool: Any = engine._pool
    if index:
        pool.chosen = getattr(pool, name)[int(index[0])]
    kill(engine, "chosen" if index else name)


def test_a_slice_that_nobody_has_any_more_ends_the_run(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path
) -> None:
    def both() -> None:
        kill_one(engine, "other_standbys 0")
        kill_one(engine, "others 0")

    act = At(engine, tmp_path, [2], both)
    watched.append(act)
    with pytest.raises(WorkerError, match=r"server 1 died, and its slice of A with it"):
        on_ray(programs.program(), f"{SERVERS} standby=1", steps=STEPS, loop=act.loop, timeout_s=LONG_S)


def test_replicas_are_replaced_after_a_death(on_ray: OnRay, tmp_path: Path) -> None:
    """What a replaced one is told of servers is what there is now."""
    whole = on_ray(programs.program(model=programs.dropout), "replicas=3", steps=STEPS)
    loop = functools.partial(test_on_death.dying, folder=tmp_path, at={(1, 5): "a", (2, 7): "b"})
    model = Dying(programs.dropout, Member(1), "has a slice", 6, tmp_path / "died")
    strategy = "replicas=3 servers=2 standby=1"
    run = on_ray(programs.program(model=model), strategy, steps=STEPS, on_death="replace", loop=loop)
    assert (tmp_path / "died").exists()
    oracle.assert_same(run.model, whole.state, 1e-12)
    assert sorted(exit_.replica for exit_ in run.left) == [1, 2]
