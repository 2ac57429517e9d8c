"""Pipelines that never run empty: how long a micro-batch takes of them, how many weights they keep, and how old.

Under ``pipedream`` (Narayanan et al. 2019, 1806.03377) each micro-batch is an update, under ``pipedream-2bw``
(2006.09503) every m of them are one. Both go on from step to step; a step takes what it does once they are under way::

    stage j     ... F_i  B_{i-a}  F_{i+1}  B_{i+1-a} ...          a = p - 1 - j forwards ahead of backward
    round trip  F_i of stages j ... k, back by B of k ... j, and then F_{i+k-j+1} of stage j
"""

from collections.abc import Sequence

import numpy as np

from paceline.core.types import Seconds

STREAMS = ("pipedream", "pipedream-2bw")


def micro_batch_s(busy_s: Sequence[Seconds], hop_s: Seconds) -> Seconds:
    """From one micro-batch to the next: max over j ≤ k of (Σ_{j..k} w + 2 (k - j) h) / (k - j + 1); exact.

    Every simple cycle of what waits for what is one of these round trips; with k = j it is a stage that is always busy.

    Args:
        busy_s: w, what each stage is busy for with a micro-batch, both passes.
        hop_s: h, what a message takes beside.

    >>> micro_batch_s([1.0, 2.0, 1.0], 0.0), micro_batch_s([1.0, 1.0], 0.5)
    (2.0, 1.5)
    """
    if not hop_s:
        return max(busy_s)
    sums = np.cumsum([0.0, *busy_s])
    length = np.arange(1, len(busy_s) + 1)
    trips = [(sums[n:] - sums[:-n]).max() + 2 * (n - 1) * hop_s for n in length]
    return float(np.max(np.array(trips) / length))


def versions(schedule: str, stages: int, j: int) -> int:
    """Of its weights that stage j keeps: those of all micro-batches that it has begun, the newest among them."""
    if schedule not in STREAMS:
        return 1
    return stages - j if schedule == "pipedream" else 2


def stage_staleness(schedule: str, stages: int, j: int) -> int:
    """Updates of stage j between reading its weights for a micro-batch and applying the gradient."""
    return versions(schedule, stages, j) - 1


def staleness(schedule: str, parameters: Sequence[int]) -> float:
    """Mean over all elements, of stages that have so many each.

    >>> staleness("pipedream", [10, 10, 10]), staleness("pipedream-2bw", [10, 20]), staleness("1f1b", [10, 20])
    (1.0, 1.0, 0.0)
    """
    if schedule not in STREAMS:
        return 0.0
    stages, elements = len(parameters), sum(parameters)
    ages = [stage_staleness(schedule, stages, j) for j in range(stages)]
    return sum(age * size for age, size in zip(ages, parameters, strict=True)) / elements if elements else 0.0
