"""Batches in portions: the bits of a round of as many replicas, whoever computes what; and L-BFGS on them."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LBFGS, InputError, Program, Run, train
from paceline.aggregation import Sandblaster
from paceline.core.data_order import DataOrder, DataPosition
from paceline.engine.batch_dispatcher import PortionDispatcher
from paceline.engine.budget import Epochs, Steps
from tests import oracle
from tests.engine import programs
from tests.engine.lbfgs_cases import CASES, ROUNDING, decayed, iterated, portioned
from tests.engine.weightless import Weightless

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def virtual(program: Program, strategy: str, **settings: Any) -> Run:
    return train(program, strategy, engine="virtual", progress=False, **settings)


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("portions", [1, 4, 7])
@pytest.mark.parametrize(
    "fields",
    [{"clip_norm": 0.1}, {"model": programs.batchnorm, "train": programs.data(samples=48)}],
    ids=["clipped", "batchnorm"],
)
def test_portions_are_a_round_of_as_many_replicas(portions: int, replicas: int, fields: dict[str, Any]) -> None:
    """Whatever the times: replicas of very different speed compute any of the portions."""
    program = programs.program(optimizer=MOMENTUM, **fields)
    whole = virtual(program, f"replicas={portions}", steps=6)
    times = "compute=pareto:scale=0.1,shape=1 transfer=0.1"
    run = virtual(program, f"replicas={replicas} aggregation=sandblaster:portions={portions}", steps=6, times=times)
    assert same(whole, run)
    assert run.summary["updates"] == 6
    assert run.summary["applied"] == 6 * portions
    assert run.history[-1].updates == 6


@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_are_those_of_lockstep(epochs: float) -> None:
    program = programs.program()  # 50 samples: two batches of 5 portions of 4, and one of 10 samples
    whole = virtual(program, "replicas=5", epochs=epochs)
    run = virtual(program, "replicas=3 aggregation=sandblaster:portions=5", epochs=epochs)
    assert same(whole, run)
    assert run.summary["updates"] == whole.summary["updates"] == 3 * epochs


def test_accumulated_batches_are_one_portion() -> None:
    program = programs.program(train=programs.data(samples=48))
    whole = virtual(program, "replicas=3 accumulate=2", steps=5)
    assert same(whole, virtual(program, "replicas=2 accumulate=2 aggregation=sandblaster:portions=3", steps=5))


@given(
    replicas=st.integers(1, 6),
    portions=st.integers(1, 9),
    steps=st.integers(1, 4),
    backups=st.booleans(),
    die=st.dictionaries(st.integers(0, 60), st.integers(0, 5), max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_each_portion_counts_once_though_replicas_die(
    replicas: int, portions: int, steps: int, backups: bool, die: dict[int, int]
) -> None:
    order = DataOrder(100, 3, portions, 0)
    start = DataPosition(order, (0,) * portions)
    run = Weightless(
        Sandblaster(portions, backups),
        replicas,
        ["1", "exponential:mean=1", "exponential:mean=20", "pareto:scale=0.1,shape=1", "3", "1"][:replicas],
        samples=lambda *_: 3,
        dispatcher=PortionDispatcher(Steps([steps] * portions, 1), start),
    ).carry(die=die)
    applied = [run.batches[a.replica, a.clock] for a in run.applied]
    batches = [applied[i : i + portions] for i in range(0, len(applied), portions)]
    assert [[(b.stream, b.first) for b in batch] for batch in batches] == [
        [(stream, k) for stream in range(portions)] for k in range(len(batches))
    ]
    assert len(batches) == steps or len(run.dead) == replicas
    assert sorted((a.replica, a.clock) for a in run.arrived) == sorted(
        (a.replica, a.clock) for a in run.applied + run.discarded
    )
    position = run.dispatcher.position
    assert len(batches) <= position.taken[0] <= len(batches) + 1
    if not run.dead:
        assert position == DataPosition(order, (steps,) * portions)


def test_a_batch_is_in_the_budget_whole_or_not_at_all() -> None:
    order = DataOrder(100, 10, 4, 0)
    run = Weightless(
        Sandblaster(4),
        2,
        "1",
        samples=lambda *_: 10,
        dispatcher=PortionDispatcher(Epochs(50, order, 1), DataPosition(order, (0,) * 4)),
    ).carry()
    assert len(run.applied) == 8


def seconds_of_a_batch(aggregation: str, portions: int) -> float:
    """Of 8 replicas, one of which takes 5 s for a portion; the others take 1 s."""
    program = programs.program(train=programs.data(samples=10 * portions), batch_size=10)
    times, delay = "compute=1 transfer=0 apply=0 gradient=0", "fraction=0.125 4"
    return (
        virtual(program, f"replicas=8 aggregation={aggregation}", times=times, delay=delay, steps=20).history[-1].time_s
        / 20
    )


@pytest.mark.parametrize(("portions", "without"), [(40, 1.75), (64, 1.1)])
def test_backups_wait_for_no_slow_replica(portions: int, without: float) -> None:
    """Without, a batch ends 5 s after the slow replica has begun its last portion, which may be at the very end."""
    ideal = portions / (7 + 1 / 5)
    assert ideal <= seconds_of_a_batch(f"sandblaster:portions={portions}", portions) <= 1.15 * ideal
    assert seconds_of_a_batch(f"sandblaster:portions={portions},backups=false", portions) >= without * ideal


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("replicas", "portions"), [(1, 1), (2, 5), (8, 13), (3, 64)])
def test_lbfgs_makes_torchs_steps(name: str, replicas: int, portions: int) -> None:
    model, evaluations = iterated(name)
    strategy = f"replicas={replicas} aggregation=sandblaster:portions={portions}"
    run = virtual(portioned(name, portions), strategy, steps=evaluations)
    oracle.assert_same(run.model, model, ROUNDING)
    assert run.summary["updates"] == evaluations


def test_the_noise_of_gradients_changes_no_step() -> None:
    model, evaluations = iterated("mlp")
    strategy = "replicas=2 aggregation=sandblaster:portions=5"
    run = virtual(portioned("mlp", 5), strategy, steps=evaluations, noise_scale=True)
    oracle.assert_same(run.model, model, ROUNDING)


def test_lbfgs_over_synchronous_replicas() -> None:
    model, evaluations = iterated("mlp")
    run = virtual(portioned("mlp", 3), "replicas=3", steps=evaluations)
    oracle.assert_same(run.model, model, ROUNDING)


def test_the_end_is_the_last_accepted_point_and_its_record() -> None:
    """In the middle of a line search A is a trial, of a loss that may be anything."""
    (_, evaluations), last, trials = iterated("stiff"), math.inf, 0
    inputs, targets = programs.data()
    for steps in range(2, evaluations + 3):
        run = virtual(portioned("stiff", 4), "replicas=2 aggregation=sandblaster:portions=4", steps=steps)
        loss = decayed(run.model(inputs), targets).item()
        assert run.history[-1].test_loss == pytest.approx(loss, rel=1e-12)
        assert loss <= last, "each accepted point is below all before"
        trials += loss == last
        last = loss
    assert trials, "none was in the middle of a search"


def test_a_trial_that_has_met_the_condition_stays() -> None:
    """The last accepted point may not meet it."""
    inputs, targets = programs.data()
    for bound in (1.05, 1.0, 0.9, 0.8):
        strategy = "replicas=2 aggregation=sandblaster:portions=4"
        until: dict[str, Any] = {"until": f"test_loss<={bound}", "steps": 100, "evaluate_every": 1}
        run = virtual(portioned("stiff", 4), strategy, **until)
        assert run.history[-1].test_loss is not None
        assert decayed(run.model(inputs), targets).item() == pytest.approx(run.history[-1].test_loss, rel=1e-12)
        assert run.history[-1].test_loss <= bound


@pytest.mark.parametrize(
    ("strategy", "fields", "settings", "message"),
    [
        (
            "replicas=2 aggregation=asynchronous",
            {},
            {},
            "combines Δs of others, or of some; write aggregation=sandblaster",
        ),
        ("replicas=2 aggregation=synchronous:backups=1", {}, {}, "combines Δs of others"),
        ("replicas=2 aggregation=local-steps:period=2", {}, {}, "combines Δs of others"),
        ("replicas=2 aggregation=synchronous:combine=sum", {"batch_size": 25}, {}, "write combine=mean"),
        ("replicas=2 aggregation=sandblaster:portions=4", {}, {}, "write batch_size=13, or aggregation=sandblaster"),
        ("replicas=2", {}, {}, "write batch_size=25, or aggregation=sandblaster"),
        ("replicas=2", {"batch_size": 25, "clip_norm": 1.0}, {}, "leave clip_norm out"),
        ("replicas=2", {"batch_size": 25}, {"on_nonfinite": "skip"}, "on_nonfinite='stop'"),
    ],
)
def test_what_is_no_evaluation_of_all_samples_is_refused(
    strategy: str, fields: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        virtual(programs.program(optimizer=LBFGS, **fields), strategy, steps=2, **settings)


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("replicas=2 aggregation=sandblaster", {"on_nonfinite": "skip"}, "waits for all portions of a batch"),
        ("replicas=2 aggregation=sandblaster pull_ahead=true", {}, "combines Δs of the newest A alone"),
        ("replicas=2 aggregation=local-steps:over=sandblaster", {}, "write a policy that takes gradients"),
        ("replicas=2 aggregation=sandblaster:portions=0", {}, "portions"),
    ],
)
def test_what_can_not_be_dealt_out_is_refused(strategy: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        virtual(programs.program(), strategy, steps=2, **settings)


def test_data_of_a_function_are_refused() -> None:
    def batches(replica: int, replicas: int, seed: int) -> Any:
        del replica, replicas, seed
        yield programs.data(samples=4)

    with pytest.raises(InputError, match="write train= as a data set"):
        virtual(programs.program(train=batches), "replicas=2 aggregation=sandblaster", steps=2)


def test_own_loops_in_virtual_time_are_refused() -> None:
    with pytest.raises(InputError, match="write engine=local, or another policy"):
        virtual(programs.program(), "replicas=2 aggregation=sandblaster", steps=2, loop=lambda worker: None)


def test_a_global_batch_is_divided_into_portions() -> None:
    fields: dict[str, Any] = {"batch_size": None, "global_batch_size": 20}
    strategy = "replicas=3 aggregation=sandblaster:portions=5"
    assert same(virtual(programs.program(), strategy, steps=4), virtual(programs.program(**fields), strategy, steps=4))
    with pytest.raises(InputError, match=r"evenly over portions=5 .* write global_batch_size=20"):
        virtual(programs.program(**fields | {"global_batch_size": 21}), strategy, steps=4)


@pytest.mark.parametrize("before", ["replicas=4", "replicas=2 aggregation=sandblaster:portions=4"])
def test_it_goes_on_after_another_policy_and_before_one(tmp_path: Path, before: str) -> None:
    """A round of four replicas, and four portions: whoever goes on takes the next one."""
    program = programs.program(optimizer=MOMENTUM)
    virtual(program, before, steps=4, checkpoint=tmp_path)
    whole = virtual(program, "replicas=4", steps=9)
    for after in ("replicas=4", "replicas=3 aggregation=sandblaster:portions=4"):
        run = virtual(program, after, steps=9, resume=tmp_path)
        assert same(whole, run)
        assert run.summary["updates"] == 9


def test_torchs_own_lbfgs_is_refused_with_what_does_the_same() -> None:
    with pytest.raises(InputError, match=r"write optimizer=paceline\.LBFGS"):
        virtual(programs.program(optimizer=torch.optim.LBFGS), "replicas=1", steps=1)
