"""Cuts: equal to trying all of them, and quick for thousands of layers."""

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.partitioning import balanced, slowest


def best_of_all(seconds: list[int], turns: tuple[int, ...]) -> float:
    sums = [0.0, *accumulate(seconds)]
    cuts = combinations(range(1, len(seconds)), len(turns) - 1)
    return min(slowest(sums, [*cut, len(seconds)], turns) for cut in cuts)


def found(seconds: list[int], turns: tuple[int, ...]) -> float:
    cuts = balanced(seconds, len(turns), turns)
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < len(seconds) for cut in cuts)
    return slowest([0.0, *accumulate(seconds)], [*cuts, len(seconds)], turns)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_no_other_cuts_are_better(seconds: list[int], data: st.DataObject) -> None:
    turns = (1,) * data.draw(st.integers(1, len(seconds)))
    assert found(seconds, turns) == best_of_all(seconds, turns)  # whole numbers: no sum is rounded


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.data())
def test_nor_where_some_take_turns(seconds: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(2, len(seconds)))
    turns = data.draw(st.tuples(*[st.sampled_from((1, 2, 4))] * parts))
    assert found(seconds, turns) == best_of_all(seconds, turns)  # divided by powers of two alone


@settings(max_examples=20)
@given(st.lists(st.floats(1e-9, 1e3), min_size=300, max_size=300), st.integers(1, 300))
def test_a_quicker_slowest_part_can_not_be_had(seconds: list[float], parts: int) -> None:
    """Each part ends where one layer more would have been too long: so none is shorter with the first cuts."""
    sums = [0.0, *accumulate(seconds)]
    cuts = [*balanced(seconds, parts), len(seconds)]
    longest, start = slowest(sums, cuts, (1,) * parts), 0
    for left in range(parts - 1, -1, -1):
        end = start + 1
        # 1e-9: what 300 sums of doubles are rounded by is below 300 · 2e-16 of them
        while end < len(seconds) - left and sums[end + 1] - sums[start] < longest * (1 - 1e-9):
            end += 1
        start = end
    assert start < len(seconds) or longest * (1 - 1e-9) <= max(seconds)


def test_more_parts_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="write 1 to 2 stages"):
        balanced([1.0, 1.0], 3)
    with pytest.raises(InputError, match="write 2 numbers"):
        balanced([1.0, 1.0], 2, (1, 1, 1))
