"""Contiguous partitions: equal to trying all of them, and fast for thousands of layers."""

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.partitioning import PartCosts, balanced, balanced_unlike, best_partition, slowest


def least_of_all(seconds: list[int], replicas: tuple[int, ...]) -> float:
    sums = [0.0, *accumulate(seconds)]
    cuts = combinations(range(1, len(seconds)), len(replicas) - 1)
    return min(slowest(sums, [*cut, len(seconds)], replicas) for cut in cuts)


def least_of_balanced(seconds: list[int], replicas: tuple[int, ...]) -> float:
    cuts = balanced(seconds, len(replicas), replicas)
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < len(seconds) for cut in cuts)
    return slowest([0.0, *accumulate(seconds)], [*cuts, len(seconds)], replicas)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_no_other_partition_is_faster(seconds: list[int], data: st.DataObject) -> None:
    replicas = (1,) * data.draw(st.integers(1, len(seconds)))
    assert least_of_balanced(seconds, replicas) == least_of_all(seconds, replicas)  # whole numbers: no sum is rounded


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.data())
def test_nor_if_parts_have_different_numbers_of_replicas(seconds: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(2, len(seconds)))
    replicas = data.draw(st.tuples(*[st.sampled_from((1, 2, 4))] * parts))
    assert least_of_balanced(seconds, replicas) == least_of_all(seconds, replicas)  # divided by powers of two alone


@settings(max_examples=20)
@given(st.lists(st.floats(1e-9, 1e3), min_size=300, max_size=300), st.integers(1, 300))
def test_no_faster_slowest_part_exists(seconds: list[float], parts: int) -> None:
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
    with pytest.raises(InputError, match="2 layers can't be cut into 3"):
        balanced_unlike([[1, 1]] * 3)


# ------------------------------------------------------------------------- layers whose times depend on their part

ROWS = st.integers(1, 4).flatmap(
    lambda parts: st.integers(parts, 8).flatmap(
        lambda layers: st.tuples(
            st.lists(st.lists(st.integers(0, 9), min_size=layers, max_size=layers), min_size=parts, max_size=parts),
            st.lists(st.sampled_from((1, 2, 4)), min_size=parts, max_size=parts),
        )
    )
)


def slowest_of(rows: list[list[int]], replicas: list[int], cuts: tuple[int, ...]) -> float:
    ends = pairwise([0, *cuts, len(rows[0])])
    return max(sum(row[start:end]) / n for row, n, (start, end) in zip(rows, replicas, ends, strict=True))


@given(ROWS)
def test_no_partition_of_unlike_parts_is_faster(case: tuple[list[list[int]], list[int]]) -> None:
    rows, replicas = case
    best = balanced_unlike(rows, replicas)
    every = combinations(range(1, len(rows[0])), len(rows) - 1)
    assert slowest_of(rows, replicas, best) == min(slowest_of(rows, replicas, cuts) for cuts in every)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(1, 4))
def test_parts_that_are_alike_take_as_long_either_way(row: list[int], parts: int) -> None:
    one, other = balanced(row, parts), balanced_unlike([row] * parts)
    sums = [sum(row[:end]) for end in range(len(row) + 1)]
    assert slowest(sums, [*one, len(row)], (1,) * parts) == slowest(sums, [*other, len(row)], (1,) * parts)


# ----------------------------------------------------------------------------------------------------- any costs

COSTS = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.integers(1, count),
        st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=count, max_size=count),
            min_size=count,
            max_size=count,
        ),
    )
)


@given(COSTS)
def test_the_best_partition_has_the_least_sum_and_then_the_least_maximum(
    case: tuple[int, list[list[tuple[int, int, bool]]]],
) -> None:
    parts, table = case  # table[a][b - 1]: added, worst and whether it is forbidden, of the part of items a .. b - 1
    count = len(table)

    def cost(cuts: tuple[int, ...]) -> tuple[float, float]:
        chosen = [table[a][b - 1] for a, b in pairwise([0, *cuts, count])]
        forbidden = any(each[2] for each in chosen)
        return float("inf") if forbidden else sum(each[0] for each in chosen), max(each[1] for each in chosen)

    def costs(b: int) -> PartCosts:
        added, worst, forbidden = zip(*[table[a][b - 1] for a in range(b)], strict=True)
        return PartCosts(0, np.where(forbidden, np.inf, np.array([added], float)), np.array([worst], float))

    best = best_partition(count, parts, map(costs, range(1, count + 1)))
    least = min(cost(cuts) for cuts in combinations(range(1, count), parts - 1))
    if best is None:
        assert least[0] == float("inf")
    else:
        assert cost(best[1]) == least
        assert best[0] == least[1]
