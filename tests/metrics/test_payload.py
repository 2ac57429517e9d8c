"""The formulas of payload against messages that are counted one by one."""

import pytest

from paceline.core.records import Account, WorkerFigures
from paceline.metrics.summary import summarize
from tests.formulas import ring_payload_bytes, step_payload_bytes


def ring(ranks: int, elements: int) -> tuple[list[list[int]], list[int]]:
    """A ring all-reduce of whole numbers, message by message: what each rank ends with, and how many it has sent."""
    vectors, sent = [[(rank + 1) * (i + 1) for i in range(elements)] for rank in range(ranks)], [0] * ranks
    slices = [range(elements * k // ranks, elements * (k + 1) // ranks) for k in range(ranks)]
    for adds in (True, False):
        for turn in range(ranks - 1):
            # Adding, rank r begins with its own slice; copying, with the one whose sum it has just completed.
            given = [(rank, slices[(rank - turn + (not adds)) % ranks]) for rank in range(ranks)]
            messages = [(rank, span, [vectors[rank][i] for i in span]) for rank, span in given]
            for rank, span, values in messages:
                sent[rank] += len(values)
                to = vectors[(rank + 1) % ranks]
                for i, value in zip(span, values, strict=True):
                    to[i] = to[i] + value if adds else value
    return vectors, sent


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("slice_", [1, 5])
def test_a_ring_sends_what_the_formula_says(ranks: int, slice_: int, width: int) -> None:
    elements = ranks * slice_
    vectors, sent = ring(ranks, elements)
    assert vectors == [[ranks * (ranks + 1) // 2 * (i + 1) for i in range(elements)]] * ranks
    assert {count * width for count in sent} == {ring_payload_bytes(elements, ranks, width)}


@pytest.mark.parametrize(("ranks", "elements"), [(3, 10), (4, 7), (8, 3)])
def test_uneven_slices_send_it_on_average(ranks: int, elements: int) -> None:
    _, sent = ring(ranks, elements)
    formula = ring_payload_bytes(elements, ranks, 4)
    assert 0 <= formula - 4 * sum(sent) / ranks < 1  # the formula is rounded up


def test_the_sources_resnet() -> None:
    """A ResNet50 of ~23M parameters on 8 workers sends a total of ~1.47 Gb an iteration, they say."""
    assert round(step_payload_bytes(23_000_000, 8) / 1e9, 2) == 1.47
    assert 2 * step_payload_bytes(23_000_000, 8, 2) == step_payload_bytes(23_000_000, 8, 4)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_the_summary_uses_the_same_formula(replicas: int) -> None:
    parameters, width = 1000, 8
    workers = tuple(WorkerFigures(r, 0, 0, 3, 1.0, 0.1, 1, 1, parameters * width) for r in range(replicas))
    account = Account(1.0, 3, 3, 3, 0, 0, 0, 9, {0: 3}, workers, (), "00")
    found = summarize(account, [], host=True)["payload_formula_bytes_per_step"]
    assert found == step_payload_bytes(parameters, replicas, width)
