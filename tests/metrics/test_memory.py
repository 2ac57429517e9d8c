"""What a worker holds, from sizes alone."""

import pytest

from paceline.core.partitioning import cut_at_borders
from paceline.schedule import in_flight, parse
from tests.formulas import Memory, memory, peak_saved_bytes, stepped, stepped_at_borders


def test_all_of_a_worker() -> None:
    found = memory(7, element_bytes=8, remembers=2, holders=3, activation_bytes=100)
    assert found == Memory(56, 56, 2 * 8 * (2 + 1), 100)
    assert found.total == 56 + 56 + 48 + 100


@pytest.mark.parametrize("elements", [0, 1, 5, 12])
@pytest.mark.parametrize("holders", [1, 2, 5])
def test_all_is_stepped_on(elements: int, holders: int) -> None:
    """What is left over by everybody."""
    left = elements % holders
    assert holders * stepped(elements, holders) == elements + (holders - 1) * left


@pytest.mark.parametrize("sizes", [[], [3], [1, 9, 1], [4, 4, 4, 4]])
def test_whole_tensors_are_stepped_on_once(sizes: list[int]) -> None:
    assert sum(stepped_at_borders(sizes, 3)) == sum(sizes)
    assert set(cut_at_borders(sizes, 3)) <= {0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))}


@pytest.mark.parametrize("text", ["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_like_micro_batches_cost_as_many_as_are_in_flight(text: str, workers: int) -> None:
    order = parse(text)
    for worker in range(workers):
        found = peak_saved_bytes(order.actions(worker, workers, 8), lambda action: 7)
        assert found == 7 * in_flight(order, worker, workers, 8)


def test_unlike_ones_by_what_is_there_together() -> None:
    """Under 1F1B the first of two workers has two neighbours at a time, under GPipe all."""
    sizes = [1, 5, 7, 2]
    peaks = [
        peak_saved_bytes(parse(text).actions(0, 2, 4), lambda action: sizes[action.micro_batch])
        for text in ("1f1b", "gpipe")
    ]
    assert peaks == [5 + 7, sum(sizes)]
