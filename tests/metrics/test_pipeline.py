"""How a pipeline did, against what its schedule allows."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.metrics.pipeline import (
    Pace,
    PipelineWorkerFigures,
    covered_ns,
    ideal,
    pace,
    stage_times,
    windows,
    worker_figures,
)
from paceline.schedule import StageTimes, parse, simulate
from paceline.trace.spans import SERVER, Action, Span
from tests.schedule.schedule_values import TEXTS, cases

CHECK = settings(max_examples=30, deadline=None, derandomize=True)
S = 10**9


def span(action: Action, start: int, end: int, stage: int = 0, micro_batch: int = 0, step: int = 1) -> Span:
    return Span(0, stage, 0, action, step, micro_batch, start, end, 0)


def paced(spans: list[Span], schedule: str, p: int, m: int) -> Pace:
    order = parse(schedule)
    return pace(spans, ideal(spans, order, p, m), flushes=order.flushes)


def shifted(spans: list[Span], by_ns: int, step: int) -> list[Span]:
    return [replace(s, start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns, step=step) for s in spans]


@pytest.mark.parametrize(
    ("text", "m", "busy"), [("sequential", 4, 1 / 4), ("gpipe", 4, 48 / 84), ("gpipe", 8, 96 / 132)]
)
def test_the_sources_pipelines_of_four_workers(text: str, m: int, busy: float) -> None:
    figures = worker_figures(simulate(parse(text), StageTimes.equal(4), 4, m))
    assert figures == {(w, 0): PipelineWorkerFigures(busy, 1 - busy, 0.0) for w in range(4)}


def test_what_each_worker_does_with_a_step() -> None:
    spans = [
        span("forward", 0, 20),
        span("send", 15, 30),
        span("wait", 30, 50),
        span("recompute", 50, 60),
        span("backward", 55, 80),
        span("apply", 80, 100),
        span("receive", 0, 20, stage=1),
        span("forward", 20, 30, stage=1),
        span("receive", 25, 28, stage=1),
        span("backward_input", 30, 40, stage=1),
        span("backward_weight", 60, 70, stage=1),
        span("all_reduce", 70, 90, stage=1),
    ]
    figures = worker_figures(spans)
    assert set(figures) == {(0, 0), (1, 0)}
    # The bubble is one minus a quotient: equal but for the last bit.
    assert figures[0, 0] == PipelineWorkerFigures(0.5, pytest.approx(0.3, rel=1e-12), 30 / S)
    assert figures[1, 0] == PipelineWorkerFigures(0.3, pytest.approx(0.5, rel=1e-12), 20 / S)


def test_time_between_steps_is_no_time_of_theirs() -> None:
    one = [span("forward", 0, 10), span("wait", 10, 30), span("backward", 30, 40)]
    assert worker_figures([*one, *shifted(one, 1000, step=2)]) == worker_figures(one)


def test_steps_that_overlap_count_a_moment_once() -> None:
    spans = [
        span("forward", 0, 10),
        span("forward", 10, 20, step=2),
        span("backward", 30, 40),
        span("backward", 40, 50, step=2),
    ]
    assert worker_figures(spans) == {(0, 0): PipelineWorkerFigures(0.8, pytest.approx(0.2, rel=1e-12), 0.0)}


def test_an_update_belongs_to_the_step_it_ends_whatever_its_own_number() -> None:
    """Versions are counted by updates: where Δ is accumulated over two mini-batches, half as fast as steps."""
    one = [span("forward", 0, 10), span("backward", 10, 30)]
    spans = [
        *one,
        *shifted(one, 100, step=2),
        span("apply", 130, 140, step=1),
        *shifted(one, 200, step=3),
        *shifted(one, 300, step=4),
        span("all_reduce", 330, 335, step=0),
        span("apply", 335, 340, step=2),
    ]
    assert windows(spans) == {1: (0, 30), 2: (100, 140), 3: (200, 230), 4: (300, 340)}
    assert paced(spans, "1f1b", 1, 1) == Pace(35 / S, 30 / S)


def test_waiting_before_a_step_is_no_time_of_it() -> None:
    spans = [span("wait", 0, 50, stage=1), span("forward", 40, 60), span("forward", 60, 80, stage=1)]
    assert windows(spans) == {1: (40, 80)}
    assert worker_figures(spans)[1, 0] == PipelineWorkerFigures(0.5, 0.5, 10 / S)


def test_an_update_before_any_compute_is_of_no_step() -> None:
    assert windows([span("apply", 0, 5), span("forward", 10, 20, step=2)]) == {2: (10, 20)}


def test_other_replicas_owners_and_scoring_are_not_the_pipelines() -> None:
    ours = [span("forward", 0, 10), span("backward", 10, 30)]
    others = [
        replace(span("forward", 100, 200), replica=1),
        replace(span("apply", 100, 200), replica=SERVER),
        span("evaluate", 500, 900),
        span("pull", 500, 900),
        span("delay", 30, 60),
    ]
    assert worker_figures(ours + others) == {(0, 0): PipelineWorkerFigures(1.0, 0.0, 0.0)}
    assert paced(ours + others, "1f1b", 1, 1) == Pace(30 / S, 30 / S)
    assert worker_figures([*ours, *others], replica=1) == {(0, 0): PipelineWorkerFigures(1.0, 0.0, 0.0)}


def test_shards_are_workers() -> None:
    spans = [span("forward", 0, 10), replace(span("forward", 0, 5), shard=1)]
    assert [(place, f.utilisation) for place, f in worker_figures(spans).items()] == [((0, 0), 1.0), ((0, 1), 0.5)]


def test_nothing_recorded() -> None:
    assert worker_figures([]) == {}
    assert worker_figures([span("apply", 7, 7)]) == {}


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_times_of_parts_are_found_again(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text, workers=5, micro_batches=12))
    each = st.tuples(*[st.integers(1, 99)] * schedule.parts(p))
    forward, inputs, weights = (data.draw(each) for _ in range(3))
    times = StageTimes(*(tuple(t / 1e9 for t in times) for times in (forward, inputs, weights)))
    spans = simulate(schedule, times, p, m)
    random.Random(m).shuffle(spans)
    if not schedule.splits_backward:
        whole = tuple((a + b) / 1e9 for a, b in zip(inputs, weights, strict=True))
        times = StageTimes(times.forward, whole, (0.0,) * times.parts)
    assert stage_times(spans, schedule, p) == times


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_what_goes_as_simulated_is_ideal(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text, workers=5, micro_batches=12))
    times = StageTimes.equal(schedule.parts(p), forward=7 / S, backward_input=5 / S, backward_weight=3 / S)
    spans = simulate(schedule, times, p, m)
    assert paced(spans, text, p, m).ratio == 1
    assert [s.duration_ns for s in ideal(spans, parse(text), p, m)] == [s.duration_ns for s in spans]


def test_medians_pass_over_what_was_slow_once() -> None:
    spans = [span("forward", 100 * i, 100 * i + t, micro_batch=i) for i, t in enumerate((10, 90, 12))]
    spans += [span("backward", 100 * i + 95, 100 * i + 99, micro_batch=i) for i in range(3)]
    assert stage_times(spans, parse("gpipe"), 1).forward == (12 / S,)


def test_a_recomputation_is_part_of_its_backward_wherever_it_is_recorded() -> None:
    apart = [span("forward", 0, 10), span("recompute", 10, 18), span("backward", 20, 30)]
    inside = [span("forward", 0, 10), span("recompute", 12, 18), span("backward", 12, 30)]
    for spans in (apart, inside):
        assert stage_times(spans, parse("gpipe"), 1) == StageTimes((10 / S,), (18 / S,), (0.0,))


def test_a_step_is_its_median_and_the_gaps_are_left_out() -> None:
    def step(number: int, start: int, idle: int) -> list[Span]:
        one = [span("forward", 0, 10), span("wait", 10, 10 + idle), span("backward", 10 + idle, 30 + idle)]
        return shifted(one, start, number)

    spans = step(1, 0, 3) + step(2, 1000, 900) + step(3, 5000, 5)
    assert paced(spans, "1f1b", 1, 1) == Pace(35 / S, 30 / S)
    assert paced(spans, "1f1b", 1, 1).ratio == pytest.approx(35 / 30, rel=1e-12)


def test_a_stream_is_measured_as_a_whole() -> None:
    """Three mini-batches of two: (2 · 3 + 1) · 3 units for 3 steps, of which 6 · 3 are busy."""
    whole = simulate(parse("pipedream"), StageTimes.equal(2), 2, 6)
    spans = [replace(s, step=1 + s.micro_batch // 2, micro_batch=s.micro_batch % 2) for s in whole]
    assert paced(spans, "pipedream", 2, 2) == Pace(7.0, 7.0)
    assert {f.utilisation for f in worker_figures(spans).values()} == {18 / 21}
    late = [replace(s, end_ns=s.end_ns + 21 * 10**9) if s.end_ns == 21 * 10**9 else s for s in spans]
    assert paced(late, "pipedream", 2, 2).step_s == 14.0


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        ("gpipe", 2, "no forward of part 1 is among the spans of replica 0, but each of 2 parts needs one; record"),
        ("interleaved", 1, "no forward of part 1 is among the spans"),
        ("zero-bubble", 1, "no backward_weight of part 0 is among the spans"),
    ],
)
def test_parts_without_spans(text: str, workers: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stage_times([span("forward", 0, 1), span("backward_input", 1, 2)], parse(text), workers)


def test_the_union_of_intervals_takes_any_order() -> None:
    assert covered_ns([(20, 30), (0, 10), (5, 25), (30, 30), (40, 41)]) == 31
