"""Bands over rounds, and the stretch that a swimlane shows."""

import math
from collections.abc import Sequence

import pytest

from paceline.core.records import Record
from paceline.plots.curves import band
from paceline.report.page import step_s, swimlanes
from paceline.trace.spans import SERVER, Span
from tests.report.plausible import ASYNCHRONOUS, SYNCHRONOUS, run


def history(*points: tuple[float, float | None], threshold: Sequence[int] = ()) -> list[Record]:
    ks = threshold or [1] * len(points)
    return [Record(t, 0, 0, k, None, v, None, None) for (t, v), k in zip(points, ks, strict=True)]


def test_rounds_scored_at_different_times_meet_on_all_of_them() -> None:
    found = band([history((0, 4.0), (2, 2.0), (4, 0.0)), history((0, 2.0), (4, 2.0))], "train_loss")
    assert found is not None
    assert found.x.tolist() == [0, 2, 4]
    assert found.mean.tolist() == [3, 2, 1]
    assert (found.low.tolist(), found.high.tolist()) == ([2, 2, 0], [4, 2, 2])


def test_a_band_spans_what_all_rounds_share() -> None:
    found = band([history((0, 1.0), (3, 1.0), (9, 1.0)), history((1, 3.0), (5, 3.0))], "train_loss")
    assert found is not None
    assert found.x.tolist() == [1, 3, 5]
    assert found.mean.tolist() == [2, 2, 2]


def test_thresholds_stay_until_they_change() -> None:
    steps = history((0, 0.0), (10, 0.0), threshold=[1, 3])
    found = band([steps, history((0, 0.0), (5, 0.0), (10, 0.0), threshold=[1, 3, 3])], "threshold", steps=True)
    assert found is not None
    assert found.mean.tolist() == [1, 2, 3]


@pytest.mark.parametrize("undefined", [None, math.nan, math.inf])
def test_what_was_not_scored_or_not_finite_is_no_point(undefined: float | None) -> None:
    found = band([history((0, 2.0), (1, undefined), (2, 4.0))], "train_loss")
    assert found is not None
    assert found.mean.tolist() == [2, 4]
    assert band([history((0, undefined))], "train_loss") is None
    assert band([[]], "train_loss") is None
    assert band([history((0, 1.0))], "test_f1") is None


def test_rounds_that_never_overlap_have_no_band() -> None:
    assert band([history((0, 1.0), (1, 1.0)), history((2, 1.0), (3, 1.0))], "train_loss") is None


def lane(replica: int, length: int, steps: int) -> list[Span]:
    return [Span(replica, 0, 0, "forward", s, 0, s * length, (s + 1) * length, 0) for s in range(steps)]


def test_a_step_is_that_of_the_median_replica() -> None:
    server = [Span(SERVER, 0, 0, "apply", s, 0, s, s + 1, 0) for s in range(500)]
    assert step_s([*lane(0, 10**6, 50), *lane(1, 3 * 10**6, 20), *lane(2, 10**9, 2), *server]) == pytest.approx(3e-3)
    assert step_s(server) == 0


def test_a_stretch_lies_in_the_middle_and_shows_a_dozen_replicas() -> None:
    spans = [span for replica in range(20) for span in lane(replica, 10**9, 101)]
    (svg,) = swimlanes([spans])
    assert "replica 11<" in svg
    assert "replica 12<" not in svg
    # 101 s long, 12 s shown: from 44.5 s to 56.5 s.
    assert "step 44 " in svg
    assert "step 56 " in svg
    assert "step 43 " not in svg
    assert "step 57 " not in svg


def test_runs_shorter_than_a_stretch_and_spans_without_length_are_shown() -> None:
    short = lane(0, 10**6, 3)
    nothing = [Span(SERVER, 0, 0, "apply", 1, 0, 5, 5, 0)]
    assert all(svg.startswith("<svg") for svg in swimlanes([short, run(SYNCHRONOUS).spans, nothing]))
    assert all(svg.startswith("<svg") for svg in swimlanes([nothing]))


def test_all_are_drawn_to_one_scale() -> None:
    quick, slow = lane(0, 10**6, 1000), lane(0, 5 * 10**6, 1000)
    first, second = swimlanes([quick, slow])
    assert first.count("<title>") > 2 * second.count("<title>")
    assert len(swimlanes([run(ASYNCHRONOUS).spans, slow])) == 2
