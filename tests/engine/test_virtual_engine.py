"""Virtual time: budgets, what takes how long, when it is scored, and what ends a run."""

import functools
import itertools
import math
import signal
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import InputError, NonFiniteError, Program, Run, Strategy, WorkerError, train
from paceline.core.delta import InPlace
from paceline.device import GENERATOR
from paceline.trace.spans import SERVER
from tests import oracle
from tests.aggregation.policy_values import policies
from tests.engine import programs


def run(strategy: str = "replicas=2", program: Program | None = None, **settings: Any) -> Run:
    return train(program or programs.program(), strategy, engine="virtual", progress=False, **settings)


# ------------------------------------------------------------------------------------------------------------- budgets


@given(
    policy=policies().filter(lambda p: not isinstance(p.delta, InPlace)),
    replicas=st.integers(1, 4),
    steps=st.integers(1, 6),
    seconds=st.sampled_from([None, 0.5, 3.0, 11.0]),
    delay=st.sampled_from([None, "exponential:mean=2"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_delta_meets_one_fate_whatever_ends_the_run(
    policy: Any, replicas: int, steps: int, seconds: float | None, delay: str | None
) -> None:
    strategy = Strategy(replicas=replicas, aggregation=policy)
    budget: dict[str, Any] = {"steps": steps} if seconds is None else {"seconds": seconds}
    times = "compute=exponential:mean=1 apply=0.01 gradient=0.01"
    try:
        summary = run(strategy, **budget, delay=delay, times=times, evaluate_every=100).summary
    except InputError:
        with pytest.raises(InputError):  # it is the policy that refuses so many replicas: k or a quorum is beyond P
            policy.resolved(learning_rate=0.1, replicas=replicas)
        return
    assert summary["gradients"] == summary["applied"] + summary["discarded"]
    assert sum(summary["staleness"].values()) == summary["applied"]
    if seconds is None:
        assert summary["steps"] == steps
    else:
        assert summary["seconds"] == seconds


def test_steps_are_each_replicas_own() -> None:
    summary = run("replicas=4 aggregation=asynchronous", steps=9, delay="fraction=0.5 constant:value=5").summary
    assert (summary["steps"], summary["gradients"]) == (9, 36)
    assert summary["seconds"] == pytest.approx(9 * 5.01)


@pytest.mark.parametrize("aggregation", ["buffered:k=3", "synchronous", "smooth-switch:every=1"])
def test_what_is_buffered_when_time_is_up_is_discarded(aggregation: str) -> None:
    strategy = f"replicas=3 aggregation={aggregation}"
    summary = run(strategy, seconds=10.5, times="compute=1", delay="fraction=0.3 constant:value=3").summary
    # One of the three takes 4 s: full rounds end at 4 and 8; at 9 the other two bring one more each.
    if "switch" not in aggregation:
        assert (summary["updates"], summary["gradients"], summary["discarded"]) == (2, 8, 2)
    assert summary["discarded"] == summary["gradients"] - summary["applied"] == 2
    assert summary["seconds"] == 10.5


def test_an_update_under_way_when_time_is_up_is_not_made() -> None:
    summary = run("replicas=1", seconds=9, times="compute=1 apply=1.5").summary
    assert (summary["updates"], summary["gradients"], summary["discarded"]) == (3, 4, 1)


def test_a_step_that_ends_with_the_budget_counts() -> None:
    assert run("replicas=1", seconds=10, times="compute=1").summary["updates"] == 10


@pytest.mark.parametrize("aggregation", ["synchronous", "asynchronous", "buffered:k=2,hold=false"])
def test_few_samples_in_many_epochs(aggregation: str) -> None:
    program = programs.program(train=programs.data(samples=3))
    trained = run(f"replicas=4 aggregation={aggregation}", program, epochs=5)
    assert sum(w is not None for w in trained.summary["utilisation"]) == 4
    assert trained.summary["seconds"] == pytest.approx(0.05)


@pytest.mark.parametrize("unit", [{"steps": 100}, {"epochs": 20}, {"seconds": 100}])
def test_until_ends_the_run_at_the_first_record_that_meets_it(unit: dict[str, Any]) -> None:
    trained = run(**unit, until="updates>=5", evaluate_every=1, times="compute=1")
    met = [record.updates >= 5 for record in trained.history]
    assert met == [False] * (len(met) - 1) + [True]
    assert trained.summary["updates"] == trained.history[-1].updates < 20


def test_until_alone() -> None:
    trained = run(until="train_loss<=1.0", evaluate_every=0.1)
    losses = [record.train_loss for record in trained.history]
    assert losses[-1] <= 1.0 < min(losses[:-1])


def test_a_condition_that_only_the_last_record_meets() -> None:
    trained = run(steps=10, until="updates>=10", evaluate_every=3)
    assert [record.updates for record in trained.history] == [0, 3, 6, 9, 10]


def test_a_condition_met_while_the_server_is_at_work() -> None:
    trained = run(seconds=100, until="gradients>=4", evaluate_every=1, times="compute=1 apply=3")
    assert trained.history[-1].gradients >= 4
    assert trained.summary["seconds"] == trained.history[-1].time_s < 100
    assert trained.summary["gradients"] == trained.summary["applied"] + trained.summary["discarded"]


# ---------------------------------------------------------------------------------------------------- what takes time


@pytest.mark.parametrize(
    ("strategy", "times", "seconds"),
    [
        ("replicas=1", "compute=1", 3),
        ("replicas=1", "compute=1 apply=0.5 gradient=0.25", 3 * 1.75),
        ("replicas=1", "compute=1 transfer=0.25", 3 * 1.5),
        ("replicas=2", "compute=1 apply=0.5 gradient=0.25", 3 * 2),
        # Both arrive at 1; the server is at work on one until 2 and on the other until 3, and so without a break to 7.
        ("replicas=2 aggregation=asynchronous", "compute=1 apply=1", 7),
        ("replicas=1 accumulate=4", "compute=1 apply=1", 3 * 5),
        ("replicas=1 aggregation=local-steps:period=2", "compute=1 apply=1", 3 + 2),
    ],
)
def test_virtual_time_adds_up(strategy: str, times: str, seconds: float) -> None:
    assert run(strategy, steps=3, times=times).summary["seconds"] == pytest.approx(seconds)


def test_delays_slow_a_fixed_part_of_the_replicas() -> None:
    trained = run("replicas=4", steps=10, times="compute=1", delay="fraction=0.5 constant:value=1")
    assert trained.summary["seconds"] == pytest.approx(20)
    assert sorted(trained.summary["utilisation"]) == pytest.approx([0.5, 0.5, 1, 1])


def test_measured_time_is_noted() -> None:
    summary = run("replicas=1", steps=3, times="compute=measured").summary
    assert summary["seconds"] == pytest.approx(3 * summary["notes"]["compute_measured_s"]) != 0


@pytest.mark.parametrize("compute", ["0", "normal:mean=-1,std=0"])
def test_seconds_need_something_that_takes_time(compute: str) -> None:
    with pytest.raises(InputError, match=r"nothing takes time, so seconds never pass; write compute=0.01, or steps="):
        run(seconds=1, times=f"compute={compute}")
    assert run(steps=2, times=f"compute={compute}").summary["seconds"] == 0


def test_spans_tile_each_replicas_time() -> None:
    times = "compute=exponential:mean=1 transfer=0.125 apply=0.5"
    trained = run("replicas=3 aggregation=buffered:k=2", steps=5, times=times, delay="constant:value=2", trace=True)
    for replica in range(3):
        mine = [s for s in trained.spans if s.replica == replica]
        assert mine[0].start_ns == 0
        assert all(abs(b.start_ns - a.end_ns) <= 1 for a, b in itertools.pairwise(mine))
        assert [s.action for s in mine].count("compute") == 5
    assert {s.action for s in trained.spans} == {"pull", "compute", "delay", "push", "wait", "apply"}
    assert sum(s.replica == SERVER for s in trained.spans) == trained.summary["updates"]
    busy = [
        sum(s.end_ns - s.start_ns for s in trained.spans if s.replica == r and s.action in ("compute", "delay"))
        for r in range(3)
    ]
    seconds = trained.summary["seconds"]
    assert [b / 1e9 / seconds for b in busy] == pytest.approx(trained.summary["utilisation"], rel=1e-6)


def test_a_cancelled_attempt_is_work_up_to_its_end() -> None:
    trained = run(
        "replicas=2 aggregation=buffered:k=1,cancel=true", steps=4, times="compute=1", delay="constant:value=9"
    )
    summary = trained.summary
    assert (summary["seconds"], summary["cancelled"], summary["updates"]) == (pytest.approx(4), 4, 4)
    assert summary["utilisation"] == pytest.approx([1, 1])


# --------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("budget", [{"seconds": 2.0}, {"steps": 200}, {"epochs": 30}])
def test_a_run_is_scored_at_its_start_and_at_twenty_points(budget: dict[str, Any]) -> None:
    trained = run("replicas=2 aggregation=asynchronous", **budget, delay="exponential:mean=0.01")
    first = trained.history[0]
    assert (len(trained.history), first.time_s, first.updates, first.gradients) == (21, 0.0, 0, 0)
    assert trained.history[-1].updates == trained.summary["updates"]
    if "seconds" in budget:
        assert [r.time_s for r in trained.history] == pytest.approx([i * 0.1 for i in range(21)])


def test_records_show_a_as_it_was_then() -> None:
    program = programs.program(test=programs.data(samples=20))
    history = run("replicas=1", program, seconds=10, evaluate_every=2.5, times="compute=1").history
    assert [(r.time_s, r.updates) for r in history] == [(0, 0), (2.5, 2), (5, 5), (7.5, 7), (10, 10)]
    for record in history:
        plain = oracle.Plain(program).load(oracle.one_process(program, 1, record.updates))
        for name, (inputs, targets) in {"train": program.train, "test": program.test}.items():
            output = plain.module(inputs)
            loss = torch.nn.functional.cross_entropy(output, targets).item()
            assert record.row()[f"{name}_loss"] == pytest.approx(loss, rel=1e-12)
        assert record.test_accuracy == (output.argmax(1) == targets).double().mean().item()


def test_an_update_that_takes_time_shows_when_it_is_made() -> None:
    history = run("replicas=1", seconds=3, evaluate_every=0.5, times="compute=1 apply=1").history
    assert [r.updates for r in history] == [0, 0, 0, 0, 1, 1, 1]
    assert [r.gradients for r in history] == [0, 0, 0, 1, 1, 1, 1] or history[2].gradients == 1


# ------------------------------------------------------------------------------------------------- what goes wrong


def poisoned(**fields: Any) -> Program:
    """Sample 17 is not a number."""
    inputs, targets = programs.data()
    inputs = inputs.clone()
    inputs[17] = math.nan
    return programs.program(train=(inputs, targets), **fields)


def where(program: Program, replicas: int) -> tuple[int, int]:
    """(replica, k) of the batch of the first epoch that holds sample 17."""
    order = oracle.order(program, replicas)
    return next((r, k) for k in range(order.rounds_per_epoch(0)) for r in range(replicas) if 17 in order.batch(r, k))


POLICIES = [
    "synchronous",
    "asynchronous",
    "buffered:k=2,hold=false",
    "local-steps:period=2",
    "elastic-averaging:period=1",
]


@pytest.mark.parametrize("model", [programs.mlp, programs.dropout])
@pytest.mark.parametrize("aggregation", POLICIES)
def test_a_loss_that_is_no_number_stops_the_run_and_names_its_step(aggregation: str, model: Any) -> None:
    program = poisoned(model=model)
    replica, k = where(program, 2)
    step = k // 2 + 1 if "local" in aggregation else k + 1
    with pytest.raises(NonFiniteError, match=rf"the Δ of replica {replica} at its step {step} is not finite.*skip"):
        run(f"replicas=2 aggregation={aggregation}", program, steps=14)


@pytest.mark.parametrize("model", [programs.mlp, programs.batchnorm])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("aggregation", POLICIES)
def test_or_is_discarded_and_counted(aggregation: str, optimizer: Any, model: Any) -> None:
    program = poisoned(model=model, optimizer=functools.partial(optimizer, lr=0.01), batch_size=5)
    trained = run(f"replicas=2 aggregation={aggregation}", program, epochs=2, on_nonfinite="skip")
    assert trained.summary["nonfinite"] == 2
    assert trained.summary["discarded"] >= 2
    fresh = oracle.Plain(program).values()
    for name, parameter in trained.model.named_parameters():
        assert torch.isfinite(parameter).all()
        # A bias before BatchNorm has no gradient.
        assert not torch.equal(parameter, fresh[name]) or (name, model) == ("0.bias", programs.batchnorm)


def test_gradients_that_overflow_count_as_not_finite() -> None:
    program = programs.program(loss=lambda output, target: (output * 1e200).square().sqrt().sum() ** 2 * 1e-300)
    with pytest.raises(NonFiniteError, match="replica 0 at its step 1"):
        run(program=program, steps=1)


class Grumpy(torch.nn.Linear):
    """Fails at its n-th training batch; in evaluation it works."""

    def __init__(self, good: int) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.good = good

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.good -= 1
            if self.good < 0:
                raise RuntimeError("out of patience")
        return super().forward(x)


def test_a_model_that_fails_is_named_with_its_replica_and_keeps_its_traceback() -> None:
    program = programs.program(model=functools.partial(Grumpy, 5))
    with pytest.raises(WorkerError, match="replica 1 failed at its step 3: RuntimeError: out of patience") as caught:
        run(program=program, steps=10)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_bad_target_is_named_also_where_gradients_are_batched() -> None:
    inputs, targets = programs.data()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, target if torch.is_grad_enabled() else target.clamp(0, 2))

    program = programs.program(loss=loss, train=(inputs, targets.clone().index_fill(0, torch.tensor(17), 9)))
    replica, k = where(program, 2)
    with pytest.raises(WorkerError, match=rf"replica {replica} failed at its step {k + 1}: IndexError: Target 9"):
        run(program=program, epochs=1)


def test_a_test_set_that_can_not_be_scored() -> None:
    inputs, targets = programs.data()
    with pytest.raises(WorkerError, match=r"the test set can't be scored: IndexError: Target 1. is out of bounds"):
        run(program=programs.program(test=(inputs, targets + 10)), epochs=1)


def test_ctrl_c_ends_a_run_cleanly() -> None:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 60:
            signal.raise_signal(signal.SIGINT)
        return torch.nn.functional.cross_entropy(output, target)

    before = signal.getsignal(signal.SIGINT)
    trained = run("replicas=3 aggregation=buffered:k=2", programs.program(loss=loss), steps=1000)
    assert signal.getsignal(signal.SIGINT) is before
    assert trained.summary["interrupted"]
    assert 0 < trained.summary["updates"] == trained.history[-1].updates
    assert trained.summary["gradients"] == trained.summary["applied"] + trained.summary["discarded"] < 1000


def test_a_keyboard_interrupt_in_the_users_own_code_too() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad and oracle_calls.append(None) is None and len(oracle_calls) == 20:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(output, target)

    oracle_calls: list[None] = []
    trained = run("replicas=3", programs.program(loss=loss, model=programs.dropout), steps=1000)
    assert trained.summary["interrupted"]
    assert trained.summary["gradients"] == trained.summary["applied"] + trained.summary["discarded"]


def test_hogwild_needs_memory_that_replicas_share() -> None:
    with pytest.raises(InputError, match=r"aggregation=hogwild writes memory that replicas share.*write engine=local"):
        run("replicas=2 aggregation=hogwild", steps=1)


def test_no_other_thread_draws_between_the_seed_of_a_step_and_its_end() -> None:
    """Runs in several threads would disturb one another's dropout."""
    held = list[bool]()

    def look() -> None:
        free = GENERATOR.acquire(blocking=False)
        if free:
            GENERATOR.release()
        held.append(not free)

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = programs.mlp()

        def forward(self, x: Tensor) -> Any:
            if self.training:
                other = threading.Thread(target=look)
                other.start()
                other.join()
            return self.inner(x)

    run("replicas=2", programs.program(model=Looking), steps=2)
    assert held == [True] * 5  # of the step before the start, and of the run's four
