"""Rounds of replicas that are in time, on scripts short enough to follow by hand; brief logs as in test_policies."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.aggregation import Decoupled, Outer, parse
from paceline.aggregation.base import Action, Apply, Discard, Release
from paceline.core.delta import Change, Rebase, Replace
from paceline.core.errors import InputError
from tests.aggregation.policy_driver import EVENTS, World, brief, play
from tests.aggregation.test_policy_contract import CHECK, REPLICAS


def script(policy: Decoupled, replicas: int, moments: list[tuple[float, int]], until_s: float = 0.0) -> World:
    """Replicas arrive at these times, in seconds; the clock goes on from the last of them, if it is to."""
    world = World(policy, replicas)
    for time_s, replica in moments:
        world.wait(time_s).arrive(replica)
    return world.wait(max(until_s, world.time_s))


def weights(world: World) -> list[dict[int, float]]:
    return [{a.replica: w for a, w in action.deltas} for action in world.log if isinstance(action, Apply)]


def test_the_rounds_drawn_in_the_docstring() -> None:
    rows = [line.split() for line in (Decoupled.__doc__ or "").splitlines() if line.startswith("        replica ")]
    moments = [(t, int(r)) for _, r, line, *_ in rows for t, mark in enumerate(line) if mark != "-"]
    assert len(moments) == 8
    world = World(Decoupled(quorum=2, grace=0.75), 3)
    merged = []
    for time_s, replica in sorted(moments):
        world.wait(time_s).arrive(replica)
        merged += [time_s] * (not any(a.replica == replica for a in world.held))
    assert world.ticks == [5.0, 11.0]
    assert merged == [15], "all have sent: no window"
    assert brief(world.wait(15)) == "R0 R1 A01 R0 R1 A01 R0 R2 R1 A012 R0"


def test_all_at_once_are_one_round_without_a_window() -> None:
    world = script(Decoupled(), 4, [(2.0, r) for r in (3, 0, 1, 2)], until_s=9.0)
    assert brief(world) == "R3 R0 R1 R2 A0123"
    assert world.ticks == []


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_those_that_arrive_with_the_last_of_the_quorum_are_in_its_round(grace: float) -> None:
    world = script(Decoupled(quorum=2, grace=grace), 4, [(2.0, 0), (2.0, 3), (2.0, 1)], until_s=3.0)
    assert brief(world) == "R0 R3 R1 A013"
    assert world.ticks == [2.0], "nothing is measured yet"


def test_who_never_arrives_is_waited_for_no_longer_than_the_others_steps_hide() -> None:
    moments = [(4.0, 0), (5.0, 1), (8.0, 0), (10.0, 1)]
    world = script(Decoupled(quorum=0.5, grace=0.5), 3, moments, until_s=99.0)
    assert brief(world) == "R0 R1 A01 R0 R1 A01"
    assert world.ticks == [5.0, 10.0], "the window of 8 + 0.5 * 4 s is over as the quorum is there"


def test_the_window_is_by_the_mean_of_the_newest_and_the_mean_before() -> None:
    policy = Decoupled(quorum=1, grace=0.5)
    world = World(policy, 2)
    for time_s, deadline in [(1.0, 1.0), (5.0, 5.0 + 0.5 * 4), (13.0, 13.0 + 0.5 * 6), (17.0, 17.0 + 0.5 * 5)]:
        world.wait(time_s).arrive(0)
        assert policy.deadline(world.state) == deadline
    assert policy.deadline(world.wait(20.0).state) is None


def test_a_replica_that_is_back_too_early_waits_and_counts_in_the_next_round() -> None:
    world = script(Decoupled(quorum=2, grace=0), 3, [(1.0, 0), (2.0, 0)], until_s=7.0)
    assert brief(world) == "R0"
    assert world.waiting == {0}
    world.arrive(2)
    assert brief(world.wait(8.0)) == "R0 R2 A02 R0"
    world.arrive(1)
    assert brief(world.wait(9.0)) == "R0 R2 A02 R0 R1 A01"
    assert world.applied[-2].clock == 2


def test_late_deltas_count_by_their_samples() -> None:
    world = World(Decoupled(quorum=2, grace=0), 3)
    for replica, samples in ((0, 8), (1, 8)):
        world.wait(1.0).arrive(replica, samples)
    world.wait(2.0).arrive(2, 24)
    world.wait(3.0).arrive(1, 8)
    world.wait(4.0)
    assert weights(world) == [{0: 0.5, 1: 0.5}, {1: 0.25, 2: 0.75}]
    assert [a.version for a in world.applied] == [0, 0, 0, 0], "replica 1 went on before its Δ was merged"


def test_hold_waits_for_the_merge() -> None:
    world = script(
        Decoupled(quorum=2, grace=0.5, hold=True), 3, [(4.0, 0), (5.0, 1), (9.0, 0), (10.0, 1)], until_s=99.0
    )
    assert brief(world) == "A01 R01 A01 R01"
    assert world.ticks == [5.0, 11.0], "replica 0 began at 5 s and took 4"


LEAVING = [
    ("the quorum of those who are left has sent", 0.5, [(1.0, 0), (2.0, 1)], [2, 3, 4], "R0 R1 A01"),
    ("all who are left have sent", "all", [(1.0, 0), (2.0, 1)], [2, 3, 4], "R0 R1 A01"),
    ("what the one that has left sent is merged", 3, [(1.0, 0), (2.0, 1), (3.0, 2)], [0, 3, 4], "R0 R1 R2 A012"),
    ("nobody is left", "all", [(1.0, 0), (2.0, 0)], [0, 1, 2, 3, 4], "R0 A0 A0"),
]


@pytest.mark.parametrize(("why", "quorum", "moments", "leavers", "log"), LEAVING)
def test_leaving(why: str, quorum: Any, moments: list[tuple[float, int]], leavers: list[int], log: str) -> None:
    world = World(Decoupled(quorum=quorum), 5)
    for time_s, replica in moments:
        world.wait(time_s).arrive(replica)
    for replica in leavers:
        world.leave(replica)
    assert brief(world.wait(50.0)) == log, why


def test_a_replica_that_died_while_it_waited_and_is_back_is_not_released() -> None:
    world = script(Decoupled(quorum=2, grace=0), 3, [(1.0, 0), (2.0, 0)])
    world.leave(0)
    world.join(0)
    world.wait(3.0).arrive(1)
    assert brief(world.wait(4.0)) == "R0 R1 A01"
    assert set(world.computing) == {0, 1, 2}


def test_a_round_without_a_sample_is_dropped_and_lets_go_on() -> None:
    world = World(Decoupled(quorum=1, hold=True), 2)
    world.wait(1.0).arrive(0, samples=0)
    world.wait(2.0)
    assert [type(action) for action in world.log] == [Discard, Release]


@pytest.mark.parametrize(
    ("quorum", "counts"),
    [
        (0.5, [1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (0.7, [1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]),
        (3, [1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3]),
        ("all", [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_a_quorum_is_of_those_who_take_part(quorum: Any, counts: list[int]) -> None:
    policy = Decoupled(quorum=quorum)
    assert [policy.waits_for(policy.start(replicas)) for replicas in range(11)] == counts


@CHECK
@given(st.booleans(), REPLICAS, EVENTS)
def test_quorum_all_with_hold_is_synchronous(window: bool, replicas: int, events: Any) -> None:
    policy = Decoupled(quorum="all", grace=7.0 if window else 0.0, hold=True)
    events = [event for event in events if event[0] != "join"]
    one, other = play(policy, replicas, events).finish(), play(parse("synchronous"), replicas, events).finish()
    assert one.log == other.log
    assert one.ticks == []


class Watched(World):
    """Checks what A has of a replica's own Δs whenever it is sent one."""

    def _execute(self, action: Action) -> Iterator[int]:
        yield from super()._execute(action)
        for replica in action.replicas if isinstance(action, Release) else ():
            own = [a.clock for a in self.applied + self.discarded if a.replica == replica]
            assert sorted(own) == list(range(1, self.clocks[replica]))


