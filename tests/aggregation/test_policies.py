"""Each policy on a script short enough to follow by hand. In logs, A01 is an Apply of the Δs of replicas 0 and 1."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.aggregation import (
    Aggregation,
    Asynchronous,
    Buffered,
    ElasticAveraging,
    Hogwild,
    LocalSteps,
    LossDriven,
    Outer,
    PerLearningRate,
    SmoothSwitch,
    StaleSynchronous,
    Step,
    Synchronous,
    parse,
    registered,
)
from paceline.aggregation.base import CHUNK, Apply, Arrival, Chunked, Release
from paceline.aggregation.stale_synchronous import Clocks
from paceline.core.delta import Change, Distance, InPlace, Keep, Mix
from paceline.core.errors import InputError
from tests.aggregation.policy_driver import World, arrivals, brief

TRACES = [
    (Synchronous(), 3, "021", "A012 R012"),
    (Synchronous(backups=1), 3, "0110201", "A01 R01 A01 R01 D2 R2 A01 R01"),
    (Synchronous(backups=1), 3, "01021", "A01 R01 D2 R2 A01 R01"),
    (Asynchronous(), 3, "2210", "A2 R2 A2 R2 A1 R1 A0 R0"),
    (StaleSynchronous(bound=1), 3, "00121", "A0 R0 A0 A1 R1 A2 R02 A1 R1"),
    (StaleSynchronous(bound=0), 2, "0110", "A0 A1 R01 A1 A0 R01"),
    (SmoothSwitch(every=4), 3, "012012", "A0 R0 A1 R1 A2 R2 A01 R01"),
    (SmoothSwitch(every=4), 3, "0120120102", "A0 R0 A1 R1 A2 R2 A01 R01 A02 R02 A012 R012"),
    (SmoothSwitch(every=2, count="applied"), 2, "01010", "A0 R0 A1 R1 A01 R01"),
    (SmoothSwitch(every=3, hold=False), 3, "0001201", "A0 R0 A0 R0 R0 A01 R1 R2 R0 A012 R1"),
    (Buffered(k=2), 3, "0120", "A01 R01 A02 R02"),
    (Buffered(k=2, hold=False), 3, "0012", "R0 A00 R0 R1 A12 R2"),
    (Buffered(k=2, cancel=True), 3, "0120", "A01 C2 R01 A02 C1 R02"),
    (Buffered(k=2, hold=False, cancel=True), 3, "0012", "R0 A00 C12 R0 R1 A12 C01 R2"),
    (LocalSteps(over=Asynchronous()), 2, "01", "A0 R0 A1 R1"),
    (ElasticAveraging(), 2, "011", "R0 A0 R1 A1 R1 A1"),
    (Hogwild(), 2, "01", "A0 R0 A1 R1"),
]


@pytest.mark.parametrize(("policy", "replicas", "order", "log"), TRACES, ids=str)
def test_log(policy: Aggregation[Any], replicas: int, order: str, log: str) -> None:
    assert brief(arrivals(policy, replicas, order)) == log


LEAVING = [
    ("synchronous", "the round closes without the one that died", "01", 2, "A01 R01"),
    ("synchronous", "what the dead one sent joins the round", "01", 1, ""),
    ("synchronous:backups=1", "two are left: one is enough", "0", 2, "A0 R0"),
    ("stale-synchronous:bound=0", "the slowest dies", "01", 2, "A0 A1 R01"),
    ("smooth-switch:every=1", "K shrinks with P", "01", 2, "A01 R01"),
    ("buffered:k=3", "K shrinks with P", "01", 2, "A01 R01"),
    ("buffered:k=3,hold=false", "others go on sending", "01", 2, "R0 R1"),
]


@pytest.mark.parametrize(("text", "why", "order", "leaver", "log"), LEAVING)
def test_leaving(text: str, why: str, order: str, leaver: int, log: str) -> None:
    world = arrivals(parse(text), 3, order)
    world.leave(leaver)
    assert brief(world) == log, why


def test_what_a_dead_replica_sent_is_applied_with_the_round_but_it_is_not_released() -> None:
    world = arrivals(Synchronous(), 3, "01")
    world.leave(1)
    world.arrive(2)
    assert brief(world) == "A012 R02"


def test_a_replica_that_came_back_computes_while_its_old_delta_waits() -> None:
    world = arrivals(Synchronous(), 3, "01")
    world.leave(1)
    world.join(1)
    world.arrive(2)
    assert brief(world) == ""
    world.arrive(1)
    assert brief(world) == "A0112 R012"


def test_a_joined_replica_enlarges_the_round_and_is_not_late() -> None:
    world = arrivals(Synchronous(backups=1), 3, "01")
    world.leave(2)
    world.join(2)
    world.arrive(2)
    assert world.discarded == []


def test_a_chunked_sequence_is_a_tuple_that_grows() -> None:
    values: Chunked[int] = Chunked()
    for value in range(3 * CHUNK + 5):
        assert (len(values), bool(values)) == (value, value > 0)
        before, values = values, values.add(value)
        assert list(before) == list(range(value)), "it is not changed"
    assert list(values) == list(range(3 * CHUNK + 5))
    odd = Chunked.of(value for value in values if value % 2)
    assert list(odd.add(0)) == [*range(1, 3 * CHUNK + 5, 2), 0]
    assert len(Chunked.of(())) == 0


@given(st.lists(st.tuples(st.sampled_from(["arrive", "leave", "join"]), st.integers(0, 5)), max_size=60))
def test_clocks_are_counted_as_they_change(events: list[tuple[str, int]]) -> None:
    """Without looking at all of them: who is slowest, and how many are."""
    clocks, expected = Clocks.at_start(4), dict.fromkeys(range(4), 0)
    for kind, replica in events:
        if kind == "arrive" and replica in expected:
            clocks, expected = clocks.moved(replica), expected | {replica: expected[replica] + 1}
        elif kind == "leave" and replica in expected:
            clocks = clocks.without(replica)
            del expected[replica]
        elif kind == "join" and replica not in expected:
            clocks, expected = clocks.joined(replica), expected | {replica: clocks.slowest}
        slowest = min(expected.values(), default=clocks.slowest)
        assert (clocks.of, clocks.replicas, clocks.slowest) == (expected, len(expected), slowest)
        assert clocks.at_slowest == sum(clock == slowest for clock in expected.values())


def test_a_joined_replica_starts_at_the_slowest_clock() -> None:
    world = arrivals(StaleSynchronous(bound=1), 2, "0101")
    world.leave(0)
    world.join(0)
    assert world.state.of == {1: 2, 0: 2}


@pytest.mark.parametrize("text", ["synchronous", "smooth-switch:every=1", "buffered:k=3", "buffered:k=3,hold=false"])
def test_with_nobody_left_all_that_is_held_is_applied(text: str) -> None:
    world = arrivals(parse(text), 3, "0")
    for replica in range(3):
        world.leave(replica)
    assert world.held == []
    assert brief(world).endswith("A0")


def test_late_is_whoever_computed_during_the_update_not_after_a_round_without_samples() -> None:
    world = arrivals(Synchronous(backups=1), 3, "01", samples=0)
    world.arrive(2)
    world.arrive(0)
    assert brief(world) == "D01 R01 A02 R02"


def test_cancel_spares_attempts_when_a_did_not_change() -> None:
    assert brief(arrivals(Buffered(k=2, cancel=True), 3, "01", samples=0)) == "D01 R01"


def test_damping_divides_the_rate_by_the_staleness() -> None:
    world = arrivals(Asynchronous(damping="staleness"), 4, "0123")
    assert [a.rate for a in world.log if isinstance(a, Apply)] == [1.0, 1.0, 1 / 2, 1 / 3]
    undamped = arrivals(Asynchronous(), 4, "0123")
    assert {a.rate for a in undamped.log if isinstance(a, Apply)} == {1.0}


@pytest.mark.parametrize(("combine", "weights"), [("mean", [1 / 3, 1 / 3, 1 / 2]), ("sum", [1.0, 1.0, 1.0])])
def test_stale_synchronous_weighs_by_those_who_are_there(combine: Any, weights: list[float]) -> None:
    world = arrivals(StaleSynchronous(combine=combine), 3, "01")
    world.leave(0)
    world.arrive(2)
    assert [w for a in world.log if isinstance(a, Apply) for _, w in a.deltas] == weights


def test_threshold_as_drawn_in_the_docstring() -> None:
    policy = SmoothSwitch(every=4)
    world = World(policy, 3)
    seen = []
    for digit in "0120120102":
        world.arrive(int(digit))
        seen.append(policy.waits_for(world.state))
    assert seen == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


def test_deltas_and_adoption() -> None:
    assert LocalSteps(period=4).delta == Change(4)
    assert ElasticAveraging(period=3, elasticity=0.2).delta == Distance(3)
    assert ElasticAveraging(elasticity=0.2).adopt == Mix(0.2)
    assert (Hogwild().delta, Hogwild().adopt) == (InPlace(), Keep())


def test_elastic_averaging_weighs_by_its_elasticity() -> None:
    policy = ElasticAveraging(elasticity=0.2)
    _, decision = policy.arrived(policy.start(2), Arrival(1, 0, 1, 8, 0.0))
    apply = decision[1]
    assert isinstance(apply, Apply)
    assert [w for _, w in apply.deltas] == [0.2]


def test_replicas_that_meet_at_once_are_sent_the_a_that_none_of_them_has_moved() -> None:
    policy = ElasticAveraging(elasticity=0.2, synchronous=True)
    state, decision = policy.arrived(policy.start(2), Arrival(1, 0, 1, 8, 0.0))
    assert decision == ()
    assert policy.waits_for(state) == 2
    late = Arrival(0, 0, 1, 0, 1.0)  # without a sample it has a distance all the same
    state, (release, apply) = policy.arrived(state, late)
    assert release == Release((0, 1))
    assert isinstance(apply, Apply)
    assert apply.deltas == ((late, 0.2), (Arrival(1, 0, 1, 8, 0.0), 0.2))


def test_together_replicas_do_not_move_a_beyond_their_mean() -> None:
    with pytest.raises(InputError, match=r"write elasticity=0.225, which is the paper's"):
        ElasticAveraging(elasticity=0.3, synchronous=True).resolved(learning_rate=None, replicas=4)
    ElasticAveraging(elasticity=0.3).resolved(learning_rate=None, replicas=4)


def test_local_steps_is_the_inner_policy_in_all_else() -> None:
    policy = LocalSteps(over=SmoothSwitch(threshold=LossDriven(), hold=False))
    assert policy.needs == {"loss"}
    assert policy.slots(5) == 5
    resolved = LocalSteps(over=SmoothSwitch(PerLearningRate(5))).resolved(learning_rate=0.01, replicas=2)
    assert resolved.over == SmoothSwitch(every=500)


@pytest.mark.parametrize(
    ("text", "slots"),
    [("smooth-switch", 1), ("buffered", 1), ("buffered:k=3,hold=false", 3), ("smooth-switch:hold=false", 9)],
)
def test_slots(text: str, slots: int) -> None:
    assert parse(text).slots(9) == slots


def test_smooth_switch_resolves_its_steps_and_keeps_the_rest() -> None:
    policy = parse("smooth-switch:every=5/lr,combine=sum,hold=false,count=applied")
    assert policy.resolved(learning_rate=0.01, replicas=3) == SmoothSwitch(500, None, "sum", False, "applied")
    other = SmoothSwitch(threshold=LossDriven(window=7))
    assert other.resolved(learning_rate=None, replicas=3) == other


def test_a_step_threshold_is_the_option_every() -> None:
    assert SmoothSwitch(threshold=Step(80)) == SmoothSwitch(every=80)
    assert hash(SmoothSwitch(threshold=Step(80))) == hash(SmoothSwitch(every=80))


WRONG = [
    (lambda: Synchronous(backups=-1), "synchronous:backups=-1, .* at least 0; write synchronous:backups=0"),
    (lambda: Synchronous(backups=1.0), "whole number"),  # type: ignore[arg-type]
    (lambda: Synchronous(combine="average"), "unknown synchronous:combine 'average'"),  # type: ignore[arg-type]
    (lambda: Asynchronous(damping="stale"), "did you mean 'staleness'"),  # type: ignore[arg-type]
    (lambda: StaleSynchronous(bound=-1), "stale-synchronous:bound=-1"),
    (lambda: StaleSynchronous(bound=True), "stale-synchronous:bound=True"),
    (lambda: SmoothSwitch(every=0), "smooth-switch:every=0, but it must be a number above 0"),
    (lambda: SmoothSwitch(every=float("nan")), "smooth-switch:every=nan"),
    (lambda: SmoothSwitch(every=100, threshold=LossDriven()), "both say what K is"),
    (lambda: SmoothSwitch(hold=1), "smooth-switch:hold=1, but it must be true or false"),  # type: ignore[arg-type]
    (lambda: SmoothSwitch(count="made"), "unknown smooth-switch:count"),  # type: ignore[arg-type]
    (lambda: SmoothSwitch(threshold=lambda _: "3"), "the threshold gave '3' for u=0"),  # type: ignore[arg-type,return-value]
    (lambda: SmoothSwitch(threshold=3), "threshold=3 is no function"),  # type: ignore[arg-type]
    (lambda: Buffered(k=0), "buffered:k=0"),
    (lambda: Buffered(cancel=None), "buffered:cancel=None"),  # type: ignore[arg-type]
    (lambda: LocalSteps(period=0), "local-steps:period=0"),
    (lambda: LocalSteps(over=ElasticAveraging()), "has a Δ of its own"),
    (lambda: LocalSteps(over="synchronous"), "over=synchronous"),  # type: ignore[arg-type]
    (lambda: LocalSteps(outer=0.7), "no outer optimizer"),  # type: ignore[arg-type]
    (lambda: Outer(momentum=1), "nesterov:momentum=1"),
    (lambda: Outer(momentum=0), "write momentum:momentum=0"),
    (lambda: Outer(lr=0, nesterov=False), "momentum:lr=0"),
    (lambda: ElasticAveraging(elasticity=1.5), "above 0 and at most 1"),
    (lambda: ElasticAveraging(period=0), "elastic-averaging:period=0"),
    (lambda: PerLearningRate(-5), "multiple=-5"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_is_out_of_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


UNFIT = [
    (Synchronous(backups=4), 4, 0.1, "backups=4 leaves no replica .* write backups=3"),
    (Buffered(k=5), 4, 0.1, "write buffered:k=4 or buffered:k=5,hold=false"),
    (SmoothSwitch(PerLearningRate(5)), 4, None, "every=5/lr needs a learning rate"),
    (LocalSteps(over=Buffered(k=5)), 4, 0.1, "k=5"),
]


@pytest.mark.parametrize(("policy", "replicas", "learning_rate", "message"), UNFIT, ids=str)
def test_what_does_not_fit_the_program_or_the_mesh_is_refused(
    policy: Aggregation[Any], replicas: int, learning_rate: float | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        policy.resolved(learning_rate=learning_rate, replicas=replicas)


@pytest.mark.parametrize("cls", registered(Aggregation).values())
def test_policies_are_frozen_values(cls: type[Any]) -> None:
    policy = cls()
    assert policy == cls()
    assert hash(policy) == hash(cls())
    assert policy.resolved(learning_rate=0.1, replicas=50) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.combine = "sum"
