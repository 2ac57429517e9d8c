"""Whatever the policy, the budget, the pace and the misfortunes: each Δ meets one fate, and nobody is forgotten."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregation import Aggregation
from paceline.aggregation.base import Apply, Arrival, Decision, Release
from paceline.core.data_order import DataOrder
from paceline.core.errors import InputError, PacelineError
from paceline.engine.budget import Epochs, Steps
from paceline.replica.base import micro_steps
from tests.aggregation.policy_values import policies
from tests.engine.weightless import Weightless

COMPUTE = ["1", "exponential:mean=1", "exponential:mean=20", "pareto:scale=0.1,shape=1"]


def resolved(policy: Aggregation[Any], replicas: int) -> Aggregation[Any] | None:
    try:
        return policy.resolved(learning_rate=0.1, replicas=replicas)
    except InputError:
        return None


@given(data=st.data(), replicas=st.integers(1, 6), steps=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_each_delta_is_applied_or_discarded_once(data: st.DataObject, replicas: int, steps: int) -> None:
    drawn = policies().map(lambda p: resolved(p, replicas))
    policy = data.draw(drawn.filter(lambda p: p is not None and p.portions is None))  # portions: test_sandblaster.py
    each = micro_steps(policy.delta)
    empty = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 8))), label="no sample")
    infinite = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=5), label="not finite")
    run = Weightless(
        policy,
        replicas,
        data.draw(st.lists(st.sampled_from(COMPUTE), min_size=replicas, max_size=replicas)),
        Steps([steps] * replicas, each),
        samples=lambda r, k: 0 if (r, k) in empty else 2,
        finite=lambda r, k: (r, k) not in infinite,
    ).carry(die=data.draw(st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=3), label="deaths"))

    tally, fates = run.coordinator.tally, run.applied + run.discarded
    assert not run.coordinator.present, "these replicas are forgotten"
    assert sorted(names(fates)) == sorted(set(names(run.arrived)))
    assert (tally.applied, tally.discarded, tally.gradients) == (len(run.applied), len(run.discarded), len(fates))
    assert tally.cancelled == len(run.cancelled)
    assert tally.nonfinite == sum(not a.finite for a in run.arrived)
    assert all(a.finite for a in run.applied)
    assert sorted(run.dismissed + run.dead) == list(range(replicas))
    assert all(sum(run.granted[r]) == steps for r in run.dismissed), "each makes its own number of steps"
    assert tally.staleness.total() == tally.applied
    if not run.dead:
        assert tally.micro_steps == steps * replicas


def names(arrivals: list[Arrival]) -> list[tuple[int, int]]:
    return [(a.replica, a.clock) for a in arrivals]


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    replicas=st.integers(1, 5),
    epochs=st.sampled_from([0.1, 0.3, 0.5, 0.7, 1, 2, 3]),
    aggregation=st.sampled_from(["synchronous", "asynchronous", "buffered:k=2,hold=false", "local-steps:period=3"]),
)
@settings(max_examples=150, deadline=None)
def test_epochs_are_passes_of_all_together(
    samples: int, batch: int, replicas: int, epochs: float, aggregation: str
) -> None:
    order = DataOrder(samples, batch, replicas, 0)
    each = 3 if "local" in aggregation else 1
    run = Weightless(
        aggregation, replicas, "exponential:mean=1", Epochs(epochs * samples, order, each), order.size, order=order
    ).carry()
    seen = sum(order.size(r, k) for r in range(replicas) for k in range(sum(run.granted[r])))
    assert not run.coordinator.present
    assert epochs * samples - 1e-9 <= seen < epochs * samples + batch
    if epochs == int(epochs) and aggregation == "synchronous":
        assert Counter(
            i for r in range(replicas) for k in range(sum(run.granted[r])) for i in order.batch(r, k)
        ) == dict.fromkeys(range(samples), epochs)


@given(bound=st.integers(0, 4), replicas=st.integers(1, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_runs_ahead_of_the_bound(bound: int, replicas: int, data: st.DataObject) -> None:
    compute = data.draw(st.lists(st.sampled_from(COMPUTE), min_size=replicas, max_size=replicas))
    run = Weightless(f"stale-synchronous:bound={bound}", replicas, compute, Steps([12] * replicas, 1)).carry()
    clocks = [0] * replicas
    for arrival in run.arrived:
        assert arrival.clock - 1 <= min(clocks) + bound
        clocks[arrival.replica] = arrival.clock
    assert max(run.coordinator.tally.staleness) <= (2 * bound + 1) * (replicas - 1)


class Careless(Aggregation[list[Arrival]]):
    """Applies the first Δ again and again."""

    def start(self, replicas: int) -> list[Arrival]:
        return []

    def arrived(self, state: list[Arrival], arrival: Arrival) -> tuple[list[Arrival], Decision]:
        held = [*state, arrival]
        return held, (Apply(((held[0], 1.0),)), Release((arrival.replica,)))

    def left(self, state: list[Arrival], replica: int, reason: str) -> tuple[list[Arrival], Decision]:
        return state, ()

    joined = left

    def waits_for(self, state: list[Arrival]) -> int:
        return 1


def test_a_policy_that_uses_a_delta_twice_is_stopped() -> None:
    with pytest.raises(PacelineError, match=r"named Δs .* \[\(0, 1\)\], but holds \[\(1, 1\)\]"):
        Weightless(Careless(), 2, "1").carry(5)


def test_time_up_discards_what_is_held() -> None:
    run = Weightless("buffered:k=3", 4, "1", samples=lambda r, k: 1)
    run.coordinator.begin()
    for _ in range(2):
        run.coordinator.arrived(run.events.pop())
    run.coordinator.finish()
    assert names(run.discarded) == [(0, 1), (1, 1)]
    assert run.coordinator.tally.discarded == run.coordinator.tally.gradients == 2


def test_a_replica_that_takes_its_time_to_stop() -> None:
    """On engines where a cancel is a message, the Δ may be on its way already: it is void."""

    class Slow(Weightless):
        def cancel(self, replica: int) -> None:
            """The replica has not stopped yet."""

    run = Slow("buffered:k=1,cancel=true", 2, "1")
    run.coordinator.begin()
    run.coordinator.arrived(run.events.pop())
    assert run.coordinator.cancelling == {1}
    assert run.clocks == [2, 1], "it is sent A when it has stopped, not before"
    run.coordinator.cancelled(1)
    tally = run.coordinator.tally
    assert (tally.gradients, tally.applied, tally.cancelled, tally.micro_steps) == (1, 1, 1, 2)
    assert (run.clocks, run.coordinator.cancelling) == ([2, 2], set())


def test_mean_staleness_is_told_since_it_was_last_asked() -> None:
    run = Weightless("asynchronous", 2, "1")
    run.coordinator.begin()
    assert run.coordinator.tally.mean_recent_staleness() is None
    for _ in range(2):
        run.coordinator.arrived(run.events.pop())
    assert run.coordinator.tally.mean_recent_staleness() == 0.5
    assert run.coordinator.tally.mean_recent_staleness() is None


@pytest.mark.parametrize("aggregation", ["synchronous", "asynchronous", "stale-synchronous:bound=1", "buffered:k=2"])
def test_a_replica_that_is_back_is_waited_for_again(aggregation: str) -> None:
    run = Weightless(aggregation, 3, "1", Steps([4] * 3, 1))
    run.coordinator.begin()
    run.coordinator.left(1, "died")
    run.current.pop(1)
    assert 1 not in run.coordinator.present
    run.coordinator.joined(1)
    assert 1 in run.coordinator.computing
    while run.events:
        arrival = run.events.pop()
        if run.current.get(arrival.replica) == arrival.clock:
            run.coordinator.arrived(arrival)
    assert not run.coordinator.present
    assert run.coordinator.tally.gradients == 3 * 4 - 1, "all but the attempt that was lost"
    assert sorted(run.dismissed) == [0, 1, 2]


def test_a_replica_that_is_back_when_its_budget_is_spent_is_dismissed() -> None:
    run = Weightless("synchronous", 2, "1", Steps([1] * 2, 1))
    run.coordinator.begin()
    run.coordinator.left(1, "died")
    run.coordinator.joined(1)
    assert run.dismissed == [1]
    run.coordinator.arrived(run.events.pop())
    assert not run.coordinator.present
    assert run.coordinator.tally.applied == 1
