"""The search: equal to trying everything, and what it proposes is what Paceline carries."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import InputError, Program
from paceline.api.train import check
from paceline.core.mesh import StageReplicas
from paceline.planner.base import Arrangement, Cost, OverlapModel
from paceline.planner.cluster import Cluster
from paceline.planner.cost import cost
from paceline.planner.search import supported
from paceline.planner.search.candidates import arrangement, frames, options
from paceline.planner.search.event_simulation import part_times
from paceline.planner.search.objective import Objective, Objectives
from paceline.planner.search.search import TIE, CostCache, key, key_of, search, undominated
from paceline.planner.stage_division import Divisions
from paceline.schedule import StageTimes, names, parse, simulate, timeline
from tests.planner.plain_workload import Plain, cluster

ALL = 10**6
"""That many are simulated where nothing is to be left to closed forms."""


def sizes(workload: Plain, on: Cluster, batch: int) -> Iterator[Arrangement]:
    """Every size, without a thought."""
    layers, n = len(workload.milliseconds), on.workers
    for r, p, t, b in product(range(1, n + 1), range(1, layers + 1), range(1, n + 1), range(1, batch + 1)):
        if batch % (r * b) == 0 and r * p * t <= n and whole(t, on):
            yield Arrangement(r, p, t, 1, b, batch // (r * b))
    each = [(c, t) for c, t in product(range(1, n + 1), repeat=2) if c * t < n and whole(t, on)]
    for p in range(2, min(4, layers) + 1):
        for row in product(each, repeat=p):
            if sum(c * t for c, t in row) <= min(8, n):
                copies, shards = zip(*row, strict=True)
                yield from _unlike_sizes(Arrangement(1, p, max(shards)), copies, shards, n, batch)


def _unlike_sizes(
    made: Arrangement, copies: tuple[int, ...], shards: tuple[int, ...], workers: int, batch: int
) -> Iterator[Arrangement]:
    """Every number of replicas and cut of the batch."""
    made = unlike(made, copies, shards)
    both = bool(made.copies and made.stage_shards)
    if not (made.copies or made.stage_shards) or (both and made.replica_workers > 4):
        return
    for r, b in product(range(1, workers // made.replica_workers + 1), range(1, batch + 1)):
        if batch % (r * b) == 0:
            yield replace(made, replicas=r, micro_batch=b, micro_batches=batch // (r * b))


def unlike(made: Arrangement, copies: tuple[int, ...], shards: tuple[int, ...]) -> Arrangement:
    """Stages that differ; as many columns at each stage are more replicas."""
    if len(set(copies)) == 1 and copies[0] > 1:
        return made
    turning, divided = len(set(copies)) > 1, len(set(shards)) > 1
    return replace(made, copies=copies if turning else (), stage_shards=shards if divided else ())


def whole(shards: int, on: Cluster) -> bool:
    """Whether they don't straddle hosts."""
    return on.hosts == 1 or on.devices_per_host % shards == 0 or shards % on.devices_per_host == 0


def arrangements(workload: Plain, on: Cluster, asked: Objectives, batch: int) -> Iterator[Arrangement]:
    """Every one that is supported."""
    schedules = [(each, 1) for each in ("1f1b", "gpipe", "zero-bubble", "sequential")]
    schedules += [("interleaved", v) for v in range(2, 9)]
    schedules += [("pipedream", 1), ("pipedream-2bw", 1)] if asked.statistical else []
    for size, (schedule, v) in product(sizes(workload, on, batch), schedules):
        if (size.stages == 1 and schedule != "1f1b") or size.stages * v > len(workload.milliseconds):
            continue
        if size.stages > 1 and size.copies and v > 1:
            continue
        for recompute, divided, a in product(("none", "full", "stage"), (0, 1, 3), range(1, size.micro_batches + 1)):
            made = replace(size, schedule=schedule, chunks=v, recompute=recompute, divided=divided, accumulated=a)
            if size.stages == 1 and (recompute == "stage" or a > 1):  # the whole model again, for nothing
                continue
            runs = supported.supports(made) and supported.supports(made, on.device.kind, asked.engine)
            if runs and workload.refusal(made) is None:
                yield made


