"""Closed forms held to short runs of their kind."""

from dataclasses import replace

import pytest

from paceline.planner.base import Plan
from paceline.planner.program.closed_form import corrected, passes
from paceline.planner.program.profile import kind
from tests.planner.profiles import PROFILE
from tests.planner.test_by_pieces import of_kind, plans


@pytest.mark.parametrize("wanted", ["alone", "replicas", "stages", "shards"])
def test_what_is_run_takes_and_holds_what_it_took_and_held(wanted: str) -> None:
    """Where closed forms say of the run what they say of the plan, the plan is corrected to the run."""
    plan, told = of_kind(wanted), PROFILE.runs[wanted]
    cost = plan.cost
    computed_s = sum(cost.terms[name] for name in ("compute", "shards", "bubble", "stages"))
    ran = replace(told, arrangement=plan.arrangement, closed_s=cost.step_s, closed_compute_s=computed_s)
    found = corrected(plan, replace(PROFILE, runs={wanted: ran}))
    assert found.cost.step_s == pytest.approx(ran.step_s)
    assert found.samples_per_s == pytest.approx(plan.arrangement.samples / ran.step_s)
    assert {each.context for each in found.cost.memory} == {ran.beside_bytes}


def other_passes(plan: Plan) -> Plan:
    """One that differs in how many micro-batches there are."""
    a = plan.arrangement
    return next(
        p
        for p in plans()
        if kind(p.arrangement) == kind(a) and passes(p.arrangement) != passes(a) and p.arrangement.recompute == "none"
    )


def test_what_passes_took_beside_grows_with_them() -> None:
    """Of the run by hand: 2 ms of computing in three passes, and of the rest 2.3 ms more than the 1 ms predicted."""
    for plan in (of_kind("stages"), other_passes(of_kind("stages"))):
        found = corrected(plan, PROFILE)
        added = 2e-3 / 3 * passes(plan.arrangement) + (9.3e-3 - 6e-3) - 1e-3
        assert found.cost.step_s == pytest.approx(plan.cost.step_s + added)
        assert found.cost.terms["waiting"] == pytest.approx(plan.cost.terms["waiting"] + added)
        assert found.high_s / found.cost.step_s == pytest.approx(plan.high_s / plan.cost.step_s)


def test_what_took_less_than_predicted_takes_as_many_times_less_elsewhere() -> None:
    """Half the computing, and of the rest the half."""
    plan = of_kind("replicas")
    quick = replace(PROFILE.runs["replicas"], closed_s=26e-3, closed_compute_s=12e-3, step_s=13e-3)
    found = corrected(plan, replace(PROFILE, runs={"replicas": quick}))
    assert found.cost.step_s == pytest.approx(plan.cost.step_s / 2)


def test_without_a_run_nothing_is_added_and_who_holds_a_has_its_optimizer() -> None:
    plan = of_kind("replicas")
    found = corrected(plan, replace(PROFILE, runs={}))
    assert found.cost.step_s == plan.cost.step_s
    assert found.cost.memory[0].optimizer == 0
    assert {each.context for each in found.cost.memory} == {PROFILE.base_bytes}
