"""Spans within spans: at each moment the one that began last counts."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.trace.spans import Span
from paceline.trace.text import innermost

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=8)


@given(INTERVALS)
def test_each_moment_belongs_to_one_span(intervals: list[tuple[int, int]]) -> None:
    spans = [Span(0, 0, 0, "forward", step, 0, at, at + length, 0) for step, (at, length) in enumerate(intervals)]
    pieces = list(innermost(spans))
    for moment in range(30):
        under_way = [s for s in spans if s.start_ns <= moment < s.end_ns]
        shown = [span for span, part in pieces if part.start_ns <= moment < part.end_ns]
        assert len(shown) == bool(under_way)
        if under_way:
            assert shown[0] in under_way
            assert shown[0].start_ns == max(s.start_ns for s in under_way)


@given(INTERVALS)
def test_moments_without_length_stay(intervals: list[tuple[int, int]]) -> None:
    spans = [Span(0, 0, 0, "wait", step, 0, at, at + length, 0) for step, (at, length) in enumerate(intervals)]
    shown = [span for span, _ in innermost(spans)]
    assert all(span in shown for span in spans if span.duration_ns == 0)
