"""The summary's keys, its order and its figures."""

import json
import math
from dataclasses import replace

import pytest

from paceline.core.records import Account, Record, ReplicaExit, WorkerFigures
from paceline.metrics.summary import json_safe, summarize
from paceline.schedule import StageTimes, parse, simulate
from paceline.trace.spans import Action, Span

COUNTS = ["steps", "updates", "gradients", "applied", "discarded", "cancelled", "nonfinite", "seconds"]
RATES = ["samples_per_s", "updates_per_s", "gradients_per_s"]
STALENESS = ["staleness_mean", "staleness_max", "staleness"]
BYTES = [
    "payload_bytes_per_step",
    "payload_formula_bytes_per_step",
    "peak_memory_bytes",
    "parameter_bytes",
    "optimizer_bytes",
]
SCORES = ["train_loss", "test_loss", "test_accuracy"]
MEANS = ["train_loss_mean", "test_loss_mean", "test_accuracy_mean"]
WAYS: tuple[Action, Action] = ("forward", "backward")
END = ["interrupted", "start_digest", "notes"]


def worker(replica: int, steps: int, busy_s: float, step_time_s: float | None, payload: int | None) -> WorkerFigures:
    return WorkerFigures(replica, 0, 0, steps, busy_s, step_time_s, payload, 10_000 + replica, 400)


ACCOUNT = Account(
    seconds=4.0,
    updates=12,
    gradients=20,
    applied=18,
    discarded=2,
    cancelled=1,
    nonfinite=1,
    samples=576,
    staleness={2: 6, 0: 12},
    workers=(worker(0, 10, 4.0, 0.4, 8_000), worker(1, 8, 2.0, 0.5, 6_400), worker(2, 2, 1.0, 2.0, 1_600)),
    left=(ReplicaExit(2, "killed by SIGKILL", 1.5),),
    start_digest="ab" * 32,
    notes={"batching": "one at a time"},
)
HISTORY = [
    Record(0.0, 0, 0, 1, None, 2.0, 2.2, 0.1, {"f1": 0.0}),
    Record(1.0, 4, 6, 1, 0.5, None, 1.2, 0.5, {"f1": 0.4}),
    Record(4.0, 12, 20, 3, 0.7, 0.4, 0.6, 0.9, {"f1": 0.8}),
]


def test_keys_on_a_host_in_their_order() -> None:
    history = [replace(record, test_metrics={}) for record in HISTORY]
    found = summarize(ACCOUNT, history, host=True)
    assert list(found) == [*COUNTS, *RATES, "step_time_s", "utilisation", *STALENESS, *BYTES, *SCORES, *MEANS, *END]


def test_virtual_time_has_no_host_measurements() -> None:
    found = summarize(ACCOUNT, HISTORY, host=False)
    others = [*SCORES, "test_f1", *MEANS, "test_f1_mean"]
    assert list(found) == [*COUNTS, *RATES, "utilisation", *STALENESS, *others, *END]


def test_of_a_run_that_went_on_workers_have_figures_since_then() -> None:
    found = summarize(replace(ACCOUNT, seconds=8.0, earlier_s=4.0, earlier_steps=(5, 9, 0)), HISTORY, host=True)
    assert found["steps"] == 17
    assert found["utilisation"] == [1.0, 0.5, 0.25]
    assert found["samples_per_s"] == 72.0
    assert found["payload_bytes_per_step"] == 3 * 800


def test_work_is_unknown_where_waits_are() -> None:
    assert summarize(ACCOUNT, HISTORY, host=True, waits_known=False)["utilisation"] == [None] * 3


def test_figures() -> None:
    found = summarize(ACCOUNT, HISTORY, host=True)
    assert (found["steps"], found["updates"], found["gradients"], found["nonfinite"]) == (10, 12, 20, 1)
    assert (found["samples_per_s"], found["updates_per_s"], found["gradients_per_s"]) == (144.0, 3.0, 5.0)
    assert found["step_time_s"] == 0.5
    assert found["utilisation"] == [1.0, 0.5, 0.25]
    assert (found["staleness_mean"], found["staleness_max"]) == (pytest.approx(2 / 3), 2)
    assert list(found["staleness"].items()) == [("0", 12), ("2", 6)]
    assert found["notes"] == {"batching": "one at a time"}


def test_bytes_are_those_of_one_step_of_every_worker() -> None:
    found = summarize(ACCOUNT, HISTORY, host=True)
    assert found["payload_bytes_per_step"] == 3 * 800
    assert found["payload_formula_bytes_per_step"] == 2 * 100 * 3 * 4
    assert found["peak_memory_bytes"] == [10_000, 10_001, 10_002]


def test_scores_at_the_end_and_over_the_interval() -> None:
    found = summarize(ACCOUNT, HISTORY, host=False)
    assert (found["train_loss"], found["test_loss"], found["test_accuracy"], found["test_f1"]) == (0.4, 0.6, 0.9, 0.8)
    assert found["train_loss_mean"] == pytest.approx(1.2)
    assert found["test_loss_mean"] == pytest.approx((1.7 + 3 * 0.9) / 4)
    assert found["test_accuracy_mean"] == pytest.approx((0.3 + 3 * 0.7) / 4)
    assert found["test_f1_mean"] == pytest.approx((0.2 + 3 * 0.6) / 4)


