"""States of policies go through JSON unchanged, and nothing but states can be read."""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.aggregation import SmoothSwitch
from paceline.aggregation.base import Aggregation, Apply, Arrival, Cancel, Decision, Release, parse
from paceline.aggregation.state_codec import decode, encode, kind
from paceline.core.errors import InputError

POLICIES = [
    "synchronous",
    "synchronous:backups=1",
    "asynchronous:damping=staleness",
    "smooth-switch:every=3",
    "smooth-switch:adaptive",
    "smooth-switch:plateau",
    "smooth-switch:loss-driven",
    "smooth-switch:throughput",
    "buffered:k=2",
    "stale-synchronous:bound=2",
    "local-steps:period=4",
    "local-steps:period=2,over=asynchronous",
    "elastic-averaging",
    "decoupled",
    "decoupled:quorum=all,hold=true",
    "hogwild",
]


def through_json(state: Any, policy: Aggregation[Any]) -> Any:
    return decode(json.loads(json.dumps(encode(state, policy), allow_nan=False)), policy)


@pytest.mark.parametrize("text", POLICIES)
def test_every_state_of_a_run_is_the_same_afterwards(text: str) -> None:
    random = np.random.default_rng(0)
    policy = parse(text).resolved(learning_rate=0.1, replicas=4)
    state, computing, clocks, version = policy.start(4), set(range(4)), [0] * 4, 0
    for i in range(150):
        replica = sorted(computing)[int(random.integers(len(computing)))]
        computing.remove(replica)
        clocks[replica] += 1
        observed = {"norm": 1.0, "agreement": 0.5, "server": 0.25}
        loss = float(random.random())
        arrival = Arrival(replica, version, clocks[replica], 4, 0.1 * i, loss=loss, observed=observed)
        decision: Decision
        state, decision = policy.arrived(state, arrival)
        for action in decision:
            version += isinstance(action, Apply)
            if not isinstance(action, Apply) and hasattr(action, "replicas"):
                computing.update(action.replicas)
        assert through_json(state, policy) == state


class Seen(NamedTuple):
    losses: tuple[float, ...]
    by_replica: dict[int, float]


class Loose(Aggregation[Seen]):
    def start(self, replicas: int) -> Seen:
        return Seen((float("inf"), float("nan")), {0: 1.5, replicas: -0.0})

    def arrived(self, state: Seen, arrival: Arrival) -> tuple[Seen, Decision]:
        return state, (Release((arrival.replica,)),)

    def left(self, state: Seen, replica: int, reason: Any) -> tuple[Seen, Decision]:
        return state, ()

    def joined(self, state: Seen, replica: int) -> tuple[Seen, Decision]:
        return state, ()

    def waits_for(self, state: Seen) -> int:
        return 1


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Path", "fields": {}},
        {"type": "Arrival", "fields": {"replica": 1}},
        {"type": "Round", "fields": {"buffer": 1, "late": 2, "more": 3}},
        {"type": "Round", "fields": [1, 2]},
        {"type": "Aggregation", "fields": {}},
        {"exec": "1"},
        {"float": "much"},
        {},
        [1],
        {"set": [{"map": []}]},
    ],
)
def test_what_is_no_state_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="no state of"):
        decode(value, parse("synchronous"))


def test_a_state_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InputError, match="ndarray"):
        encode((np.zeros(2),))


def test_a_class_that_would_not_be_found_is_refused() -> None:
    class Inner(NamedTuple):
        updates: int

    with pytest.raises(InputError, match=r"has a .*<locals>\.Inner, .* define the class at the top level"):
        encode((1, Inner(2)), Loose())
    assert encode((1, Inner(2)))


def test_a_policy_of_ones_own_has_its_classes_beside_it() -> None:
    state = Loose().start(3)
    assert repr(through_json(state, Loose())) == repr(state)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("smooth-switch:every=3", "smooth-switch:every=500", True),
        ("smooth-switch:adaptive", "smooth-switch:plateau", False),
        ("smooth-switch:adaptive", "smooth-switch:adaptive,combine=sum", False),
        ("buffered:k=2", "buffered:k=4", True),
        ("buffered:k=2", "buffered:k=2,hold=false", False),
        ("local-steps:period=4", "local-steps:period=8", True),
        ("local-steps:period=4", "local-steps:period=4,over=asynchronous", False),
        ("synchronous", "asynchronous", False),
    ],
)
def test_policies_that_differ_in_numbers_alone_share_their_state(first: str, second: str, same: bool) -> None:
    one, other = (parse(text).resolved(learning_rate=0.1, replicas=p) for text, p in ((first, 4), (second, 6)))
    assert (kind(one) == kind(other)) is same


def test_a_function_as_a_threshold_is_known_by_its_class() -> None:
    assert kind(SmoothSwitch(threshold=lambda u: 1 + u)) == kind(SmoothSwitch(threshold=lambda u: 2 + u))


def test_decisions_go_through_json_as_well() -> None:
    arrival = Arrival(1, 2, 3, 4, 0.5, loss=float("nan"), observed={"norm": 1.0})
    decision = (Apply(((arrival, 0.5),), 0.25), Cancel((2, 3)), Release((0, 1)))
    assert repr(through_json(decision, parse("synchronous"))) == repr(decision)
