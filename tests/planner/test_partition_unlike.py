"""Cuts of layers whose times hang on the part they fall to: equal to trying all of them."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.partitioning import balanced, balanced_unlike, slowest

ROWS = st.integers(1, 4).flatmap(
    lambda parts: st.integers(parts, 8).flatmap(
        lambda layers: st.tuples(
            st.lists(st.lists(st.integers(0, 9), min_size=layers, max_size=layers), min_size=parts, max_size=parts),
            st.lists(st.sampled_from((1, 2, 4)), min_size=parts, max_size=parts),
        )
    )
)


def slowest_of(rows: list[list[int]], turns: list[int], cuts: tuple[int, ...]) -> float:
    ends = pairwise([0, *cuts, len(rows[0])])
    return max(sum(row[start:end]) / n for row, n, (start, end) in zip(rows, turns, ends, strict=True))


@given(ROWS)
def test_no_cut_is_quicker(case: tuple[list[list[int]], list[int]]) -> None:
    rows, turns = case
    found = balanced_unlike(rows, turns)
    every = combinations(range(1, len(rows[0])), len(rows) - 1)
    assert slowest_of(rows, turns, found) == min(slowest_of(rows, turns, cuts) for cuts in every)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(1, 4))
def test_of_parts_that_are_alike_it_is_the_other_one(row: list[int], parts: int) -> None:
    one, other = balanced(row, parts), balanced_unlike([row] * parts)
    sums = [sum(row[:end]) for end in range(len(row) + 1)]
    assert slowest(sums, [*one, len(row)], (1,) * parts) == slowest(sums, [*other, len(row)], (1,) * parts)


def test_too_few_layers() -> None:
    with pytest.raises(InputError, match="2 layers can't be cut into 3"):
        balanced_unlike([[1, 1]] * 3)
