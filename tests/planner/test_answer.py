"""Which plans are shown: the best of each kind, and of a kind only what can be told from it."""

from dataclasses import replace

import pytest

from paceline import StaleSynchronous
from paceline.planner.answer import alternatives
from paceline.planner.base import Arrangement, Plan
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, kind_of, search
from tests.planner.plain_workload import Plain, cluster


def plan(arrangement: Arrangement, step_s: float, *, off: float = 0.1) -> Plan:
    """That takes so long, and may lie off so far."""
    made = CostCache(Plain(), cluster()).plan(arrangement)
    terms = dict.fromkeys(made.cost.terms, 0.0) | {"compute": step_s}
    return replace(made, cost=replace(made.cost, terms=terms), low_s=step_s / (1 + off), high_s=step_s * (1 + off))


def shown(plans: list[Plan], count: int = 5) -> tuple[list[int], int]:
    """Which of them, and how many are left out."""
    found, left_out = alternatives(plans, Plain(), Objectives(), count)
    return [plans.index(each) for each in found], left_out


TWO, FOUR = Arrangement(2, stages=2, micro_batches=4), Arrangement(1, stages=4, micro_batches=8)
SHARDS = Arrangement(2, shards=2, micro_batch=4)


def test_of_a_kind_the_best_is_shown_where_they_can_not_be_told_apart() -> None:
    assert shown([plan(TWO, 1.0), plan(FOUR, 1.2), plan(SHARDS, 1.3)]) == ([0, 2], 1)


def test_what_is_surely_slower_is_another_way() -> None:
    """Each may lie off by a tenth: 1.1 · 1.1 = 1.21 times as long is the least that can be told."""
    assert shown([plan(TWO, 1.0), plan(FOUR, 1.20)]) == ([0], 1)
    assert shown([plan(TWO, 1.0), plan(FOUR, 1.22)]) == ([0, 1], 0)


@pytest.mark.parametrize("changed", [{"schedule": "gpipe"}, {"recompute": "full"}, {"divided": 1}, {"copies": (1, 3)}])
def test_other_kinds(changed: dict[str, object]) -> None:
    other = replace(TWO, **changed)  # type: ignore[arg-type]
    assert shown([plan(TWO, 1.0), plan(other, 1.0)]) == ([0, 1], 0)


def test_policies_are_kinds_too() -> None:
    strict, loose = plan(TWO, 1.0), plan(TWO, 1.0)
    assert loose.strategy is not None
    loose = replace(loose, strategy=replace(loose.strategy, aggregation=StaleSynchronous(bound=3)))
    assert shown([strict, loose]) == ([0, 1], 0)


def test_what_can_not_be_had_stands_for_no_other() -> None:
    refused = replace(plan(TWO, 1.0), why_not="it can't be had")
    assert shown([refused, plan(FOUR, 1.0)]) == ([0, 1], 0)


def test_only_those_before_the_last_that_is_shown_are_counted() -> None:
    plans = [plan(TWO, 1.0), plan(FOUR, 1.0), plan(SHARDS, 1.0), replace(plan(TWO, 1.1), simulated=False)]
    assert shown(plans, count=2) == ([0, 2], 1)


@pytest.mark.parametrize("memory_bytes", [30e3, 1e6])
@pytest.mark.parametrize("batch", [12, 4, 1])
def test_the_best_is_never_affected_and_all_stand_for_themselves(batch: int, memory_bytes: float) -> None:
    workload, on = Plain(global_batch=batch), cluster(hosts=2, memory_bytes=memory_bytes)
    plans = search(workload, on, of_each_kind=2).plans
    found, left_out = alternatives(plans, workload, Objectives(), 5)
    assert found[:1] == plans[:1]
    places = [plans.index(each) for each in found]
    assert places == sorted(places)
    if len(found) < 5:
        assert left_out == len(plans) - len(found)


def test_the_best_of_other_kinds_is_there_beside_the_best() -> None:
    workload, on = Plain(milliseconds=(1.0, 2.0, 4.0, 1.0), parameters=10), cluster()
    alone, beside = (search(workload, on, Objectives(simulated=1), of_each_kind=many).plans for many in (0, 1))
    assert len(alone) == 1
    assert alone[0] in beside
    kinds = [kind_of(each.arrangement, each.arrangement) for each in beside]
    assert len(kinds) == len(set(kinds)) > 1
