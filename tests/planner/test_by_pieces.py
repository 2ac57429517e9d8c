"""Plans predicted from components, and the choice of plans to predict."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.errors import InputError, WorkerError
from paceline.engine.base import Job
from paceline.engine.step_profile.forecast import Forecast
from paceline.planner.base import Plan
from paceline.planner.program import closed_form
from paceline.planner.program import plans as by_pieces
from paceline.planner.program import plans as of_program
from paceline.planner.program.closed_form import corrected, job_for, once, pieces_of, staged_s
from paceline.planner.program.measured_workload import MeasuredWorkload, cluster_of
from paceline.planner.program.plans import (
    firsts,
    plainest_first,
    plans_here,
    predict_from_components,
    select,
    with_pieces,
)
from paceline.planner.program.profile import Pieces, Profile, kind
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import key, search
from paceline.program import Program
from tests.planner.profiles import PROFILE, busy
from tests.planner.test_probe import program

WORKLOAD = MeasuredWorkload(PROFILE, 2, 8)


def plans() -> tuple[Plan, ...]:
    asked = Objectives(workers=2, engine="local", fixed="replica", simulated=200)
    return search(WORKLOAD, cluster_of(PROFILE, 2), asked).plans


def of_kind(wanted: str) -> Plan:
    return next(plan for plan in plans() if kind(plan.arrangement) == wanted)


def by(plan: Plan) -> float:
    return key(plan, WORKLOAD, Objectives())[0]


SEEN = Pieces(0.010, 0.003, 0.004, 0.9, 1.2)


def test_a_step_is_its_pieces_and_what_a_run_took_beside_and_terms_sum_up_to_it() -> None:
    for wanted, beside_s in (("alone", 1e-4), ("replicas", 2e-4), ("stages", 3e-4)):
        plan = of_kind(wanted)
        found = with_pieces(plan, SEEN, PROFILE.runs[wanted])
        assert found.cost.step_s == pytest.approx(0.010 + 0.003 + 0.004 + beside_s)
        assert found.cost.terms["optimizer"] == 0.004
        assert found.cost.terms["waiting"] == pytest.approx(beside_s)
        assert found.samples_per_s == pytest.approx(plan.arrangement.samples / found.cost.step_s)
        assert found.provenance["compute"] == by_pieces.PREDICTED
        own = [staged_s(each.cost) for each in (plan, found)]
        assert found.cost.terms["bubble"] / own[1] == pytest.approx(plan.cost.terms["bubble"] / own[0])


def test_where_a_run_took_less_than_its_pieces_a_step_takes_as_much_less() -> None:
    """8.6 of 9 ms."""
    plan = of_kind("shards")
    found = with_pieces(plan, SEEN, PROFILE.runs["shards"])
    assert found.cost.step_s == pytest.approx(0.017 * 8.6 / 9)
    assert found.cost.terms["waiting"] == pytest.approx(0.0, abs=1e-12)
    assert sum(found.cost.terms.values()) == pytest.approx(found.cost.step_s)


def test_its_interval_is_that_of_passes_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(measured: Forecast, updated_s: float) -> Pieces:
        monkeypatch.setattr(closed_form, "forecast", lambda job, fork_server: measured)
        monkeypatch.setattr(closed_form, "update_s", lambda job, gradients, steps_on: updated_s)
        return pieces_of(job_for(program(), "replicas=2"), None, busy(2))  # type: ignore[arg-type]

    few = of(Forecast([1.0], 0.0, 0.0), 0.0)
    assert (few.low, few.high) == (0.9, 1.2)  # the profile's own
    many = of(Forecast([float(n) for n in range(1, 102)], 1.0, 2.0), 4.0)
    assert many == Pieces(51.0, 3.0, 4.0, pytest.approx(6 / 51), pytest.approx(96 / 51))
    found = with_pieces(of_kind("replicas"), many, PROFILE.runs["replicas"])
    assert (found.low_s, found.high_s) == pytest.approx((13 + 2e-4, 103 + 2e-4))


class Nothing:
    """Stands for a fork_server."""

    def close(self) -> None: ...


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies that are measured, all alike."""
    found: list[str] = []

    def told(job: Job, fork_server: object, busy: object) -> Pieces:
        found.append(str(job.strategy))
        return SEEN

    monkeypatch.setattr(closed_form, "pieces_of", told)
    monkeypatch.setattr(by_pieces.ForkServer, "start", lambda needs: Nothing())
    return found


