"""What is said of plans: each sentence follows from numbers that are told by hand."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.aggregation import Synchronous
from paceline.clock.times import Delay
from paceline.planner.answer import answer, rules
from paceline.planner.base import Arrangement, Plan
from paceline.planner.cluster import Described
from paceline.planner.explain import (
    MORE,
    CurvePoint,
    FasterMessages,
    ScalingCurve,
    curve,
    explained,
    gains,
    why_not,
    with_more,
)
from paceline.planner.feasibility import smallest_change
from paceline.planner.policies import policies, rank, under
from paceline.planner.search import supported
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, search
from paceline.strategy import Strategy
from paceline.support import Case, first_row
from tests.planner.plain_workload import Plain, cluster


def plan(arrangement: Arrangement, workload: Plain | None = None) -> Plan:
    return CostCache(workload or Plain(), cluster()).plan(arrangement)


def test_a_runner_up_lost_by_its_largest_term() -> None:
    best, other = plan(Arrangement(4, micro_batch=2)), plan(Arrangement(2, micro_batch=4))
    said = why_not(other, best, Objectives())
    lost = other.cost.terms["compute"] - best.cost.terms["compute"]
    assert lost == pytest.approx(0.024)  # 4 layers of 3 ms a sample, two samples more
    assert "computing takes 24 ms more" in said


def test_the_best_has_no_reason_and_all_others_have_one() -> None:
    found = explained(search(Plain(), cluster()).plans, Objectives())
    assert found[0].why_not == ""
    assert all(each.why_not for each in found[1:])


def test_by_memory_the_reason_is_memory() -> None:
    small, large = plan(Arrangement(4, micro_batch=2, divided=3)), plan(Arrangement(4, micro_batch=2))
    assert "more, most of it optimizer" in why_not(large, small, Objectives(objective="memory"))


def test_another_batch_is_told_by_rate_and_worth() -> None:
    asked = Objectives(objective="goodput", noise_scale=8)
    best, other = plan(Arrangement(2, micro_batch=4)), plan(Arrangement(4, micro_batch=4))
    said = why_not(other, best, asked)
    assert "times the samples a second" in said
    assert "0.67 times as much in batches of 16" in said  # (8 + 8) / (8 + 16)


def test_a_tenth_more_of_the_only_thing_that_takes_time_gains_an_eleventh() -> None:
    """One worker, nothing to say, an update of no parameters: 1 - 1/1.1 of the step."""
    workload = Plain(parameters=0)
    [first, *others] = gains(plan(Arrangement(micro_batch=8), workload), workload, cluster())
    assert (first.resource, first.share) == ("compute", pytest.approx(1 - 1 / MORE))
    assert all(each.seconds == 0 for each in others)


def test_bandwidth_between_hosts_is_the_bottleneck_of_replicas_on_several() -> None:
    workload, apart = Plain(parameters=10**5, milliseconds=(0.01,)), cluster(hosts=4, per_host=1, memory_bytes=1e9)
    made = CostCache(workload, apart).plan(Arrangement(4, micro_batch=2))
    assert gains(made, workload, apart)[0].resource == "between"


def test_measured_messages_are_scaled_as_described_ones_are() -> None:
    on = cluster(hosts=2, per_host=2)
    for resource in ("inside", "between", "latency"):
        changed = with_more(Plain(), on, resource)
        assert changed is not None
        scaled = FasterMessages(on.messages, resource)
        for group in (on.group(2, 1), on.group(2, 2)):  # inside a host, and between two
            exact = changed[1].messages.seconds("all_reduce", 1e6, group)
            # one byte stands for none where a latency is looked for: 4 µs of 1 s
            assert scaled.seconds("all_reduce", 1e6, group) == pytest.approx(exact, rel=1e-5)


def test_the_curve_grows_and_knees_where_messages_begin_to_cost() -> None:
    free = curve(CostCache(Plain(parameters=0), cluster(bytes_per_s=1e15, latency_s=0.0)), Objectives())
    assert [point.workers for point in free.points] == [1, 2, 4]
    assert free.knee is None
    assert free.points[2].samples_per_s == pytest.approx(4 * free.points[0].samples_per_s, rel=1e-6)
    workload = Plain(milliseconds=(0.1,), parameters=10**4, most_shards=1)
    expensive = curve(CostCache(workload, cluster(bytes_per_s=1e6)), Objectives())
    assert expensive.knee == 1


def test_a_knee_is_where_twice_the_workers_give_less_than_half_as_much_again() -> None:
    points = (CurvePoint(1, 0.0, ""), CurvePoint(2, 10.0, ""), CurvePoint(4, 15.1, ""), CurvePoint(8, 20.0, ""))
    assert ScalingCurve(points).knee == 4
    assert ScalingCurve(points[:3]).knee is None
    assert ScalingCurve((CurvePoint(4, 10.0, ""), CurvePoint(16, 22.4, ""))).knee == 4  # 1.5² = 2.25
    assert ScalingCurve((CurvePoint(4, 10.0, ""), CurvePoint(16, 22.6, ""))).knee is None


@pytest.mark.parametrize(
    ("batch", "memory_bytes", "said"),
    [
        (32, 1e6, "plain replicas fit"),
        (32, 70e3, "is a smaller micro-batch:"),  # 64,000 + 1,600
        (4, 65e3, "is recomputation:"),  # 64,000 + 40 + 400
        (32, 64e3, "is dividing the optimizer's state among replicas (ZeRO-1):"),  # 40,000 + 12,800
        (32, 40e3, "is dividing parameters among replicas (FSDP):"),  # 16,000 + 12,800
        (32, 20e3, "is more stages:"),  # 16,000 + 4 · 400
        (32, 15e3, "as many of them"),
        (32, 100.0, "nor with 4096 times as many"),
    ],
)
def test_the_smallest_change_that_fits(batch: int, memory_bytes: float, said: str) -> None:
    """16 bytes of each of 4 · 1,000 parameters, 4 · 400 · b bytes of activations: 64,000 + 12,800 for 8 samples."""
    workload = Plain(global_batch=batch, saved_bytes=400, output_bytes=10)
    found = smallest_change(CostCache(workload, cluster(memory_bytes=memory_bytes)), Objectives())
    assert said in found.text
    if found.arrangement is not None:
        assert CostCache(workload, cluster()).cost(found.arrangement).peak.total <= memory_bytes


def test_what_it_takes_when_nothing_fits_is_the_least() -> None:
    workload, small = Plain(global_batch=32, saved_bytes=400), cluster(memory_bytes=15e3)
    said = smallest_change(CostCache(workload, small), Objectives()).text
    times = int(said.split("it takes ")[1].split(" ")[0])
    for hosts, fits in ((times, True), (times - 1, False)):
        assert bool(search(workload, replace(small, hosts=hosts)).plans) == fits


def test_rules_of_thumb_are_held_against_the_numbers() -> None:
    workload, on = Plain(milliseconds=(5.0,) * 4, parameters=10), cluster()
    found = search(workload, on).plans
    fit = smallest_change(CostCache(workload, on), Objectives())
    small, shards, stages, pace = rules(found[0], found, fit, CostCache(workload, on), Objectives())
    assert small.agrees is (found[0].arrangement.stages == found[0].arrangement.shards == 1)
    assert (shards.agrees, stages.agrees) == (None, None)
    assert pace.agrees in (True, None)
    many = replace(workload, global_batch=128)
    assert rules(found[0], found, fit, CostCache(many, on), Objectives())[0].agrees is None


def test_policies_compete_where_replicas_are_slow_at_times() -> None:
    """Half of the replicas are 100 ms late at every batch of 24 ms: those who don't wait make more samples a second."""
    asked = Objectives(delay=Delay.parse("fraction=0.5 constant:value=0.1"), engine="local", replicas=4, simulated=500)
    found = search(Plain(parameters=1), cluster(latency_s=0.0), asked).plans
    best, strict = found[0], next(p for p in found if p.strategy and "aggregation" not in str(p.strategy))
    assert best.strategy is not None
    assert best.samples_per_s > strict.samples_per_s
    assert strict.cost.terms["waiting"] == pytest.approx(0.1)
    assert "Δs an update" in best.provenance["waiting"]