@CHECK
@given(st.sampled_from([0.3, 0.5, 2, "all"]), st.sampled_from([0.0, 0.5, 2.0]), REPLICAS, EVENTS)
def test_of_its_own_deltas_a_replica_is_sent_an_a_without_the_newest_alone(
    quorum: Any, grace: float, replicas: int, events: Any
) -> None:
    world = Watched(Decoupled(quorum=quorum, grace=grace), replicas)
    world.play([event for event in events if event[0] != "join"])
    assert world.finish().held == []


@CHECK
@given(st.booleans(), REPLICAS, EVENTS)
def test_no_replica_has_more_deltas_than_it_has_slots_for(hold: bool, replicas: int, events: Any) -> None:
    policy = Decoupled(quorum=2, hold=hold)
    world = World(policy, replicas)
    for event in [event for event in events if event[0] == "arrive"]:
        world.play([event])
        held = [a.replica for a in world.held]
        assert all(held.count(r) + (r in world.computing) <= policy.slots(replicas) for r in range(replicas))


def test_the_text_form() -> None:
    text = "decoupled:period=20,quorum=all,grace=0.5,hold=true,outer=(momentum:lr=1,momentum=0.5)"
    assert parse(text) == Decoupled(20, "all", 0.5, True, Outer(1.0, 0.5, nesterov=False))
    assert parse("decoupled:quorum=2,outer=none") == Decoupled(quorum=2, outer=None)
    assert parse("decoupled").outer == Outer()


def test_delta_and_adoption() -> None:
    assert Decoupled(period=7).delta == Change(7)
    assert Decoupled().adopt == Rebase()
    assert Decoupled(hold=True).adopt == Replace()
    assert Decoupled(quorum="all").collective is None


WRONG = [
    (lambda: Decoupled(period=0), "decoupled:period=0"),
    (lambda: Decoupled(quorum=0), "decoupled:quorum=0, but it must be a number above 0 and below 1 .*, or all; write"),
    (lambda: Decoupled(quorum=1.5), "decoupled:quorum=1.5"),
    (lambda: Decoupled(quorum=-2), "decoupled:quorum=-2"),
    (lambda: Decoupled(quorum=math.nan), "decoupled:quorum=nan"),
    (lambda: Decoupled(quorum="most"), "decoupled:quorum=most"),  # type: ignore[arg-type]
    (lambda: Decoupled(quorum=True), "decoupled:quorum=True"),
    (
        lambda: Decoupled(grace=-0.1),
        "decoupled:grace=-0.1, but it must be a number at least 0; write decoupled:grace=0.75",
    ),
    (lambda: Decoupled(hold=1), "decoupled:hold=1"),  # type: ignore[arg-type]
    (lambda: Decoupled(outer=0.7), "no outer optimizer; write outer=nesterov"),  # type: ignore[arg-type]
    (lambda: parse("decoupled:quorum=some"), "decoupled:quorum 'some'; .*all"),
    (
        lambda: Decoupled(quorum=5).resolved(learning_rate=None, replicas=4),
        "quorum=5 of replicas=4 .*quorum=4, or quorum=all",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_is_out_of_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
