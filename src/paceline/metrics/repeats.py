"""Statistics over time and over the rounds of a comparison: means, and paired differences with their uncertainty."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any


def interval_mean(times_s: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Return the mean over time of the broken line through the points (trapezoid rule), at any distances.

        1/(t_n - t_1) · Σ (t_{k+1} - t_k) · (v_k + v_{k+1}) / 2

    Args:
        times_s: ascending, seconds.
        values: as many; a None was not scored and is skipped, so the line runs straight between its neighbours.

    Returns:
        The mean; if all times are equal, the mean of the values; None if nothing was scored or a value is not finite:
        a run that diverged has no mean, rather than that of its better part.

    >>> interval_mean([0.0, 1.0, 4.0], [0.0, 1.0, 1.0])
    0.875
    >>> interval_mean([0.0, 1.0, 2.0], [0.0, None, 1.0])
    0.5
    """
    points = [(t, v) for t, v in zip(times_s, values, strict=True) if v is not None]
    if not points or not all(math.isfinite(v) for _, v in points):
        return None
    # math.fsum rounds once, so that the mean does not depend on the number of points.
    span = points[-1][0] - points[0][0]
    if span == 0:
        return math.fsum(v for _, v in points) / len(points)
    return math.fsum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(points)) / span


def weighted_mean(histogram: Iterable[tuple[int, int]]) -> float | None:
    """Return the mean of a histogram of (value, count); None if it is empty.

    >>> weighted_mean([(0, 3), (4, 1)])
    1.0
    """
    pairs = list(histogram)
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None


# Figures averaged over the whole interval of training, as the Smooth Switch paper compares them.
MEASURES = ("test_accuracy_mean", "test_loss_mean", "train_loss_mean")

# Student's t, 97.5 % quantile, for 1, 2, … 30 degrees of freedom; beyond, the last one errs on the wide side.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over rounds; with two rounds or more also its standard error and 95 % interval (Student's t)."""

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    rounds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and uncertainty of at least one value.

    >>> estimate([1.0, 3.0])
    Estimate(mean=2.0, standard_error=1.0, low=-10.7062, high=14.7062, rounds=2)
    """
    mean, rounds = fmean(values), len(values)
    if rounds == 1:
        return Estimate(mean, None, None, None, 1)
    # Sample standard deviation, with n - 1, over √n.
    error = stdev(values) / math.sqrt(rounds)
    reach = _T[min(rounds - 1, len(_T)) - 1] * error
    return Estimate(mean, error, mean - reach, mean + reach, rounds)


def difference(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], measures: Sequence[str] = MEASURES
) -> dict[str, Estimate | None]:
    """Return ours minus theirs of each measure, paired by round; None if there is no pair or a round lacks the figure.

    Args:
        ours: one summary per round; rounds that only one side has completed are left out.
        theirs: the summaries of the baseline.
        measures: keys of a summary.
    """
    # Paired by round: both sides had the same start, data and disturbances of the machine.
    pairs = list(zip(ours, theirs, strict=False))
    result: dict[str, Estimate | None] = {}
    for measure in measures:
        values = [(a.get(measure), b.get(measure)) for a, b in pairs]
        differences = [a - b for a, b in values if a is not None and b is not None]
        result[measure] = estimate(differences) if pairs and len(differences) == len(pairs) else None
    return result


def mean_summary(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean over rounds of each number, and of lists element by element; None if a round lacks the figure.

    >>> mean_summary([{"updates": 10, "utilisation": [0.5, 1.0], "start_digest": "a"},
    ...               {"updates": 20, "utilisation": [0.7, 1.0], "start_digest": "b"}])
    {'updates': 15.0, 'utilisation': [0.6, 1.0]}
    """
    if not summaries:
        return {}
    columns = {key: [summary.get(key) for summary in summaries] for key in summaries[0]}
    return {key: _mean(values) for key, values in columns.items() if all(_is_figure(v) for v in values)}


def _mean(values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], list):
        return [_mean(elements) for elements in zip(*values, strict=False)]
    return fmean(values)


def _is_figure(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_figure, value))
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