def enumerated(workload: Plain, on: Cluster, asked: Objectives, batch: int) -> Iterator[Arrangement]:
    """What the search looks at, before it leaves out what can't be the best."""
    known, cuts = CostCache(workload, on), frames(workload, on, asked, batch)
    for frame in map(cuts.at, range(len(cuts))):
        for option in options(frame, on, asked):
            made = arrangement(frame, option, on, asked)
            if made is not None and workload.refusal(made) is None and known.divisions.fits(made):
                yield made


def by_the_obvious_way(made: Arrangement, workload: Plain, on: Cluster, overlap_model: OverlapModel) -> Cost:
    """Closed forms, and where there are stages the schedule's own simulation."""
    closed = cost(workload, on, made, overlap_model)
    if made.stages == 1:
        return closed
    division = Divisions(workload, on).of(made)
    each = part_times(division, made, on, overlap_model).with_blocking_sends()
    half = tuple(b / 2 for b in each.backward)
    text = f"interleaved:chunks={made.chunks}" if made.chunks > 1 else made.schedule
    columns, times = (
        StageReplicas(made.copies) if made.copies else None,
        StageTimes(each.forward, half, half, each.transfer),
    )
    if made.schedule in ("pipedream", "pipedream-2bw"):
        ends_s = made.micro_batches * period_s(times, made.stages)
    else:
        m = made.micro_batches // made.accumulated
        spans = simulate(parse(text), times, made.stages, m, columns)
        ends_s = made.accumulated * max(span.end_ns for span in spans) / 1e9
    others = sum(closed.terms[name] for name in ("replicas", "optimizer", "waiting"))
    return replace(closed, terms=dict.fromkeys(closed.terms, 0.0) | {"compute": ends_s + others})


def period_s(times: StageTimes, stages: int) -> float:
    """Of a micro-batch, of a stream that is under way; of up to 4 stages 12 are a whole number of its rounds."""
    run = timeline(parse("pipedream"), times, stages, 200)
    ends = [each.end_ns for each in run if each.worker == stages - 1 and each.action.kind == "backward"]
    return (ends[150] - ends[150 - 12 * 5]) / (12 * 5) / 1e9


def best_of_all(workload: Plain, on: Cluster, asked: Objectives, overlap_model: OverlapModel) -> float | None:
    """The objective of the best, or None where nothing fits."""
    found = []
    for batch in asked.batches(workload):
        for made in arrangements(workload, on, asked, batch):
            if cost(workload, on, made, overlap_model).peak.total <= on.device.memory_bytes:
                each = by_the_obvious_way(made, workload, on, overlap_model)
                found.append(key_of(made, each, workload, asked)[0])
    return min(found, default=None)


INSTANCES = st.builds(
    Plain,
    milliseconds=st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=1, max_size=4).map(tuple),
    parameters=st.sampled_from((100, 4000)),
    saved_bytes=st.sampled_from((10, 2000)),
    output_bytes=st.sampled_from((1, 200)),
    fixed_ms=st.sampled_from((0.0, 0.7)),
    global_batch=st.sampled_from((1, 4, 6)),
)
CLUSTERS = st.builds(
    cluster,
    hosts=st.sampled_from((1, 2)),
    per_host=st.sampled_from((1, 2, 3)),
    memory_bytes=st.sampled_from((30e3, 200e3, 1e9)),
    bytes_per_s=st.sampled_from((1e6, 1e9)),
)
HABITS = st.builds(OverlapModel, overlap=st.sampled_from((0.0, 0.6)), send_overlap=st.sampled_from((0.0, 0.8)))


def test_nor_where_the_batch_may_vary() -> None:
    workload, on = Plain(milliseconds=(1.0, 2.0), fixed_ms=0.7, global_batch=2), cluster(per_host=2)
    test_nothing_is_better_than_what_is_found.hypothesis.inner_test(workload, on, OverlapModel(), "goodput")


INTERLEAVED = Plain(milliseconds=(0.5,) * 4, parameters=100, saved_bytes=2000, output_bytes=1, global_batch=4)
"""Of which mini-batches of two hold least where stages have two chunks each."""
TWICE_TWO, PLAIN = cluster(hosts=2, per_host=2, bytes_per_s=1e6), OverlapModel(overlap=0.0, send_overlap=0.0)


