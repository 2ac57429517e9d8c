"""The mean of a figure over a whole run: the paper's measure ("averaged over the entire training interval")."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise


def interval_mean(times_s: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Mean over time of the broken line through the points (trapezoid rule), so points may lie at any distance.

        1/(t_n - t_1) · Σ (t_{k+1} - t_k) · (v_k + v_{k+1}) / 2

    Args:
        times_s: ascending, seconds.
        values: as many; a None was not scored and is skipped, so the line runs straight from its neighbours.

    Returns:
        The mean; that of the values where all times are equal; None where nothing was scored or where a value is not
        finite: a run that diverged has no mean, rather than that of its better part.

    >>> interval_mean([0.0, 1.0, 4.0], [0.0, 1.0, 1.0])
    0.875
    >>> interval_mean([0.0, 1.0, 2.0], [0.0, None, 1.0])
    0.5
    """
    points = [(t, v) for t, v in zip(times_s, values, strict=True) if v is not None]
    if not points or not all(math.isfinite(v) for _, v in points):
        return None
    span = points[-1][0] - points[0][0]
    if span == 0:
        return math.fsum(v for _, v in points) / len(points)
    return math.fsum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(points)) / span


def weighted_mean(histogram: Iterable[tuple[int, int]]) -> float | None:
    """Mean of a histogram of (value, count); None where it is empty.

    >>> weighted_mean([(0, 3), (4, 1)])
    1.0
    """
    pairs = list(histogram)
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None