def test_a_run_in_which_nothing_happened() -> None:
    nothing = replace(ACCOUNT, seconds=0.0, updates=0, gradients=0, applied=0, staleness={}, workers=(), samples=0)
    found = summarize(nothing, [], host=True)
    assert found["steps"] == 0
    undefined = [*RATES, "step_time_s", "staleness_mean", "staleness_max", "payload_bytes_per_step", *SCORES, *MEANS]
    assert all(found[key] is None for key in undefined)


def test_a_replica_that_never_stepped_does_not_spoil_the_payload() -> None:
    workers = (*ACCOUNT.workers, worker(3, 0, 0.0, None, 0))
    assert summarize(replace(ACCOUNT, workers=workers), [], host=True)["payload_bytes_per_step"] == 3 * 800


def test_divergence_is_no_number() -> None:
    found = summarize(ACCOUNT, [*HISTORY, Record(5.0, 13, 21, 3, 0.0, math.nan, math.inf, 0.1)], host=False)
    assert (found["train_loss"], found["test_loss"], found["train_loss_mean"]) == (None, None, None)
    assert found["test_accuracy"] == 0.1
    json.dumps(found, allow_nan=False)


def test_pipelines_have_figures_of_their_own() -> None:
    spans = simulate(parse("gpipe"), StageTimes.equal(4), 4, 4)
    workers = tuple(replace(worker(0, 3, 4.0, 0.4, 8_000), stage=w, peak_saved_bytes=100 - w) for w in range(4))
    found = summarize(replace(ACCOUNT, workers=workers), HISTORY, host=True, spans=spans)
    assert found["pipeline_utilisation"] == pytest.approx(48 / 84)  # the sources' figure for 4 workers, m = 4
    assert found["bubble"] == pytest.approx(36 / 84)
    assert found["peak_saved_bytes"] == [100, 99, 98, 97]


def test_without_spans_a_pipeline_has_only_its_memory() -> None:
    workers = (replace(worker(0, 3, 4.0, 0.4, 8_000), peak_saved_bytes=7), worker(0, 3, 4.0, 0.4, 8_000))
    found = summarize(replace(ACCOUNT, workers=workers), HISTORY, host=True)
    assert found["peak_saved_bytes"] == [7, None]
    assert not {"pipeline_utilisation", "bubble"} & found.keys()


def test_replicas_of_a_pipeline_count_alike() -> None:
    """One is busy all the time, the other a third of it."""
    spans = [
        Span(0, 0, 0, "forward", 1, 0, 0, 10, 0),
        Span(1, 0, 0, "forward", 1, 0, 0, 10, 0),
        Span(1, 0, 0, "apply", 1, 0, 20, 30, 0),
    ]
    workers = tuple(replace(worker(r, 3, 4.0, 0.4, 8_000), peak_saved_bytes=7) for r in (0, 1))
    found = summarize(replace(ACCOUNT, workers=workers), HISTORY, host=True, spans=spans)
    assert (found["pipeline_utilisation"], found["bubble"]) == (pytest.approx(2 / 3), pytest.approx(1 / 6))


def test_who_take_turns_at_a_stage_count_each_as_a_worker() -> None:
    """::

    stage 0.0 |FFFFBBBB        |  8 of 16
    stage 0.1 |  FFFF    BBBBAA|  8 of 16, and an update of 2
    stage 0.2 |                |  0 of 16: there were but two micro-batches
    stage 1   |    FB    FB    |  4 of 16
    """

    def span(stage: int, copy: int, action: Action, i: int, start: int, end: int) -> Span:
        return Span(0, stage, copy, action, 1, i, start, end, 0)

    spans = [
        span(0, 0, "forward", 0, 0, 4),
        span(0, 0, "backward", 0, 4, 8),
        span(0, 1, "forward", 1, 2, 6),
        span(0, 1, "backward", 1, 10, 14),
        span(0, 1, "apply", 0, 14, 16),
        *(
            span(1, 0, action, i, 4 + 6 * i + back, 5 + 6 * i + back)
            for i in (0, 1)
            for back, action in enumerate(WAYS)
        ),
    ]
    places = ((0, 0), (0, 1), (0, 2), (1, 0))
    one = replace(worker(0, 3, 4.0, 0.4, 8_000), peak_saved_bytes=7)
    workers = tuple(replace(one, stage=stage, shard=copy) for stage, copy in places)
    found = summarize(replace(ACCOUNT, workers=workers), HISTORY, host=True, spans=spans)
    assert found["pipeline_utilisation"] == pytest.approx((8 + 8 + 0 + 4) / 64)
    assert found["bubble"] == pytest.approx((8 + 6 + 16 + 12) / 64)


def test_shards_have_only_their_memory() -> None:
    """Each computes all the time, though one waits for the other's part of a sum."""
    spans = [Span(0, 0, shard, "forward", 1, 0, 0, 10, 0) for shard in (0, 1)]
    workers = tuple(replace(worker(0, 3, 4.0, 0.4, 8_000), shard=s, peak_saved_bytes=7) for s in (0, 1))
    found = summarize(replace(ACCOUNT, workers=workers), HISTORY, host=True, spans=spans, shards=True)
    assert found["peak_saved_bytes"] == [7, 7]
    assert not {"pipeline_utilisation", "bubble"} & found.keys()


def test_what_is_no_pipeline_has_no_figures_of_one() -> None:
    spans = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0)]
    found = summarize(ACCOUNT, HISTORY, host=True, spans=spans)
    assert not {"pipeline_utilisation", "bubble", "peak_saved_bytes"} & found.keys()


def test_json_safe_reaches_every_depth() -> None:
    assert json_safe({"a": (1, math.nan, [-math.inf, "x", True])}) == {"a": [1, None, [None, "x", True]]}