@settings(max_examples=12)
@example(INTERLEAVED, TWICE_TWO, PLAIN, "memory")
@given(INSTANCES, CLUSTERS, HABITS, st.sampled_from(("throughput", "memory")))
def test_nothing_is_better_than_what_is_found(
    workload: Plain, on: Cluster, overlap_model: OverlapModel, objective: Objective
) -> None:
    asked = Objectives(objective=objective, noise_scale=10.0, simulated=ALL)
    found = search(workload, on, asked, overlap_model).plans
    best = best_of_all(workload, on, asked, overlap_model)
    assert (best is None) == (not found)
    if found and best is not None:
        # the schedule's simulation counts in whole nanoseconds, of steps of milliseconds with up to a hundred actions
        assert key(found[0], workload, asked)[0] == pytest.approx(best, rel=1e-4)


@settings(max_examples=10)
@example(INTERLEAVED, TWICE_TWO, PLAIN)
@given(INSTANCES, CLUSTERS, HABITS)
def test_what_is_left_out_is_beaten_in_time_and_memory(
    workload: Plain, on: Cluster, overlap_model: OverlapModel
) -> None:
    asked, batch = Objectives(simulated=ALL), workload.global_batch

    def found(made: Arrangement) -> tuple[float, float]:
        each = by_the_obvious_way(made, workload, on, overlap_model)
        return each.step_s, each.peak.total

    named = set(enumerated(workload, on, asked, batch))
    known = {made: found(made) for made in named}
    for made in set(arrangements(workload, on, asked, batch)) - named:
        step_s, held = found(made)
        # simulations count in whole nanoseconds, of steps of milliseconds
        assert any(s <= step_s * (1 + 1e-4) and h <= held * (1 + 1e-9) for s, h in known.values()), made


@settings(max_examples=12)
@given(INSTANCES, CLUSTERS, HABITS)
def test_bounds_leave_out_none_of_the_best(workload: Plain, on: Cluster, overlap_model: OverlapModel) -> None:
    """With room for few, the same as the first of all."""
    few, all_ = (Objectives(simulated=count) for count in (1, ALL))
    kept, first = search(workload, on, few, overlap_model), search(workload, on, all_, overlap_model)
    assert len(kept.plans) == min(1, len(first.plans))
    if kept.plans:
        closed = [cost(workload, on, plan.arrangement, overlap_model).step_s for plan in (*kept.plans, *first.plans)]
        assert closed[0] <= min(closed) * (1 + TIE)


def test_all_that_is_proposed_is_carried() -> None:
    """By the engine that the plan names; nothing is started."""
    workload = Plain(milliseconds=(1.0, 2.0, 4.0, 1.0, 1.0, 1.0, 3.0, 1.0), parameters=16, global_batch=16)
    hidden = OverlapModel(send_overlap=1.0)  # so that 1F1B waits for messages where GPipe does not
    found = search(workload, cluster(hosts=2, per_host=4), Objectives(simulated=3000), hidden).plans
    counted = search(
        workload, cluster(per_host=2), Objectives("goodput", 20.0, simulated=ALL, replicas=1), hidden
    ).plans
    little = search(workload, cluster(hosts=2, per_host=4), Objectives("memory", simulated=3000), hidden).plans
    streams = (plan for plan in counted if plan.cost.staleness and plan.arrangement.samples == 16)
    found = (*found, *little, *streams)
    model = [layer for _ in range(4) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU())]
    data = torch.zeros(64, 4), torch.zeros(64, 4)
    program = Program(
        model=lambda: torch.nn.Sequential(*model),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        train=data,
        global_batch_size=16,
    )
    kinds = {kind(plan.arrangement): plan for plan in found}
    assert {each[0] for each in kinds} == {*names()}
    assert {each[4] for each in kinds} == {each[5] for each in kinds} == {False, True}
    assert {each[1] for each in kinds} == {"none", "full", "stage"}
    assert {each[3] for each in kinds} == {False, True}
    for plan in kinds.values():
        assert plan.strategy is not None
        assert plan.strategy.workers == plan.arrangement.workers
        if supported.engine_of(plan.arrangement, 8) == "local":
            check(program, plan.strategy, engine="local", steps=1)


def kind(made: Arrangement) -> tuple[object, ...]:
    """What is refused or not together, whatever the sizes."""
    several = tuple(size > 1 for size in (made.replicas, made.shards, made.micro_batches))
    unlike = bool(made.copies), bool(made.stage_shards)
    return made.schedule, made.recompute, made.divided, *unlike, made.accumulated > 1, several


