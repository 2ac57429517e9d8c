"""Simulated time: the sources' figures, the papers' closed forms, and a pipeline by hand."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.metrics.pipeline import worker_figures
from paceline.schedule import Schedule, StageTimes, Timed, draw, parse, simulate, timeline
from tests.schedule.schedule_values import STREAMING, TEXTS, Scripted, cases

CHECK = settings(max_examples=40, deadline=None, derandomize=True)
S = 10**9
UNITS = st.integers(1, 9)

SOURCES = [("sequential", 1, 12, 48), ("sequential", 4, 48, 192), ("gpipe", 4, 48, 84), ("gpipe", 8, 96, 132)]
"""Busy and all cells of four workers whose backward takes twice as long as forward: 25 %, 57 %, 72 %."""


@pytest.mark.parametrize(("text", "micro_batches", "busy", "total"), SOURCES)
def test_the_sources_figures(text: str, micro_batches: int, busy: int, total: int) -> None:
    figures = worker_figures(simulate(parse(text), StageTimes.equal(4), 4, micro_batches))
    assert {each.utilisation for each in figures.values()} == {busy / total}
    assert f"{busy} of {total} cells are busy" in draw(parse(text), 4, micro_batches)


def bubble(schedule: Schedule, times: StageTimes, p: int, m: int) -> Fraction:
    """The part of all workers' time in which they are idle."""
    found = list(timeline(schedule, times, p, m))
    total = p * max(t.end_ns for t in found)
    return 1 - Fraction(sum(t.end_ns - t.start_ns for t in found), total)


def idle_ns(schedule: Schedule, times: StageTimes, p: int, m: int) -> int:
    """How long each worker is idle on average; with equal parts they are all as busy."""
    found = list(timeline(schedule, times, p, m))
    busy = sum(t.end_ns - t.start_ns for t in found if t.worker == 0)
    return max(t.end_ns for t in found) - busy


def times_of(parts: int, forward: int, inputs: int, weights: int) -> StageTimes:
    return StageTimes.equal(parts, forward=forward / S, backward_input=inputs / S, backward_weight=weights / S)


@pytest.mark.parametrize("text", ["gpipe", "1f1b", *STREAMING])
@CHECK
@given(st.data(), UNITS, UNITS, UNITS)
def test_bubble_of_one_part_a_worker(text: str, data: st.DataObject, f: int, b: int, w: int) -> None:
    schedule, p, m = data.draw(cases(text))
    assert bubble(schedule, times_of(p, f, b, w), p, m) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("text", ["interleaved", "interleaved:chunks=3"])
@CHECK
@given(st.data(), UNITS, UNITS, UNITS)
def test_bubble_of_interleaved_parts(text: str, data: st.DataObject, f: int, b: int, w: int) -> None:
    schedule, p, m = data.draw(cases(text))
    v = schedule.chunks
    assert bubble(schedule, times_of(p * v, f, b, w), p, m) == Fraction(p - 1, v * m + p - 1)


@CHECK
@given(cases("sequential"), UNITS, UNITS, UNITS)
def test_one_at_a_time_leaves_all_others_idle(case: tuple[Schedule, int, int], f: int, b: int, w: int) -> None:
    schedule, p, m = case
    assert bubble(schedule, times_of(p, f, b, w), p, m) == Fraction(p - 1, p)


@CHECK
@given(st.integers(1, 16), st.integers(0, 48), UNITS, UNITS, UNITS)
def test_bubble_of_zero_bubble(p: int, more: int, f: int, b: int, w: int) -> None:
    idle = idle_ns(parse("zero-bubble"), times_of(p, f, b, w), p, p + more)
    assert idle == (p - 1) * max(f, b, f + b - w)
    if w <= min(f, b):
        assert idle == (p - 1) * (f + b - w)  # table 2 of arXiv 2401.10241


