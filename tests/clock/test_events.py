"""Events come in order of time, and in order of pushing where times are equal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clock import EventQueue


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=40))
def test_equal_times_keep_the_order_of_pushing(times: list[float]) -> None:
    queue = EventQueue[int]()
    for index, time_s in enumerate(times):
        queue.push(time_s, index)
    popped = [queue.pop() for _ in range(len(queue))]
    assert popped == sorted(range(len(times)), key=times.__getitem__)


def test_the_clock_follows_what_is_popped() -> None:
    queue = EventQueue[str]()
    queue.push(3.0, "b")
    queue.push(1.0, "a")
    assert (queue.now_s, queue.next_s, len(queue)) == (0.0, 1.0, 2)
    assert (queue.pop(), queue.now_s) == ("a", 1.0)
    queue.push(1.0, "now")
    assert (queue.pop(), queue.pop(), queue.now_s) == ("now", "b", 3.0)
    assert (queue.next_s, bool(queue)) == (math.inf, False)


def test_events_are_never_compared() -> None:
    queue = EventQueue[object]()
    first, second = object(), object()
    queue.push(1.0, first)
    queue.push(1.0, second)
    assert [queue.pop(), queue.pop()] == [first, second]


@pytest.mark.parametrize("time_s", [0.5, math.nan, math.inf])
def test_no_event_lies_in_the_past_or_nowhere(time_s: float) -> None:
    queue = EventQueue[str]()
    queue.push(1.0, "a")
    queue.pop()
    with pytest.raises(AssertionError, match="but it is 1"):
        queue.push(time_s, "b")


def test_an_empty_queue_has_nothing_to_pop() -> None:
    with pytest.raises(IndexError):
        EventQueue[int]().pop()
