"""What holds for every policy, whatever happens; and which policies are the same policy."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregation import (
    Aggregation,
    Asynchronous,
    Buffered,
    Linear,
    SmoothSwitch,
    StaleSynchronous,
    Synchronous,
    parse,
    registered,
)
from paceline.aggregation.base import Apply, Discard, Release
from tests.aggregation.policy_driver import EVENTS, Event, World, play

TEXTS = [
    *registered(Aggregation),
    "synchronous:backups=1",
    "synchronous:backups=2,combine=sum",
    "asynchronous:damping=staleness",
    "stale-synchronous:bound=0",
    "stale-synchronous:bound=1,combine=sum",
    "smooth-switch:every=4",
    "smooth-switch:every=4,hold=false",
    "smooth-switch:every=2,count=applied",
    "smooth-switch:threshold=(linear:slope=0.3)",
    "smooth-switch:threshold=(exponential:doubling=5),hold=false",
    "smooth-switch:threshold=(loss-driven:window=2)",
    "buffered:k=2",
    "buffered:k=3,hold=false",
    "buffered:k=2,cancel=true",
    "buffered:k=3,hold=false,cancel=true",
    "local-steps:over=(buffered:k=2,cancel=true)",
    "elastic-averaging:synchronous=true",
    "decoupled:quorum=2,grace=0",
    "decoupled:quorum=all",
    "decoupled:quorum=0.3,hold=true",
    "decoupled:quorum=all,hold=true,grace=2",
    "robust:by=(krum:faulty=2),k=3",
    "deadline:seconds=0.5,least=2",
    "sandblaster:portions=1",
    "sandblaster:portions=3",
    "sandblaster:portions=5,backups=false",
]

PATIENT = {"synchronous", "asynchronous", "stale-synchronous", "smooth-switch", "buffered", "local-steps", "hogwild"}
PATIENT |= {"decoupled", "robust", "delay-compensated", "deadline"}
NEVER_LATE = [t for t in TEXTS if t.partition(":")[0] in PATIENT and "backups" not in t]
"""Those that use every Δ that holds a sample; others may drop some, that is theirs to decide."""

CHECK = settings(max_examples=50, deadline=None, derandomize=True)
REPLICAS = st.integers(1, 6)


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(REPLICAS, EVENTS)
def test_every_delta_meets_one_fate_and_nobody_is_stuck(text: str, replicas: int, events: list[Event]) -> None:
    world = play(parse(text), replicas, events).finish()  # the driver checks after each event
    assert world.held == []
    assert not world.waiting
    fates = [(a.replica, a.clock) for a in world.applied + world.discarded]
    assert len(fates) == len(set(fates))


@pytest.mark.parametrize("text", NEVER_LATE)
@CHECK
@given(REPLICAS, EVENTS)
def test_only_what_has_no_sample_is_discarded(text: str, replicas: int, events: list[Event]) -> None:
    world = play(parse(text), replicas, events).finish()
    assert all(a.samples == 0 for a in world.discarded)


@pytest.mark.parametrize(
    "text", ["synchronous", "smooth-switch:every=3", "buffered:k=3", "buffered:k=3,hold=false", "decoupled"]
)
@CHECK
@given(REPLICAS, EVENTS)
def test_means_weigh_by_samples(text: str, replicas: int, events: list[Event]) -> None:
    for action in play(parse(text), replicas, events).log:
        if isinstance(action, Apply):
            total = sum(a.samples for a, _ in action.deltas)
            assert [w for _, w in action.deltas] == [a.samples / total for a, _ in action.deltas]


@CHECK
@given(st.integers(0, 3), REPLICAS, EVENTS)
def test_nobody_is_further_ahead_of_the_slowest_than_the_bound(bound: int, replicas: int, events: list[Event]) -> None:
    world = World(StaleSynchronous(bound), replicas)
    for event in events:
        world.play([event])
        clocks = world.state.of
        assert set(clocks) == world.alive
        assert all(clocks[r] <= min(clocks.values()) + bound for r in world.computing)
        assert all(clocks[r] > min(clocks.values()) + bound for r in world.waiting)


SAME = [
    (SmoothSwitch(threshold=Linear(slope=0)), Asynchronous()),
    (SmoothSwitch(threshold=Linear(slope=0), hold=False), Asynchronous()),
    (SmoothSwitch(threshold=lambda u: 1000), Synchronous()),
    (SmoothSwitch(threshold=lambda u: 1000, combine="sum"), Synchronous(combine="sum")),
    (SmoothSwitch(threshold=lambda u: 2), Buffered(k=2)),
    (Buffered(k=1), Asynchronous()),
    (Buffered(k=6), Synchronous()),
    (Buffered(k=6, cancel=True), Synchronous()),
    (parse("local-steps:over=stale-synchronous"), StaleSynchronous()),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=lambda policy: type(policy).__name__)
@CHECK
@given(REPLICAS, EVENTS)
def test_same_policy_same_log(
    one: Aggregation[Any], other: Aggregation[Any], replicas: int, events: list[Event]
) -> None:
    assert play(one, replicas, events).finish().log == play(other, replicas, events).finish().log


@CHECK
@given(REPLICAS, EVENTS)
def test_bound_0_releases_as_synchronous_does(replicas: int, events: list[Event]) -> None:
    def releases(policy: Aggregation[Any]) -> list[Release]:
        return [a for a in play(policy, replicas, events).finish().log if isinstance(a, Release)]

    assert releases(StaleSynchronous(bound=0)) == releases(Synchronous())


@pytest.mark.parametrize("text", ["buffered:k=2,cancel=true", "buffered:k=3,hold=false,cancel=true"])
@CHECK
@given(REPLICAS, EVENTS)
def test_what_cancels_never_applies_a_stale_delta(text: str, replicas: int, events: list[Event]) -> None:
    version = 0
    for action in play(parse(text), replicas, events).finish().log:
        if isinstance(action, Apply):
            # Δs of a replica that came back are new as well, and those of one that left belong to the open update.
            assert {a.version for a, _ in action.deltas} == {version}
            version += 1


@CHECK
@given(st.integers(1, 3), st.integers(4, 6), EVENTS)
def test_backups_never_apply_a_stale_delta(backups: int, replicas: int, events: list[Event]) -> None:
    version = 0
    for action in play(Synchronous(backups), replicas, events).finish().log:
        if isinstance(action, Apply):
            assert {a.version for a, _ in action.deltas} == {version}
            version += 1
        if isinstance(action, Discard) and len(action.arrivals) == 1 and action.arrivals[0].samples:
            assert action.arrivals[0].version < version


@pytest.mark.parametrize(("text", "ring"), [("smooth-switch:every=2,hold=false", 4), ("buffered:k=7,hold=false", 7)])
@CHECK
@given(EVENTS)
def test_the_ring_of_slots_never_overflows(text: str, ring: int, events: list[Event]) -> None:
    policy = parse(text)
    assert policy.slots(4) == ring
    world = World(policy, 4)
    for event in events:
        world.play([event])
        for replica in range(4):
            assert sum(a.replica == replica for a in world.held) < ring
