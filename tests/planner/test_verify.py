"""Plans held to short runs, in turns."""

from typing import Any

import pytest

from paceline import Strategy
from paceline.api import plan_verification
from paceline.api.plan_verification import LEAST_STEPS, MOST_STEPS, Verified, run_in_turns, steps_of
from tests.planner.test_by_pieces import of_kind
from tests.planner.test_probe import program


class Ran:
    """Stands for a run."""

    def __init__(self, step_s: float, *, interrupted: bool = False) -> None:
        self.summary = {"step_time_s": step_s, "peak_memory_bytes": [1000, 4000], "interrupted": interrupted}


def test_plans_take_turns_and_are_laid_beside_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def train(program: Any, strategy: Strategy, **words: Any) -> Ran:
        assert program.test is None
        assert words["steps"] == words["evaluate_every"]
        ran.append(str(strategy))
        return Ran(0.001 * len(ran))

    monkeypatch.setattr(plan_verification, "train", train)
    one, other = of_kind("alone"), of_kind("replicas")
    found = run_in_turns([one, other], program(), rounds=3, progress=False)
    first, second = str(one.strategy), str(other.strategy)
    assert ran == [first, second, second, first, first, second]
    assert found[0].steps_s == pytest.approx((0.001, 0.004, 0.005))
    assert found[0].ratio == pytest.approx(0.004 / one.cost.step_s)
    assert found[0].held_bytes == (4000, 4000, 4000)
    assert found[0].memory_ratio == pytest.approx(4000 / one.cost.peak.total)


def test_ctrl_c_ends_more_than_the_run_that_it_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_verification, "train", lambda *what, **words: Ran(0.001, interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        run_in_turns([of_kind("alone")], program(), progress=False)


def test_a_line_says_predicted_and_measured() -> None:
    plan = of_kind("replicas")
    said = str(Verified(plan, (0.5, 0.25, 1.0), (4000, 4000, 4000)))
    assert said.startswith(f"verified {plan.strategy}: predicted {plan.cost.step_s * 1e3:.3g} ms, measured 500 ms ")
    assert f"(250 to 1e+03 in 3 runs), {0.5 / plan.cost.step_s:.2f} times; memory " in said
    assert "memory" not in str(Verified(plan, (0.5,)))


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
    (found,) = run_in_turns([of_kind("alone")], program(), rounds=1, progress=False)
    assert found.step_s > 0 < found.held_bytes[0]
