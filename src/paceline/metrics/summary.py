"""``run.summary``: one flat dict of figures, units in the names, ready for JSON."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from paceline.core.records import Account, Record, WorkerFigures
from paceline.metrics.pipeline import IDLE, worker_figures
from paceline.metrics.pipeline import PipelineWorkerFigures as Figures
from paceline.metrics.repeats import interval_mean, weighted_mean
from paceline.trace.spans import Span

Row = Mapping[str, Any]

SAVED = "peak_saved_bytes"
"""Of a pipeline's workers, by rank: the most that each kept for backward at one time."""

NEEDS = "parts_need"
"""Among the notes of a pipeline: which parts of the model need which."""


def summarize(
    account: Account, history: Sequence[Record], *, host: bool, spans: Sequence[Span] = (), shards: bool = False
) -> dict[str, Any]:
    """The figures of one run, in a fixed order.

    ``steps`` are those of the replica that made most; rates are per second of training time; ``utilisation`` is
    busy / total time per worker. ``payload_bytes_per_step`` is what all workers send and receive while each makes one
    step, ``payload_formula_bytes_per_step`` the sources' 2·|A|·P·b for it. ``train_loss``, ``test_loss``,
    ``test_accuracy`` and ``test_<name>`` are those of the last record, ``…_mean`` their mean over the interval of the
    history, by the trapezoid rule. What was not measured, or is not finite, is None. Nothing is rounded.

    ``optimizer_bytes`` is what each worker's own optimizer remembers at the end: 0 where the server of A has the only
    one, of which ``notes`` tell, and None where a worker has one and does not say.

    Where replicas are pipelines or shards, ``peak_saved_bytes`` is the most that each worker kept for backward at one
    time. Of pipelines with spans, ``pipeline_utilisation`` is their coloured area / total area, compute / time of the
    steps over all workers, those who take turns at a stage too, and ``bubble`` the share of that time in which workers
    neither compute nor update. Where operators are divided, these two are left out: shards wait for each other within
    what is recorded as compute.

    Where gradients were looked at, ``noise_scale`` is as it stood at the end; ``noise_scale_mean`` with its relative
    standard error ``noise_scale_error``, the share of it that is biased, ``efficiency`` and ``goodput_samples_per_s``
    are over the whole run (:data:`paceline.core.records.STATISTICS`).

    Args:
        account: what happened.
        history: in order of time.
        host: whether time and memory are those of a real machine; without it ``step_time_s``, payload, memory and
            parameter bytes are left out.
        spans: what was recorded.
        shards: whether operators of some stage are divided.
    """
    rows = [record.row() for record in history]
    figures = _counts(account) | _rates(account) | _workers(account, host=host) | _staleness(account)
    if host:
        figures |= _bytes(account.workers)
    if any(w.peak_saved_bytes is not None for w in account.workers):
        figures |= _areas(account.workers, () if shards else spans)
        figures[SAVED] = [w.peak_saved_bytes for w in account.workers]
    figures |= account.statistics
    figures |= _scores(rows)
    figures |= {"interrupted": account.interrupted, "start_digest": account.start_digest, "notes": dict(account.notes)}
    return {key: json_safe(value) for key, value in figures.items()}


def json_safe(value: Any) -> Any:
    """The value with what JSON has no word for (NaN, infinities) as None, at any depth.

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


def _counts(account: Account) -> dict[str, Any]:
    return {
        "steps": max((w.steps for w in account.workers), default=0),
        "updates": account.updates,
        "gradients": account.gradients,
        "applied": account.applied,
        "discarded": account.discarded,
        "cancelled": account.cancelled,
        "nonfinite": account.nonfinite,
        "seconds": account.seconds,
    }


def _rates(account: Account) -> dict[str, Any]:
    def per_second(count: int) -> float | None:
        return count / account.seconds if account.seconds > 0 else None

    return {
        "samples_per_s": per_second(account.samples),
        "updates_per_s": per_second(account.updates),
        "gradients_per_s": per_second(account.gradients),
    }


def _workers(account: Account, *, host: bool) -> dict[str, Any]:
    times = [w.step_time_s for w in account.workers if w.step_time_s is not None]
    step_time = {"step_time_s": median(times) if times else None} if host else {}
    seconds = account.seconds
    return step_time | {"utilisation": [w.busy_s / seconds if seconds > 0 else None for w in account.workers]}


def _staleness(account: Account) -> dict[str, Any]:
    histogram = sorted(account.staleness.items())
    return {
        "staleness_mean": weighted_mean(histogram),
        "staleness_max": histogram[-1][0] if histogram else None,
        "staleness": {str(staleness): count for staleness, count in histogram},
    }


def _bytes(workers: Sequence[WorkerFigures]) -> dict[str, Any]:
    return {
        "payload_bytes_per_step": _total(workers, _per_step),
        "payload_formula_bytes_per_step": _total(workers, lambda w: w.parameter_bytes, 2),
        "peak_memory_bytes": [w.peak_memory_bytes for w in workers],
        "parameter_bytes": [w.parameter_bytes for w in workers],
        "optimizer_bytes": [w.optimizer_bytes for w in workers],
    }


def _areas(workers: Sequence[WorkerFigures], spans: Sequence[Span]) -> dict[str, Any]:
    """Of pipelines: one that recorded nothing is left out, a worker of another that recorded nothing was idle."""
    each: list[Figures] = []
    for replica, count in Counter(w.replica for w in workers).items():
        found = worker_figures(spans, replica).values()
        each += [*found, *[IDLE] * (count - len(found) if found else 0)]
    if not each:
        return {}
    return {
        "pipeline_utilisation": fmean(found.utilisation for found in each),
        "bubble": fmean(found.bubble for found in each),
    }


def _per_step(worker: WorkerFigures) -> float | None:
    return None if worker.payload_bytes is None or not worker.steps else worker.payload_bytes / worker.steps


def _total(
    workers: Sequence[WorkerFigures], figure: Callable[[WorkerFigures], float | None], factor: int = 1
) -> float | None:
    measured = [v for v in map(figure, workers) if v is not None]
    return factor * sum(measured) if measured else None


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    fixed = ["train_loss", "test_loss", "test_accuracy"]
    others = sorted({key for row in rows for key in row if key.startswith("test_")} - set(fixed))
    names = fixed + others
    times = [row["time_s"] for row in rows]
    last = {name: rows[-1].get(name) if rows else None for name in names}
    return last | {f"{name}_mean": interval_mean(times, [row.get(name) for row in rows]) for name in names}
