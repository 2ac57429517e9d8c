"""Coloured area / total area, with the sources' pipelines."""

import pytest

from paceline.metrics.pipeline import covered_ns, utilisation, worker_utilisation
from paceline.trace.spans import SERVER, Action, Span


def span(replica: int, action: Action, start: int, end: int, stage: int = 0) -> Span:
    return Span(replica, stage, 0, action, 1, 0, start, end, 0)


def all_forward_all_backward(stages: int, micro_batches: int) -> list[Span]:
    """Each cell one unit: stage j forwards micro-batch i at i + j, and backwards come in the same shape, mirrored."""
    half = stages + micro_batches - 1
    cells = [(j, i + j) for j in range(stages) for i in range(micro_batches)]
    forward = [span(0, "forward", t, t + 1, stage=j) for j, t in cells]
    backward = [span(0, "backward", 2 * half - 1 - t, 2 * half - t, stage=j) for j, t in cells]
    return forward + backward


@pytest.mark.parametrize(("micro_batches", "percent"), [(1, 25), (4, 57), (8, 73)])
def test_the_sources_pipelines_of_four_workers(micro_batches: int, percent: int) -> None:
    found = utilisation(all_forward_all_backward(4, micro_batches))
    assert found == micro_batches / (micro_batches + 3)
    assert round(100 * found) == percent


def test_waiting_is_not_busy_but_slowness_is() -> None:
    spans = [span(0, "forward", 0, 2), span(0, "delay", 2, 5), span(0, "wait", 5, 10), span(1, "wait", 0, 10)]
    assert worker_utilisation(spans) == {(0, 0, 0): 0.5, (1, 0, 0): 0.0}
    assert utilisation(spans) == 0.25


def test_a_moment_covered_twice_counts_once() -> None:
    spans = [span(0, "backward", 0, 6), span(0, "recompute", 1, 3), span(0, "push", 5, 8), span(0, "wait", 8, 16)]
    assert worker_utilisation(spans) == {(0, 0, 0): 0.5}


def test_a_window_cuts_spans() -> None:
    spans = [span(0, "forward", 0, 10), span(1, "forward", 12, 20), span(1, "forward", 50, 60)]
    assert worker_utilisation(spans, (5, 15)) == {(0, 0, 0): 0.5, (1, 0, 0): 0.3}


def test_owners_are_no_workers() -> None:
    spans = [span(SERVER, "apply", 0, 100), span(0, "forward", 0, 10), span(0, "wait", 10, 20)]
    assert worker_utilisation(spans) == {(0, 0, 0): 0.5}


def test_nothing_recorded_has_no_utilisation() -> None:
    assert utilisation([]) is None
    assert worker_utilisation([span(0, "push", 7, 7)]) == {(0, 0, 0): 0.0}


def test_the_union_of_intervals_takes_any_order() -> None:
    assert covered_ns([(20, 30), (0, 10), (5, 25), (30, 30), (40, 41)]) == 31
