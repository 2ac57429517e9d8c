"""``run.summary``: one flat dict of figures, units in the names, ready for JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from paceline.core.records import Account, Record, WorkerFigures
from paceline.metrics.pipeline import IDLE, PipelineWorkerFigures, worker_figures
from paceline.metrics.repeats import interval_mean, weighted_mean
from paceline.trace.spans import Span

# Key of the largest memory that each worker, by rank, kept for backward at one time.
SAVED = "peak_saved_bytes"

# Key, among the notes of a pipeline, of the dependencies among the model's parts.
NEEDS = "part_dependencies"

# Figures of an account that are figures of the run as they are.
_COUNTS = ("updates", "gradients", "applied", "discarded", "cancelled", "nonfinite", "seconds")


def summarize(
    account: Account,
    history: Sequence[Record],
    *,
    host: bool,
    spans: Sequence[Span] = (),
    shards: bool = False,
    waits_known: bool = True,
) -> dict[str, Any]:
    """Return the figures of one run, in a fixed order.

    ``steps`` are those of the replica with the most; rates are per second of training time; ``utilisation`` is
    busy / total time per worker, of a run that went on from a checkpoint since then. ``payload_bytes_per_step`` is the
    sum over all workers of the bytes that each sends and receives in one step, ``payload_formula_bytes_per_step`` the
    sources' 2·|A|·P·b for it. ``train_loss``, ``test_loss``, ``test_accuracy`` and ``test_<name>`` are those of the
    last record, ``…_mean`` their mean over the interval of the history, by the trapezoid rule. A figure that was not
    measured, or is not finite, is None. Nothing is rounded.

    ``optimizer_bytes`` is the optimizer state of each worker at the end: 0 if the server of A has the only optimizer
    (then ``notes`` has its size), None if a worker has one of unknown size.

    If replicas are pipelines or shards, ``peak_saved_bytes`` is the largest memory that each worker kept for backward
    at one time. For pipelines with spans, ``pipeline_utilisation`` is compute / time of the steps over all workers,
    those that take turns at a stage too, and ``bubble`` the fraction of that time in which workers neither compute nor
    update. If operators are divided, these two are left out: shards wait for each other within recorded compute.

    If gradients were measured, ``noise_scale`` is the estimate at the end; ``noise_scale_mean`` with its relative
    standard error ``noise_scale_error``, the fraction of it that is biased, ``efficiency`` and
    ``goodput_samples_per_s`` are over the whole run (:data:`paceline.core.records.STATISTICS`).

    Args:
        account: counts and times of the run.
        history: records in order of time.
        host: True if time and memory are those of a real machine; else ``step_time_s``, payload, memory and parameter
            bytes are left out.
        spans: recorded spans.
        shards: True if operators of some stage are divided.
        waits_known: False if workers wait for each other within a step for a time that is not measured: then
            ``utilisation`` is None for each.
    """
    workers, seconds = account.workers, account.seconds
    since_s, earlier = seconds - account.earlier_s, dict(enumerate(account.earlier_steps))
    figures: dict[str, Any] = {"steps": max((w.steps + earlier.get(w.replica, 0) for w in workers), default=0)}
    figures |= {name: getattr(account, name) for name in _COUNTS}
    for name in ("samples", "updates", "gradients"):
        figures[f"{name}_per_s"] = getattr(account, name) / seconds if seconds > 0 else None
    if host:
        times = [w.step_time_s for w in workers if w.step_time_s is not None]
        figures["step_time_s"] = median(times) if times else None
    figures["utilisation"] = [w.busy_s / since_s if waits_known and since_s > 0 else None for w in workers]
    histogram = sorted(account.staleness.items())
    figures["staleness_mean"] = weighted_mean(histogram)
    figures["staleness_max"] = histogram[-1][0] if histogram else None
    figures["staleness"] = {str(staleness): count for staleness, count in histogram}
    # Workers that did not count their messages are left out of the sums, not counted as 0.
    if host:
        sent = [w.payload_bytes / w.steps for w in workers if w.payload_bytes is not None and w.steps]
        sizes = [w.parameter_bytes for w in workers]
        counted = [size for size in sizes if size is not None]
        figures["payload_bytes_per_step"] = sum(sent) if sent else None
        figures["payload_formula_bytes_per_step"] = 2 * sum(counted) if counted else None
        figures["peak_memory_bytes"] = [w.peak_memory_bytes for w in workers]
        figures["parameter_bytes"] = sizes
        figures["optimizer_bytes"] = [w.optimizer_bytes for w in workers]
    # Shards wait for each other inside spans of compute, so that their utilisation would be too high.
    if any(w.peak_saved_bytes is not None for w in workers):
        figures |= _areas(workers, () if shards else spans)
        figures[SAVED] = [w.peak_saved_bytes for w in workers]
    figures |= account.statistics
    figures |= _scores([record.row() for record in history])
    figures |= {"interrupted": account.interrupted} | ({"signal": account.signal} if account.signal else {})
    figures |= {"stopped": account.stopped} if account.stopped is not None else {}
    figures |= {"start_digest": account.start_digest, "notes": dict(account.notes)}
    return {key: json_safe(value) for key, value in figures.items()}


def json_safe(value: Any) -> Any:
    """Return the value with None for floats that JSON lacks (NaN, infinities), at any depth.

    >>> json_safe({"loss": [1.5, float("nan")], "note": "inf"})
    {'loss': [1.5, None], 'note': 'inf'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(part) for part in value]
    return value


def _areas(workers: Sequence[WorkerFigures], spans: Sequence[Span]) -> dict[str, Any]:
    """Return utilisation and bubble over all workers of the pipelines of which anything was recorded."""
    each: list[PipelineWorkerFigures] = []
    for replica, count in Counter(w.replica for w in workers).items():
        recorded = worker_figures(spans, replica).values()
        # Of a pipeline that was recorded, a worker without spans was idle.
        each += [*recorded, *[IDLE] * (count - len(recorded) if recorded else 0)]
    if not each:
        return {}
    return {
        "pipeline_utilisation": fmean(figures.utilisation for figures in each),
        "bubble": fmean(figures.bubble for figures in each),
    }


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fixed = ["train_loss", "test_loss", "test_accuracy"]
    names = fixed + sorted({key for row in rows for key in row if key.startswith("test_")} - set(fixed))
    times = [row["time_s"] for row in rows]
    last = {name: rows[-1].get(name) if rows else None for name in names}
    return last | {f"{name}_mean": interval_mean(times, [row.get(name) for row in rows]) for name in names}