def test_policies_compete_where_a_divided_optimizer_is_faster_too() -> None:
    """They have no divided one, so the same replicas with a whole one compete."""
    asked, workload = Objectives(replicas=4, simulated=500), Plain(parameters=2000)
    fastest = search(workload, cluster(), asked).plans[0]
    assert fastest.arrangement.divided == 1
    delayed = replace(asked, delay=Delay.parse("fraction=0.5 constant:value=10"))
    best = search(workload, cluster(), delayed).plans[0]
    assert best.strategy is not None
    assert not isinstance(best.strategy.aggregation, Synchronous)
    assert best.arrangement == replace(fastest.arrangement, divided=0)


def test_staleness_counts_where_samples_do() -> None:
    """Without noise a Δ of 2 samples that is three updates old is worth what a sample of 8 is; with noise both are."""
    asked = Objectives(objective="time-to-loss", noise_scale=0, delay=Delay.parse("fraction=0.5 constant:value=0.02"))
    assert asked.efficiency(2, 8, staleness=3) == asked.efficiency(8, 8) == 1
    assert asked.efficiency(2, 8) == 4
    found = under(plan(Arrangement(4, micro_batch=2)), "asynchronous", asked)
    assert found is not None
    made, pace = found
    each = [rank(made, given, Plain(), asked)[0] for given in (pace, replace(pace, staleness=0.0))]
    assert each[0] == pytest.approx(each[1] * (1 + pace.staleness), rel=1e-8)  # both are rounded to ten digits


