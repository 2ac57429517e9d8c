"""The state of a run goes through JSON unchanged, and what is no state is refused."""

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from paceline.aggregation import parse
from paceline.aggregation.base import Arrival
from paceline.aggregation.state_codec import encode, kind
from paceline.core.data_order import BatchRange, DataOrder, DataPosition, Outstanding
from paceline.core.errors import InputError
from paceline.core.noise_scale import NoiseAccumulator, Observation
from paceline.core.records import Record, ReplicaExit, ReplicaPosition
from paceline.engine.coordinator_state import CoordinatorState, Tally
from paceline.engine.run_state import HistoryState, RunState


def state() -> RunState:
    policy = parse("smooth-switch:every=3").resolved(learning_rate=0.1, replicas=2)
    arrival = Arrival(1, 3, 4, 8, 1.5, loss=0.25, observed={"norm": 2.0})
    coordinator = CoordinatorState(
        version=4,
        tally=Tally(gradients=6, applied=5, samples=40, staleness=Counter({0: 3, 1: 2})),
        policy="smooth-switch:every=3",
        policy_kind=kind(policy),
        policy_state=encode(policy.arrived(policy.start(2), arrival)[0]),
        unfinished={"tuple": []},
        leaving=(),
        present=(0, 1),
        computing=(1,),
        positions=(ReplicaPosition(3, 3, 3), ReplicaPosition(4, 4, 4)),
        held=(arrival,),
    )
    noise = NoiseAccumulator(8)
    noise.add(Observation(2.0, 0.5, 8))
    records = (
        Record(0.0, 0, 0, 1, None, None, test_metrics={"top5": 0.5}, statistics=noise.now()),
        Record(1.0, 2, 3, 1, 0.5, 0.7, 0.6, 0.9),
    )
    before = DataPosition(DataOrder(40, 2, 3, 1, "disjoint"), (4, 0, 2))
    return RunState(
        seconds=1.5,
        spent={"seconds": 1.5, "steps": 3.5, "epochs": 0.25},
        per_step=1,
        coordinator=coordinator,
        data=DataPosition(
            DataOrder(40, 4, 2, 1, resumed=before),
            (3, 4),
            (Outstanding(BatchRange(1, 2, 1), 1, 4), Outstanding(BatchRange(0, 1, 2), None, 0)),
        ),
        history=HistoryState(records, (0.5, 0.25), (3, 5), noise.state(), "ab"),
        evaluations=("steps", 0.5, 8),
        exits=(ReplicaExit(1, "killed by SIGKILL", 0.5),),
        engine={"rows": [1, 2.5, None, "x"]},
    )


def test_a_state_is_the_same_afterwards() -> None:
    assert RunState.of_json(json.loads(json.dumps(state().to_json()))) == state()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in items for place in ((value, key), *places(each))]


# Values to put anywhere; a number is also changed by one.
STRANGE = [
    None,
    True,
    -1,
    0,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    {"tuple": 1},
]


@pytest.mark.parametrize("seed", range(400))
def test_a_mutated_state_is_read_as_it_stands_or_refused(seed: int) -> None:
    random, mutated = np.random.default_rng(seed), copy.deepcopy(state().to_json())
    found = places(mutated)
    container, key = found[int(random.integers(len(found)))]
    what = int(random.integers(4))
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container["other"] = container[key]
    else:
        strange: Any = STRANGE[int(random.integers(len(STRANGE)))]
        container[key] = container[key] + 1 if what == 2 and isinstance(container[key], int | float) else strange
    try:
        read = RunState.of_json(mutated)
    except InputError:
        return
    assert json.dumps(read.to_json()) == json.dumps(mutated)


@pytest.mark.parametrize("value", [None, [], "x", 1, {"seconds": 1}])
def test_what_is_no_object_of_a_state_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="the checkpoint's state of the run can't be read"):
        RunState.of_json(value)
