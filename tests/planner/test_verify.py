"""Plans held to short runs, in turns."""

from typing import Any

import pytest

import paceline
from paceline import Strategy
from paceline.api import plan_verification
from paceline.api.plan_verification import (
    LEAST_STEPS,
    MOST_STEPS,
    WORTH_TRYING_S,
    Verified,
    compiled_if_it_pays,
    expected_s,
    run_in_turns,
    steps_of,
    verify,
)
from paceline.core.errors import InputError
from paceline.train_options import TrainOptions
from tests.planner.test_by_pieces import of_kind
from tests.planner.test_probe import program


class Ran:
    """Stands for a run."""

    def __init__(self, step_s: float, *, interrupted: bool = False) -> None:
        self.summary = {"step_time_s": step_s, "peak_memory_bytes": [1000, 4000], "interrupted": interrupted}


def test_plans_take_turns_and_are_laid_beside_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def train(program: Any, strategy: Strategy, **words: Any) -> Any:
        assert program.test is None
        assert words["steps"] == words["evaluate_every"]
        ran.append(str(strategy))
        return Ran(0.001 * len(ran))

    one, other = of_kind("alone"), of_kind("replicas")
    found = run_in_turns(train, [one, other], program(), rounds=3, progress=False)
    first, second = str(one.strategy), str(other.strategy)
    assert ran == [first, second, second, first, first, second]
    assert found[0].steps_s == pytest.approx((0.001, 0.004, 0.005))
    assert found[0].ratio == pytest.approx(0.004 / one.cost.step_s)
    assert found[0].held_bytes == (4000, 4000, 4000)
    assert found[0].memory_ratio == pytest.approx(4000 / one.cost.peak.total)


def test_ctrl_c_ends_more_than_the_run_that_it_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*what: Any, **words: Any) -> Any:
        return Ran(0.001, interrupted=True)

    with pytest.raises(KeyboardInterrupt):
        run_in_turns(interrupted, [of_kind("alone")], program(), progress=False)


def test_a_line_says_predicted_and_measured() -> None:
    plan = of_kind("replicas")
    said = str(Verified(plan, (0.5, 0.25, 1.0), (4000, 4000, 4000)))
    assert said.startswith(f"verified {plan.strategy}: predicted {plan.cost.step_s * 1e3:.3g} ms, measured 500 ms ")
    assert f"(250 to 1e+03 in 3 runs), {0.5 / plan.cost.step_s:.2f} times; memory " in said
    assert "memory" not in str(Verified(plan, (0.5,)))


class Machine:
    """Stands for ``train`` on a machine where a compiled step takes so many times a plain one's."""

    def __init__(self, compiled: float) -> None:
        self.compiled, self.ran = compiled, list[str]()

    def __call__(self, program: Any, strategy: Strategy, **words: Any) -> Any:
        self.ran.append(str(strategy))
        return Ran(0.001 * (self.compiled if strategy.compile else 1.0))


@pytest.mark.parametrize(
    ("compiled", "said"), [(0.8, "0.80 times the plain one's: to compile pays"), (0.97, "not pay")]
)
def test_the_best_is_run_compiled_in_the_same_turns(
    monkeypatch: pytest.MonkeyPatch, compiled: float, said: str
) -> None:
    machine = Machine(compiled)
    one, other = of_kind("replicas"), of_kind("alone")
    *found, whole, graph = verify(machine, [one, other], program(), progress=False)
    third, fourth = f"{one.strategy} compile=true", f"{one.strategy} compile=graph"
    turn = [str(one.strategy), str(other.strategy), third, fourth]
    assert machine.ran == [third, fourth, *turn, *turn[::-1], *turn]
    assert [each.plan for each in found] == [one, other]
    assert whole.plain == graph.plain == found[0]
    assert said in str(whole)
    for budget, tried in ((WORTH_TRYING_S, True), (WORTH_TRYING_S - 1, False)):
        chosen = compiled_if_it_pays(machine, one, program(), TrainOptions(seconds=budget), False)
        assert (str(chosen.plan.strategy) if chosen else None) == (third if tried and compiled < 0.9 else None)


def test_where_it_cannot_be_compiled_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(program: Any, strategy: Strategy, **words: Any) -> Any:
        if strategy.compile:
            raise InputError("there is no compiler")
        return Ran(0.001)

    (found,) = verify(train, [of_kind("replicas")], program(), progress=False)
    assert str(found).endswith(
        "; compile=true can't be run: there is no compiler; compile=graph can't be run: there is no compiler"
    )
    assert compiled_if_it_pays(train, of_kind("replicas"), program(), TrainOptions(seconds=1e6), False) is None


def test_how_long_a_run_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, given = of_kind("replicas"), program()
    assert expected_s(plan, given, TrainOptions(seconds=7.0)) == 7.0
    assert expected_s(plan, given, TrainOptions(steps=100)) == pytest.approx(100 * plan.cost.step_s)
    samples = len(given.train[1])
    assert expected_s(plan, given, TrainOptions(epochs=3)) == pytest.approx(3 * samples / plan.samples_per_s)
    assert expected_s(plan, given, TrainOptions(until="test_loss<0.1")) is None


def test_runs_are_as_long_as_they_have_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = of_kind("replicas")
    monkeypatch.setattr(plan_verification, "RUN_S", 100 * plan.cost.step_s)
    assert steps_of(plan) == 100
    monkeypatch.setattr(plan_verification, "RUN_S", 0.0)
    assert steps_of(plan) == LEAST_STEPS
    monkeypatch.setattr(plan_verification, "RUN_S", 1e9)
    assert steps_of(plan) == MOST_STEPS


@pytest.mark.timeout(240.0)  # runs in processes that each import torch
def test_real_runs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_verification, "RUN_S", 0.0)
    (found,) = run_in_turns(paceline.train, [of_kind("alone")], program(), rounds=1, progress=False)
    assert found.step_s > 0 < found.held_bytes[0]
