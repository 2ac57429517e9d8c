"""Policies with a timer: when the coordinator, virtual time and the planner's simulation call it, and when never."""

from typing import Any

import pytest

from paceline import Aggregation, Decision, PacelineError, Strategy, train
from paceline.aggregation import Decoupled, LocalSteps
from paceline.clock.distributions import Constant
from paceline.engine.coordinator import Coordinator
from paceline.planner.policies import pace
from tests.engine import programs
from tests.engine.timed_policies import EverySecond, Held
from tests.engine.weightless import Weightless


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """States of the policy of a run in this process, after each tick."""
    seen, tick = list[Held](), Coordinator.tick

    def noted(coordinator: Coordinator, now: float) -> bool:
        decided = tick(coordinator, now)
        seen.append(coordinator._state)
        return decided

    monkeypatch.setattr(Coordinator, "tick", noted)
    return seen


def begun(policy: Aggregation[Any], replicas: int = 2) -> Weightless:
    run = Weightless(policy, replicas, "1")
    run.coordinator.begin()
    return run


def test_a_tick_comes_at_the_deadline_and_not_before() -> None:
    run = begun(EverySecond(2.5))
    coordinator = run.coordinator
    assert coordinator.deadline == float("inf")
    coordinator.arrived(run.events.pop())
    assert coordinator.deadline == 2.5
    assert not coordinator.tick(2.4999)
    assert run.applied == []
    assert coordinator.tick(2.5)
    assert [a.replica for a in run.applied] == [0]
    assert coordinator.computing == {0, 1}
    assert not coordinator.tick(9.0), "nothing has come since"


def test_whose_budget_is_spent_at_a_tick_leaves() -> None:
    run = Weightless(EverySecond(1.5), 3, ["1", "1", "4"])
    run.coordinator.depart(1)
    run.carry(updates=1)
    assert run.dismissed == [1]
    assert run.coordinator.present == {0, 2}


class Restless(EverySecond):
    """Is due again at once."""

    def tick(self, state: Held, time_s: float) -> tuple[Held, Decision]:
        return state._replace(due_s=time_s), ()


class Idle(EverySecond):
    """Lets nobody go on."""

    def tick(self, state: Held, time_s: float) -> tuple[Held, Decision]:
        return state._replace(due_s=time_s + 1), ()


def test_a_timer_without_end_is_an_error() -> None:
    run = begun(Restless())
    run.coordinator.arrived(run.events.pop())
    with pytest.raises(PacelineError, match=r"<Restless> was called at its deadline, 1 s, and has the next one at 1 s"):
        run.coordinator.tick(1.0)


def test_ticks_that_let_nobody_go_on_are_a_deadlock() -> None:
    run = begun(Idle())
    run.coordinator.arrived(run.events.pop())
    assert not run.coordinator.tick(1.0), "replica 1 computes"
    run.coordinator.arrived(run.events.pop())
    with pytest.raises(PacelineError, match=r"replicas \[0, 1\] all wait; its arrived\(\) or tick\(\) must Release"):
        run.coordinator.tick(2.0)


def virtual(policy: Aggregation[Any], *, replicas: int = 2, **settings: Any) -> Any:
    strategy = Strategy(replicas=replicas, aggregation=policy)
    given: dict[str, Any] = {"times": "compute=0.75", "engine": "virtual", "progress": False}
    return train(programs.program(), strategy, **given | settings)


def test_ticks_come_at_exact_times(states: list[Held]) -> None:
    """Replicas begin at 0, 1, 2 ... s, for each waits for the tick after its Δ."""
    run = virtual(EverySecond(), seconds=4.5)
    assert states[-1].ticks == (1.0, 2.0, 3.0, 4.0)
    assert states[-1].arrived == tuple(s + 0.75 for s in range(4) for _ in range(2))
    assert run.summary["updates"] == 4


def test_what_arrives_at_the_deadline_comes_before_it(states: list[Held]) -> None:
    virtual(EverySecond(), seconds=3.5, times="compute=1")
    assert states[0].ticks == (1.0,)
    assert states[0].arrived == (1.0, 1.0)
    assert [len(state.arrived) for state in states] == [2, 4, 6]


def test_a_deadline_comes_after_what_has_arrived_while_the_server_was_busy(states: list[Held]) -> None:
    """Updates take 1.5 s; of three replicas one takes 1.25 s, so its first Δ comes during the first update."""
    delay = "fraction=0.34 0.5"
    virtual(EverySecond(), replicas=3, seconds=4.5, delay=delay, times="compute=0.75 apply=1.5")
    assert states[0].arrived == (0.75, 0.75)
    assert states[0].ticks == (1.0,)
    assert states[1].arrived[2:] == (2.5,), "the server takes it when it is free"
    assert states[1].ticks == (1.0, 2.5)


def test_the_end_of_the_budget_comes_before_a_later_deadline(states: list[Held]) -> None:
    run = virtual(EverySecond(5.0), seconds=4.0)
    assert states == []
    assert run.summary["updates"] == 0
    assert run.summary["discarded"] == 2


def test_a_budget_in_steps_is_evaluated_after_ticks_too() -> None:
    run = virtual(EverySecond(), steps=4, evaluate_every=1)
    assert {(r.time_s, r.updates) for r in run.history} >= {(0.0, 0), (4.0, 4)}
    assert run.history[-1].time_s == 4.0, "the update of the last tick"


def test_local_steps_pass_the_timer_of_the_policy_under_them_on(states: list[Held]) -> None:
    virtual(LocalSteps(period=2, over=EverySecond(2.0)), seconds=4.5)
    assert states[-1].ticks == (2.0, 4.0)


def test_the_planner_simulates_timers() -> None:
    found = pace(EverySecond(), 2, Constant(0.75), arrivals=1000)
    assert found.update_s == pytest.approx(1.0)
    assert found.batches == 2.0
    assert pace(Decoupled(period=4), 4, Constant(0.75), arrivals=1000).update_s == pytest.approx(3.0)
