"""Policies with a timer in processes: main wakes at deadlines, and a late replica holds nobody up. Nothing is timed."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import Run, Strategy
from paceline.core.types import Seconds
from paceline.engine.coordinator import Coordinator
from paceline.engine.loop import RunLoop
from tests.engine import programs, stragglers
from tests.engine.timed_policies import EverySecond

Local = Callable[..., Run]

PROGRAM = programs.program(train=programs.data(samples=48))  # no Δ without a sample, which alone would be discarded


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Seconds, Seconds]]:
    """How long main was to wait, and how long it was until the deadline."""
    seen, tick = list[tuple[Seconds, Seconds]](), RunLoop.tick

    def noted(loop: RunLoop, now: Seconds) -> Seconds | None:
        wait_s = tick(loop, now)
        if wait_s is not None:
            seen.append((wait_s, loop.coordinator.deadline - now))
        return wait_s

    monkeypatch.setattr(RunLoop, "tick", noted)
    return seen


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Seconds, Seconds]]:
    """When the policy was called, and its deadline."""
    seen, tick = list[tuple[Seconds, Seconds]](), Coordinator.tick

    def noted(coordinator: Coordinator, now: Seconds) -> bool:
        deadline = coordinator.deadline
        if tick(coordinator, now):
            seen.append((now, deadline))
            return True
        return False

    monkeypatch.setattr(Coordinator, "tick", noted)
    return seen


@pytest.mark.parametrize("form", ["", "stages=2"])
def test_main_wakes_at_deadlines(
    local: Local, waits: list[tuple[Seconds, Seconds]], ticks: list[tuple[Seconds, Seconds]], form: str
) -> None:
    """All wait for ticks alone."""
    strategy = dataclasses.replace(Strategy.parse(f"replicas=2 {form}".strip()), aggregation=EverySecond(0.01))
    run = local(PROGRAM, strategy, steps=6)
    assert run.summary["applied"] == run.summary["gradients"] == 12
    assert len(ticks) == run.summary["updates"] >= 6
    assert all(now >= deadline for now, deadline in ticks)
    assert all(wait_s <= max(0.0, left_s) for wait_s, left_s in waits)
    assert all(wait_s > 0 for wait_s, left_s in waits if left_s > 0), "main does not turn while it waits"


@pytest.mark.parametrize("options", ["quorum=2,grace=0", "quorum=0.5,grace=0.5,hold=true"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_late_replica_holds_nobody_up(
    local: Local, ticks: list[tuple[Seconds, Seconds]], tmp_path: Path, options: str, dies: bool
) -> None:
    """Replica 2 begins once replica 0 is at its sixth Δ, for which its fourth must have been merged."""
    loop = functools.partial(stragglers.late, late=2, until=10, folder=tmp_path, dies=dies)
    strategy = f"replicas=3 aggregation=decoupled:period=2,{options}"
    run = local(PROGRAM, strategy, steps=16, on_death="continue", loop=loop)
    assert len(ticks) >= 4
    assert [exit_.replica for exit_ in run.left] == [2] * dies
    assert run.summary["applied"] == run.summary["gradients"]
    assert run.summary["discarded"] == 0


def test_a_round_is_open_when_the_run_is_cut(local: Local, tmp_path: Path) -> None:
    """All is merged at the end of a budget in steps, and replicas that go on begin with that A."""
    strategy = "replicas=3 aggregation=decoupled:period=2,quorum=all"
    local(PROGRAM, strategy, steps=6, checkpoint=tmp_path)
    run = local(PROGRAM, strategy, steps=12, checkpoint=tmp_path, resume=True)
    assert run.summary["applied"] == run.summary["gradients"] == 18
    assert "new optimizers" not in run.summary["notes"]["resumed"]