def test_what_its_kind_took_beside_is_added(measured: list[str]) -> None:
    plan = of_kind("replicas")
    (found,) = predict_from_components([plan], program(), PROFILE)
    assert found.cost.step_s == pytest.approx(SEEN.step_s + 2e-4)
    (found,) = predict_from_components([plan], program(), replace(PROFILE, runs={}))
    assert found.cost.step_s == pytest.approx(SEEN.step_s)
    assert measured == [str(plan.strategy)] * 2


def test_what_has_been_run_is_not_measured_again(measured: list[str]) -> None:
    plan = of_kind("replicas")
    ran = replace(PROFILE.runs["replicas"], arrangement=plan.arrangement)
    (found,) = predict_from_components([plan], program(), replace(PROFILE, runs={"replicas": ran}))
    assert found.cost.step_s == pytest.approx(ran.step_s)
    assert found.cost.terms["optimizer"] == ran.pieces.update_s
    assert not measured


def test_one_of_each_kind_is_chosen_that_is_near() -> None:
    every = once([corrected(plan, PROFILE) for plan in plans()])
    assert {plan.arrangement.recompute for plan in every} == {"none"}
    ranked = sorted(every, key=lambda plan: -plan.samples_per_s)
    chosen = select(ranked, 4, by)
    near = {kind(p.arrangement) for p in ranked if p.samples_per_s >= 0.5 * ranked[0].samples_per_s}
    assert {kind(plan.arrangement) for plan in chosen} >= near
    assert len(chosen) == 4


def test_what_is_computed_again_is_planned_where_nothing_else_fits() -> None:
    again = [plan for plan in plans() if plan.arrangement.recompute != "none"]
    assert once(again) == again


def lasting(plan: Plan, seconds: float) -> Plan:
    """So long for each of its samples."""
    return replace(plan, cost=replace(plan.cost, terms={"compute": seconds * plan.arrangement.samples}))


def test_of_those_that_can_not_be_told_apart_the_plainest_comes_first() -> None:
    plain, other = of_kind("alone"), of_kind("stages")
    close = [lasting(other, 1.00), lasting(plain, 1.02)]
    assert plainest_first(close, by)[0].strategy == plain.strategy
    apart = [lasting(other, 1.0), lasting(plain, 1.2)]
    assert plainest_first(apart, by)[0].strategy == other.strategy
    assert plainest_first([], by) == []
    assert set(firsts(plans(), by)) == {"alone", "replicas", "stages", "shards"}


@pytest.mark.parametrize("error", [InputError("its loss is a sum"), WorkerError("its loss is a sum\n\nTraceback ...")])
def test_a_plan_that_can_not_be_had_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(job: object, fork_server: object, busy: object) -> Pieces:
        raise error

    monkeypatch.setattr(closed_form, "pieces_of", refused)
    monkeypatch.setattr(by_pieces.ForkServer, "start", lambda needs: Nothing())
    (found,) = predict_from_components([of_kind("replicas")], program(), PROFILE)
    assert found.why_not == "it can't run: its loss is a sum"


def test_plans_of_a_program_are_those_of_its_profile_the_predicted_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(plans: Sequence[Plan], program: Program, profile: Profile, tell: object) -> list[Plan]:
        return [
            replace(plan, why_not="it can't be had" if kind(plan.arrangement) == "shards" else "") for plan in plans
        ]

    monkeypatch.setattr(of_program, "predict_from_components", predicted)
    monkeypatch.setattr(closed_form, "cores", lambda: 2)
    found = plans_here(program(), Objectives(), PROFILE)
    assert found.objectives.fixed == "replica"
    assert kind(found.plans[0].arrangement) != "shards"
    assert all(plan.strategy is not None and plan.strategy.accumulate == 1 for plan in found.plans)
    refused = [plan for plan in found.plans if plan.why_not]
    assert found.plans[len(found.plans) - len(refused) :] == refused
    with pytest.raises(InputError, match="workers=3, but this process may use 2 cores"):
        plans_here(program(), Objectives(workers=3), PROFILE)