@CHECK
@given(st.integers(2, 16), st.integers(1, 64), UNITS, UNITS, UNITS)
def test_zero_bubble_is_quicker_than_1f1b(p: int, m: int, f: int, b: int, w: int) -> None:
    times = times_of(p, f, b, w)
    assert idle_ns(parse("zero-bubble"), times, p, m) < idle_ns(parse("1f1b"), times, p, m)


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data(), st.integers(0, 3))
def test_no_worker_does_two_things_and_nobody_uses_what_is_not_there(
    text: str, data: st.DataObject, transfer: int
) -> None:
    schedule, p, m = data.draw(cases(text, workers=5, micro_batches=12))
    parts = schedule.parts(p)
    each = st.tuples(*[st.integers(0, 9)] * parts)
    forward, inputs, weights = (tuple(t / S for t in data.draw(each)) for _ in range(3))
    found = list(timeline(schedule, StageTimes(forward, inputs, weights, transfer / S), p, m))
    free = [0] * p
    for timed in found:
        assert timed.start_ns >= free[timed.worker]
        free[timed.worker] = timed.end_ns
    ends = {(t.action.stage, t.action.kind, t.action.micro_batch): t for t in found}
    gradient = "backward_input" if schedule.splits_backward else "backward"
    for (stage, kind, i), timed in ends.items():
        step = {"forward": -1, gradient: 1}.get(kind)
        before = ends.get((stage + step, kind, i)) if step else None
        if before is not None:
            assert timed.start_ns >= before.end_ns + transfer * (before.worker != timed.worker)


def test_a_pipeline_by_hand() -> None:
    times = StageTimes((2 / S, 3 / S), (1 / S, 4 / S), (2 / S, 1 / S), transfer=10 / S)
    found = [(str(t.action), t.start_ns, t.end_ns) for t in timeline(Scripted(["0F0 0B0", "1F0 1B0"]), times, 2, 1)]
    assert found == [("0F0", 0, 2), ("1F0", 12, 15), ("1B0", 15, 20), ("0B0", 30, 33)]


def test_parts_of_one_worker_send_nothing() -> None:
    times = StageTimes.equal(2, forward=1 / S, backward_input=1 / S, backward_weight=0.0, transfer=10 / S)
    found = list(timeline(parse("interleaved"), times, 1, 1))
    assert [(t.start_ns, t.end_ns) for t in found] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_spans_are_those_of_a_run() -> None:
    spans = simulate(parse("pipedream"), StageTimes.equal(2), 2, 2)
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)
    assert {(span.replica, span.shard, span.step, span.bytes) for span in spans} == {(0, 0, 1, 0)}
    applied = [(s.stage, s.micro_batch, s.start_ns, s.duration_ns) for s in spans if s.action == "apply"]
    assert applied == [(1, 0, 4 * 10**9, 0), (0, 0, 6 * 10**9, 0), (1, 1, 7 * 10**9, 0), (0, 1, 9 * 10**9, 0)]


def test_halves_of_a_backward() -> None:
    times = StageTimes((1.0,), (2.0,), (4.0,))
    assert [s.duration_ns // 10**9 for s in simulate(parse("1f1b"), times, 1, 1)] == [1, 6]
    assert [(s.action, s.duration_ns // 10**9) for s in simulate(parse("zero-bubble"), times, 1, 1)] == [
        ("forward", 1),
        ("backward_input", 2),
        ("backward_weight", 4),
    ]


def test_a_timeline_comes_in_an_order_in_which_it_could_be_done() -> None:
    def names(found: list[Timed]) -> list[str]:
        return [str(t.action) for t in found]

    assert names(list(timeline(parse("gpipe"), StageTimes.equal(2), 2, 1))) == ["0F0", "1F0", "1B0", "0B0"]


WRONG = [
    ({"forward": (1.0,), "backward_input": (1.0, 1.0), "backward_weight": (1.0,)}, "backward_input has 2 times, forw"),
    ({"forward": (1.0,), "backward_input": (1.0,), "backward_weight": ()}, "backward_weight has 0 times, forward 1;"),
    ({"forward": (-1.0,), "backward_input": (1.0,), "backward_weight": (1.0,)}, "no time is negative; write forward"),
    ({"forward": (), "backward_input": (), "backward_weight": (), "transfer": -1.0}, "transfer=-1.0, but no time is"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_times(fields: dict[str, tuple[float, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StageTimes(**fields)  # type: ignore[arg-type]


def test_times_of_another_cut() -> None:
    with pytest.raises(InputError, match="times of 2 parts, but stages=2 makes 4; write 4 of each"):
        simulate(parse("interleaved"), StageTimes.equal(2), 2, 2)


def test_what_a_schedule_refuses_is_not_simulated() -> None:
    with pytest.raises(InputError, match="micro_batches=3 is no multiple of stages=2"):
        simulate(parse("interleaved"), StageTimes.equal(4), 2, 3)
