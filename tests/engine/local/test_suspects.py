"""Replicas that say nothing, or are slow: named, and under ``on_death`` ended; progress alone shows that one lives."""

import ctypes
import functools
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from paceline import Run
from paceline.engine.base import Progress
from paceline.engine.replica_pace import ENOUGH, ReplicaPace
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 8


def never(_: int) -> float:
    return 0.0


def pace(replicas: int = 3, steps: int = 10) -> ReplicaPace:
    """Replicas that have made so many steps of one second, and compute since then."""
    made = ReplicaPace(replicas, suspect_after_s=5.0, timeout_s=60.0)
    for step in range(steps):
        made.handled(set(range(replicas)), float(step))
        for replica in range(replicas):
            made.arrived(replica, step + 1.0)
    made.handled(set(range(replicas)), float(steps))
    made.silent(float(steps), never)
    return made


def watched(made: ReplicaPace, until: float, since: float = 10.0) -> dict[int, float]:
    """Look often, as a run does."""
    found: dict[int, float] = {}
    for tenth in range(round((until - since) * 10) + 1):
        found = made.silent(since + tenth / 10, never)
    return found


def test_one_that_computes_longer_than_the_bound_is_silent() -> None:
    made = pace()
    made.arrived(0, 10.5)
    assert watched(made, 14.9) == {}
    assert sorted(watched(made, 15.2, since=14.9)) == [1, 2]


def test_one_whose_steps_take_long_is_not() -> None:
    made = ReplicaPace(1, suspect_after_s=5.0, timeout_s=60.0)
    made.handled({0}, 0.0)
    made.arrived(0, 4.0)
    made.handled({0}, 4.0)
    assert watched(made, 15.9, since=4.0) == {}, "less than three of its steps"
    assert list(watched(made, 16.2, since=15.9)) == [0]


def test_nor_one_that_has_made_no_step_or_has_said_that_it_pauses() -> None:
    made = pace(steps=0)
    assert watched(made, 59.0, since=0.0) == {}
    made = pace()
    assert made.silent(10.4, lambda r: 30.0) == {}
    assert made.silent(10.8, lambda r: 2.0) == {}


def test_nobody_is_to_blame_while_this_process_was_stopped() -> None:
    made = pace()
    assert made.silent(1000.0, never) == {}
    assert watched(made, 1004.5, since=1000.0) == {}


def test_a_straggler_is_named_by_its_median() -> None:
    made = ReplicaPace(3, suspect_after_s=5.0, timeout_s=60.0)
    now = 0.0
    for _ in range(ENOUGH):
        assert made.stragglers() == {}
        for replica, seconds in enumerate((1.0, 1.0, 5.0)):
            made.handled({replica}, now)
            now += seconds
            made.arrived(replica, now)
    assert made.stragglers() == {2: 5.0}


# ------------------------------------------------------------------------------------------------- in real processes


def stopping(worker: Any, *, mark: Path, act: Callable[[], None], last: int = STEPS) -> None:
    """The plain loop, in which replica 1 says nothing once, when it has made half of its steps."""
    for made, batch in enumerate(worker.batches()):
        if (worker.replica, made) == (1, last // 2) and not mark.exists():
            mark.touch()
            act()
        worker.step(batch)


def stop() -> None:
    signal.raise_signal(signal.SIGSTOP)


def hold_the_interpreter() -> None:
    """No other Python thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(1000)


@pytest.mark.parametrize("act", [stop, hold_the_interpreter])
@pytest.mark.parametrize("strategy", ["replicas=3", "replicas=2 shards=2"])
def test_one_that_is_stopped_is_replaced(local: Local, tmp_path: Path, act: Any, strategy: str) -> None:
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=act)
    settings: dict[str, Any] = {"steps": STEPS, "on_death": "replace", "suspect_after_s": 1.0}
    run = local(programs.program(), strategy, loop=loop, **settings)
    whole = local(programs.program(), strategy, **settings)
    oracle.assert_same(whole.model, run.state, 0)
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.left[0].reason.startswith("silent for ")
    assert "replica 1 silent for" in run.summary["notes"]["silent"]


def test_or_left_out(local: Local, tmp_path: Path) -> None:
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=stop)
    run = local(programs.program(), "replicas=3", steps=STEPS, loop=loop, on_death="continue", suspect_after_s=1.0)
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.summary["gradients"] == 3 * STEPS - STEPS // 2


def test_otherwise_it_is_named_and_waited_for(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The display shows its name; then it is let go on."""
    pid = tmp_path / "pid"

    def stop_and_say_so() -> None:
        pid.write_text(str(os.getpid()))
        stop()

    def wake(progress: Progress) -> None:
        if any("replica 1 silent for" in remark for remark in progress.remarks):
            os.kill(int(pid.read_text()), signal.SIGCONT)

    monkeypatch.setattr("paceline.api.train.watcher", lambda *_: nullcontext(wake))
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=stop_and_say_so)
    run = local(programs.program(), "replicas=2", steps=STEPS, loop=loop, suspect_after_s=1.0)
    assert run.left == []
    assert run.summary["gradients"] == 2 * STEPS
    assert "replica 1 silent for" in run.summary["notes"]["silent"]


def test_a_slow_one_is_named(local: Local) -> None:
    run = local(
        programs.program(), "replicas=3 aggregation=asynchronous", seconds=2, delay="fraction=0.4 constant:value=0.05"
    )
    assert "times as long for a step as the others" in run.summary["notes"]["stragglers"]
