"""Lanes in order, stretches cut right, round times on the axis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.trace.lanes import Stretch, dominant, duration, lanes, present, stretch, ticks
from paceline.trace.spans import SERVER, Span


def at(replica: int, stage: int, shard: int) -> Span:
    return Span(replica, stage, shard, "wait", 1, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("workers", "labels"),
    [
        ([(10, 0, 0), (9, 0, 0), (SERVER, 0, 0)], ["replica 9", "replica 10", "server"]),
        ([(0, 1, 0), (0, 0, 0), (SERVER, 0, 0)], ["replica 0.0.0", "replica 0.1.0", "server"]),
        ([(SERVER, 0, 1), (SERVER, 0, 0), (0, 0, 0)], ["replica 0", "server 0.0", "server 0.1"]),
    ],
)
def test_a_lane_per_worker_the_server_last(workers: list[tuple[int, int, int]], labels: list[str]) -> None:
    assert [lane.label for lane in lanes(at(*worker) for worker in workers)] == labels


def test_spans_of_a_lane_come_by_their_start(synchronous: list[Span]) -> None:
    for lane in lanes(reversed(synchronous)):
        assert list(lane.spans) == sorted(lane.spans, key=lambda span: span.start_ns)
        assert lane.server == (lane.label == "server")


def test_the_whole_run_unless_told(synchronous: list[Span]) -> None:
    assert stretch(synchronous) == Stretch(10**9, 0, 39 * 10**6)
    assert stretch(synchronous, 0.01) == Stretch(10**9, 10 * 10**6, 39 * 10**6)
    assert stretch(synchronous, end_s=1.0) == Stretch(10**9, 0, 10**9)
    assert stretch([Span(0, 0, 0, "wait", 1, 0, 5, 5, 0)]).length_ns == 1


@pytest.mark.parametrize(("start_s", "end_s"), [(0.02, 0.02), (0.03, 0.02), (0.04, None), (0.05, 0.06), (-2, -1)])
def test_a_stretch_that_shows_nothing_is_refused(synchronous: list[Span], start_s: float, end_s: float | None) -> None:
    with pytest.raises(InputError, match=r"shows nothing of a run of 0.039 s; write a start and an end between 0 and"):
        stretch(synchronous, start_s, end_s)


@pytest.mark.parametrize(
    ("start", "end", "cut"),
    [
        (0, 9, None),
        (5, 15, (0, 5)),
        (12, 14, (2, 4)),
        (15, 30, (5, 10)),
        (5, 30, (0, 10)),
        (21, 25, None),
        (5, 10, None),
        (20, 25, None),
        (12, 12, (2, 2)),
    ],
)
def test_spans_are_cut_to_the_stretch(start: int, end: int, cut: tuple[int, int] | None) -> None:
    shown = Stretch(origin_ns=100, start_ns=10, end_ns=20)
    assert shown.cut(Span(0, 0, 0, "wait", 1, 0, 100 + start, 100 + end, 0)) == cut


def test_legends_show_what_the_stretch_does(synchronous: list[Span]) -> None:
    every = lanes(synchronous)
    assert present(every, stretch(synchronous)) == ["forward", "backward", "pull", "push", "apply", "wait", "delay"]
    assert present(every, stretch(synchronous, 0.0055, 0.006)) == ["backward"]


def test_the_longest_action_dominates_and_ties_follow_the_legend() -> None:
    assert dominant({"wait": 3, "forward": 2}) == "wait"
    assert dominant({"wait": 3, "forward": 3}) == "forward"


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 µs"), (2_346_000, "2.35 ms"), (1.5e9, "1.5 s"), (4e12, "4000 s")],
)
def test_durations_have_units(nanoseconds: float, text: str) -> None:
    assert duration(nanoseconds) == text


@pytest.mark.parametrize(
    ("start", "end", "labels"),
    [
        (0, 2_000_000_000, ["0.0 s", "0.5 s", "1.0 s", "1.5 s", "2.0 s"]),
        (31_200_000_000, 31_250_000_000, ["31.20 s", "31.21 s", "31.22 s", "31.23 s", "31.24 s", "31.25 s"]),
        (350, 1000, ["0.4 µs", "0.5 µs", "0.6 µs", "0.7 µs", "0.8 µs", "0.9 µs", "1.0 µs"]),
        (0, 2, ["0 ns", "1 ns", "2 ns"]),
    ],
)
def test_ticks_are_round(start: int, end: int, labels: list[str]) -> None:
    assert [label for _, label in ticks(Stretch(7, start, end), 5)] == labels


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_ticks_are_few_distinct_and_inside(start: int, length: int) -> None:
    marks = list(ticks(Stretch(0, start, start + length), 9))
    assert all(0 <= since <= length for since, _ in marks)
    assert len({label for _, label in marks}) == len(marks) <= 20