def test_stages_may_have_different_shards() -> None:
    """Three workers for four layers, none of which may be cut into three: two have three halves, one a whole."""
    workload = Plain(global_batch=1, most_shards=2)
    best = search(workload, cluster(per_host=3), Objectives("memory")).plans[0]
    assert best.strategy is not None
    assert (best.strategy.stages, best.strategy.shards, best.cost.cut) == (2, (1, 2), (1,))
    assert [held.parameters for held in best.cost.memory] == [4 * 1000, 3 * 4 * 500]


def test_streams_compete_where_stale_samples_count_for_what_they_are_worth() -> None:
    """Sums over replicas take longer than computing; with much noise weights may be old, without any they may not."""
    workload, on = Plain(parameters=10**5, output_bytes=1, most_shards=1), cluster(memory_bytes=1e9, latency_s=0.0)
    noisy, exact = (search(workload, on, Objectives("goodput", x)).plans[0] for x in (1e12, 0.0))
    assert noisy.cost.staleness > 0 == exact.cost.staleness
    assert noisy.arrangement.schedule.startswith("pipedream")
    throughput = search(workload, on, Objectives(simulated=ALL)).plans
    assert {plan.cost.staleness for plan in throughput} == {0.0}  # nobody would tell what that costs


def test_who_computes_nothing_again_is_not_left_out_for_one_who_does() -> None:
    """Updating so many parameters takes longer than computing: divided, with forward once more, it is done sooner."""
    known = CostCache(Plain(parameters=10**6), cluster(memory_bytes=1e9, bytes_per_s=1e12))
    once, again = (
        known.plan(replace(Arrangement(2, micro_batch=4), recompute=recompute, divided=divided))
        for recompute, divided in (("none", 0), ("full", 1))
    )
    assert again.cost.step_s < once.cost.step_s
    assert undominated([again, once]) == [again, once]


def test_under_torchrun_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.zeros(64, 4), torch.zeros(64, 4)
    program = Program(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        train=data,
        global_batch_size=16,
    )
    workload = Plain(milliseconds=(1.0, 1.0), global_batch=16)
    found = search(workload, cluster(per_host=4), Objectives(simulated=1000, engine="distributed")).plans
    assert {plan.arrangement.divided for plan in found} == {0, 1, 3}
    for plan in found:
        assert plan.strategy is not None
        workers = str(plan.strategy.workers)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", workers), ("LOCAL_WORLD_SIZE", workers)):
            monkeypatch.setenv(name, value)
        check(program, plan.strategy, engine="distributed", steps=1)


def test_plans_for_gpus_have_all_forms() -> None:
    workload, on = Plain(), cluster()
    on = replace(on, device=replace(on.device, kind="cuda"))
    plans = search(workload, on, Objectives(simulated=ALL)).plans
    assert {plan.strategy.device for plan in plans if plan.strategy} == {"cuda"}
    assert any(plan.arrangement.shards > 1 for plan in plans)
    assert any(plan.arrangement.stages > 1 for plan in plans)


def test_nothing_fits() -> None:
    assert search(Plain(), cluster(memory_bytes=10.0)).plans == ()


def test_batches_that_go_with_replicas() -> None:
    """Of one replica 8 samples: 4 replicas make 32 of them in no more time than one."""
    best = search(Plain(), cluster(bytes_per_s=1e12, latency_s=0.0), Objectives(fixed="replica")).plans[0]
    assert best.arrangement.samples == 8 * best.arrangement.replicas
    assert best.arrangement.replicas == 4


def test_goodput_prefers_a_batch_as_large_as_its_noise_allows() -> None:
    """A fixed part of 10 ms a step favours large batches; a small noise scale says that they are worth little."""
    workload, on = Plain(fixed_ms=10.0), cluster(per_host=1, memory_bytes=1e9)
    small, large = (
        search(workload, on, Objectives(objective="goodput", noise_scale=x)).plans[0].arrangement.samples
        for x in (1, 1e5)
    )
    assert small < large


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"objective": "speed"}, "unknown objective"),
        ({"objective": "goodput"}, "write noise_scale=1000"),
        ({"noise_scale": -1.0}, "0 samples or more"),
        ({"workers": 0}, "write workers=1 or more"),
        ({"memory_bytes": 0.0}, "holds nothing"),
    ],
)
def test_refusals(words: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Objectives(**words)  # type: ignore[arg-type]


def test_no_torch() -> None:
    code = "import sys, paceline.planner.search.search; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stderr