def test_all_policies_that_are_offered_can_be_had() -> None:
    made, on = plan(Arrangement(4, micro_batch=2)), cluster()
    asked, offered = Objectives(delay=Delay.parse("fraction=0.5 constant:value=0.02")), list(policies(made, on))
    assert {"synchronous:backups=1", "buffered:k=2", "buffered:k=3,cancel=true"} <= {*offered}
    assert all(under(made, policy, asked) for policy in offered)
    accumulating = plan(Arrangement(4, micro_batch=1, micro_batches=2))
    assert "local-steps:period=8" in offered
    assert "local-steps:period=8" not in list(policies(accumulating, on))  # which sends no gradients to add


def test_gpus_carry_stages_at_any_pace() -> None:
    on = cluster()
    on = replace(on, device=replace(on.device, kind="cuda"))
    offered = list(policies(plan(Arrangement(2, stages=2, micro_batches=4)), on))
    assert "asynchronous" in offered
    assert offered == list(policies(plan(Arrangement(2, stages=2, micro_batches=4)), cluster()))
    for policy in offered:
        strategy = Strategy(replicas=2, stages=2, micro_batches=4, aggregation=policy, device="cuda")
        assert first_row(Case.of(strategy, "local")) is None, policy


def test_a_policy_that_changes_has_the_pace_of_its_change() -> None:
    """K is 1, 2, 3 and then 4 for 500 Δs each: updates are made of 1 / (1/4 · (1 + 1/2 + 1/3 + 1/4)) of them."""
    asked = Objectives(delay=Delay.parse("fraction=0.5 constant:value=0.02"))
    found = under(plan(Arrangement(4, micro_batch=2)), "smooth-switch:every=500", asked)
    assert found is not None
    assert found[1].batches == pytest.approx(4 / (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.01)  # of 1,041 updates


def test_only_waiting_is_supported_between_hosts() -> None:
    made = CostCache(Plain(), cluster(hosts=4, per_host=1)).plan(Arrangement(4, micro_batch=2))
    assert list(policies(made, cluster(hosts=4, per_host=1))) == ["synchronous"]
    assert "asynchronous" in list(policies(made, cluster()))
    paced = under(made, "synchronous", Objectives(delay=Delay.parse("0")))
    assert paced is not None
    assert paced[0].cost.step_s == pytest.approx(made.cost.step_s)


def test_an_answer_where_nothing_fits_says_what_would() -> None:
    on = cluster(memory_bytes=10.0)
    said = answer("plain", search(Plain(), on).plans, Plain(), on, Objectives())
    assert (said.plans, said.gains, said.rules, said.beyond, said.fit.fits) == ((), (), (), None, False)


def test_what_is_better_but_not_supported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built = supported.supports

    def supports(plan: Arrangement, device: str = "cpu", *engine: Any) -> bool:
        return (device == "cpu" or plan.shards == 1) and built(plan, device, *engine)

    monkeypatch.setattr(supported, "supports", supports)
    on = cluster(bytes_per_s=1e12, latency_s=0.0)
    on = replace(on, device=replace(on.device, kind="cuda"))
    workload = Plain(milliseconds=(8.0,), global_batch=1)
    said = answer("plain", search(workload, on).plans, workload, on, Objectives())
    assert said.plans[0].arrangement.shards == 1
    assert said.beyond is not None
    assert said.beyond.arrangement.shards == 4
    assert isinstance(on.messages, Described)
