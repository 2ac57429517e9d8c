"""Slot by slot a pipeline ends when it does action by action, for every schedule that is gone through so."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planner.base import Arrangement
from paceline.planner.search.event_simulation import PartTimes, SteadyState, by_events_s, steps_s

SHORT = st.sampled_from((0.25, 1.0, 1.0, 1.001, 3.0))
"""Many alike, some hardly apart, so that what holds a pipeline up changes late."""


@st.composite
def pipelines(draw: st.DrawFn, most: int) -> tuple[Arrangement, list[PartTimes]]:
    """Of 2 to 6 stages, with two variants of their times."""
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "zero-bubble", "interleaved")))
    p, v = draw(st.integers(2, 6)), draw(st.integers(2, 4)) if schedule == "interleaved" else 1
    m = draw(st.integers(1, most // p)) * p if v > 1 else draw(st.integers(1, most))
    times = st.lists(SHORT, min_size=p * v, max_size=p * v).map(tuple)
    hops = st.sampled_from((0.0, 0.1, 2.5))
    each = st.builds(PartTimes, forward=times, backward=times, transfer=hops, blocking=hops)
    return Arrangement(stages=p, chunks=v, micro_batches=m, schedule=schedule), [draw(each), draw(each)]


@settings(max_examples=300)
@given(pipelines(most=24))
def test_as_action_by_action(case: tuple[Arrangement, list[PartTimes]]) -> None:
    made, each = case
    expected = [by_events_s(made, parts.with_blocking_sends()) for parts in each]
    # sums of the same numbers in another order, and slots taken at once that differ by 1e-14 of the time so far
    assert steps_s(made, each) == pytest.approx(expected, rel=1e-11)


@settings(max_examples=60)
@given(pipelines(most=400))
def test_however_long(case: tuple[Arrangement, list[PartTimes]]) -> None:
    test_as_action_by_action.hypothesis.inner_test(case)


def test_slots_that_have_become_alike_are_taken_at_once() -> None:
    steady, times = SteadyState(begins=3, ends=100, period=10), np.array([[1.0, 5.0]])
    assert steady.skip(3, times) == 0
    assert steady.skip(9, times + 1) == 0  # within a steady nothing is looked at
    uneven, even = np.array([[3.0, 8.0]]), np.array([[5.0, 10.0]])
    assert steady.skip(13, uneven) == 0  # one is put off by 2, the other by 3
    assert steady.skip(23, even) == 70  # both by 2: 7 steadys are left of the 77 slots
    assert even.tolist() == [[5.0 + 7 * 2, 10.0 + 7 * 2]]


def test_what_is_left_of_a_steady_is_gone_through() -> None:
    """All are put off by 1, but the 5 slots that are left are no whole steady."""
    steady, times = SteadyState(begins=0, ends=15, period=10), np.array([[0.0]])
    assert steady.skip(0, times) == 0
    assert steady.skip(10, times + 1.0) == 0
