"""A hang is a failure, unless the run can end without the one that hangs."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline import PacelineError, Run, Strategy, WaitTimeoutError
from paceline.aggregation.asynchronous import Asynchronous
from paceline.aggregation.base import Arrival, Decision
from paceline.clock.times import Delay
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.fault_injection import EventScript
from tests.engine import programs
from tests.engine.local import moments

Local = Callable[..., Run]

TIMEOUT_S = 2.0
"""Also the bound on start-up, so not less."""


def test_a_stopped_worker_is_named_with_those_who_wait_for_it(local: Local) -> None:
    script = EventScript().stop(replica=1, step=3)
    with pytest.raises(
        WaitTimeoutError,
        match=r"main, replica 0, replica 2 waited 2 s for replica 1 at its step 3, and received nothing; .*timeout_s=",
    ):
        local(programs.program(), "replicas=3", steps=10**6, timeout_s=TIMEOUT_S, script=script)


def test_one_that_hangs_in_its_own_code_too(local: Local) -> None:
    loop = functools.partial(moments.loop, replica=0, step=2, prepare=moments.hang)
    with pytest.raises(WaitTimeoutError, match="main, replica 1 waited 2 s for replica 0 at its step 2"):
        local(programs.program(), "replicas=2", steps=10**6, timeout_s=TIMEOUT_S, loop=loop)


def test_others_train_on_until_the_time_is_up(local: Local) -> None:
    """Then it is killed and named; what the others did is there."""
    run = local(
        programs.program(),
        "replicas=3 aggregation=asynchronous",
        seconds=1,
        timeout_s=TIMEOUT_S,
        script=EventScript().stop(replica=1, step=3),
    )
    assert [(d.replica, d.reason) for d in run.left] == [(1, "did not end within 2 s; killed")]
    assert run.summary["seconds"] == run.history[-1].time_s == 1
    assert run.summary["steps"] > 3


def test_others_make_all_their_steps_first(local: Local) -> None:
    script = EventScript().stop(replica=1, step=3)
    with pytest.raises(WaitTimeoutError, match="main waited 2 s for replica 1 at its step 3"):
        local(programs.program(), "replicas=3 aggregation=asynchronous", steps=9, timeout_s=TIMEOUT_S, script=script)


def test_building_the_model_has_the_same_bound(local: Local) -> None:
    program = programs.program(model=functools.partial(moments.slow_to_build, moments.here()))
    with pytest.raises(WaitTimeoutError, match=r"main waited 0.5 s for replicas \[0, 1\] to build their model"):
        local(program, "replicas=2", steps=3, timeout_s=0.5)


def test_a_delay_that_was_asked_for_is_no_hang(local: Local) -> None:
    """It is longer than the timeout, and everybody waits for it."""
    delay = Delay.parse("fraction=0.5 constant:value=2.5")
    run = local(programs.program(), "replicas=2", steps=1, timeout_s=TIMEOUT_S, delay=delay)
    assert run.left == []
    assert run.summary["updates"] == 1


def test_a_main_process_that_was_suspended_blames_nobody(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z and fg: replicas have long reported, and main was not there to hear it."""
    plain, suspended = Coordinator.arrived, threading.Event()

    def arrived(self: Coordinator, arrival: Arrival) -> None:
        plain(self, arrival)
        if arrival.clock == 2:
            suspended.wait(1.2 * TIMEOUT_S)
            suspended.set()

    monkeypatch.setattr(Coordinator, "arrived", arrived)
    run = local(programs.program(), "replicas=2 aggregation=asynchronous", steps=5, timeout_s=TIMEOUT_S)
    assert run.summary["gradients"] == 10
    assert suspended.is_set()


def test_a_scorer_that_says_nothing_is_replaced(local: Local) -> None:
    metric = functools.partial(moments.hanging_metric, moments.here())
    program = programs.program(test=programs.data(), metrics={"accuracy": metric})
    run = local(program, "replicas=2", steps=3, timeout_s=TIMEOUT_S)
    assert {record.test_accuracy for record in run.history} == {0.5}
    assert run.history[-1].updates == 3


class Forgetful(Asynchronous):
    """Applies a Δ and forgets to release its replica."""

    def arrived(self, state: Any, arrival: Arrival) -> tuple[Any, Decision]:
        state, decision = super().arrived(state, arrival)
        return state, decision[:1]


def test_a_policy_that_lets_nobody_go_on_is_told_at_once(local: Local) -> None:
    with pytest.raises(PacelineError, match=r"lets no replica go on: replicas \[0, 1\] all wait"):
        local(programs.program(), Strategy(replicas=2, aggregation=Forgetful()), steps=3, timeout_s=1000)
