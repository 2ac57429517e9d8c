"""Budgets, evaluation points, and what policies ask to be told: the small parts that all engines share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.aggregation import Aggregation, Asynchronous, parse
from paceline.core.conditions import Condition
from paceline.core.data_order import BatchRange, DataOrder
from paceline.core.records import Record
from paceline.engine.base import Budget, Job
from paceline.engine.budget import Epochs, EvalSchedule, Steps, Unbounded
from paceline.engine.coordinator_state import Tally
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.run_history import RunHistory
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.strategy import Strategy
from tests.engine import programs


@given(steps=st.integers(1, 50), micro_steps=st.integers(1, 8), accumulated=st.booleans())
def test_steps_are_granted_to_each_and_no_more(steps: int, micro_steps: int, accumulated: bool) -> None:
    """All micro-steps of an accumulated gradient make one step; each of its own optimizer's makes one."""
    allowance = Steps([steps * (micro_steps if accumulated else 1)] * 2, micro_steps)
    granted = iter(lambda: allowance.grant(1, BatchRange(1, 0, micro_steps)), 0)
    counts = list(granted)
    assert sum(counts) == steps * (micro_steps if accumulated else 1)
    assert set(counts[:-1]) <= {micro_steps}
    assert allowance.grant(1, BatchRange(1, 0, 1)) == 0
    assert allowance.grant(0, BatchRange(0, 0, 1)) > 0


@pytest.mark.parametrize("epochs", [0.07, 0.28, 1.1, 2])
def test_epochs_have_no_batch_too_many_from_rounding(epochs: float) -> None:
    """0.07 · 100 is a little more than 7 in binary."""
    allowance = Epochs(epochs * 100, DataOrder(100, 1, 1, 0), 1)
    assert len(list(iter(lambda: allowance.grant(0, BatchRange(0, 0, 1)), 0))) == round(epochs * 100)


def test_time_alone_bounds_nothing() -> None:
    assert {Unbounded(3).grant(0, BatchRange(0, 0, 3)) for _ in range(5)} == {3}


def budget(every: float) -> Budget:
    return Budget("seconds", 10, every)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.sampled_from([0.1, 0.3, 1.0, 7.0]))
def test_points_are_met_once_each_in_order(times: list[float], every: float) -> None:
    points, met = EvalSchedule(budget(every)), 0
    for time in sorted(times):
        if points.reached(time):
            met += 1
            assert points.next > time
        assert not points.reached(time)
    assert 1 <= met <= int(max(times) / every * (1 + 1e-9)) + 1 or points.next > 0


@pytest.mark.parametrize("every", [0.1, 1 / 3, 0.7])
def test_points_do_not_drift(every: float) -> None:
    points = EvalSchedule(budget(every))
    assert [points.step_over() for _ in range(1000)] == [i * every for i in range(1000)]


@pytest.mark.parametrize(("unit", "spent"), [("seconds", 2.5), ("steps", 3.0), ("epochs", 2.0)])
def test_what_is_spent_is_in_the_budgets_unit(unit: Any, spent: float) -> None:
    context = RunContext(Job(programs.program(), Strategy(replicas=2, accumulate=2), Budget(unit, 10, 1)))
    assert context.order is not None
    tally = Tally(micro_steps=12, seen_samples=2 * context.order.samples)
    history = RunHistory(context, SimpleNamespace(tally=tally), "", None)  # type: ignore[arg-type]
    assert history.spent(2.5) == spent


@pytest.mark.parametrize(
    ("field", "above", "bound", "met"),
    [
        ("test_accuracy", True, 0.9, True),
        ("test_accuracy", True, 0.91, False),
        ("train_loss", False, 0.5, True),
        ("test_top5", True, 0.99, True),
        ("test_loss", False, 100, False),
    ],
)
def test_a_condition_is_met_by_what_was_scored(field: str, above: bool, bound: float, met: bool) -> None:
    record = Record(1.0, 5, 5, 1, 0.0, 0.5, None, 0.9, {"top5": 0.99})
    assert Condition(field, above, bound).met(record) is met


class Curious(Asynchronous):
    """Asks for everything."""

    needs = frozenset({"norm", "agreement", "server"})  # type: ignore[assignment]


def observer(policy: Aggregation[Any]) -> tuple[DeltaStatistics, ServerOptimizer]:
    owner = ServerOptimizer(programs.program(), policy, first_state(programs.program(), ())[1])
    return DeltaStatistics(policy, owner), owner


def test_policies_are_told_what_they_ask_for() -> None:
    watcher, owner = observer(Curious())
    assert watcher.looks_inside
    delta, opposite = owner.state.clone(), owner.state.clone()
    opposite.parameters[0].neg_()
    norm = float(torch.linalg.vector_norm(delta.parameters[0]))
    first = watcher.observe(delta, 2.0)
    assert first == {"norm": pytest.approx(norm), "agreement": 0.0, "server": 0.0}
    owner.apply([(delta, 1.0)])
    watcher.applied(0.5)
    assert watcher.observe(delta, 4.0) == {"norm": pytest.approx(norm), "agreement": pytest.approx(1), "server": 0.25}
    assert watcher.observe(opposite, 5.0)["agreement"] == pytest.approx(-1)
    assert watcher.observe(opposite, 5.0)["server"] == 0.0


def test_nothing_is_computed_unasked() -> None:
    watcher, owner = observer(parse("asynchronous"))
    assert not watcher.looks_inside
    assert watcher.observe(owner.state, 1.0) == {}
