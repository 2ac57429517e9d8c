"""The pieces of a step, measured one by one on processes that are as busy as its workers will be."""

from statistics import median

import numpy as np

from paceline.comm.nursery import Nursery
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.virtual.pieces.forecast import Forecast, forecast, update_s
from paceline.plan.host.profile import Busy, Pieces

SPREADS_WITH = 9
"""Of fewer passes the 5th and the 95th of 100 say nothing."""


def pieces_of(job: Job, nursery: Nursery, busy: Busy) -> Pieces:
    """Of a job.

    Args:
        job: whose.
        nursery: of its processes.
        busy: how far passes differ, where a few are measured.

    Raises:
        InputError: the model can't be cut or divided as the strategy says.
        WorkerError: a process failed.
    """
    seen = forecast(job, nursery)
    return put_together(seen, update_s(job, job.strategy.replicas, seen.steps_on), busy)


def put_together(seen: Forecast, updated_s: Seconds, busy: Busy) -> Pieces:
    """What was measured, and how far one pass differs from another."""
    compute_s, low, high = median(seen.compute_s), busy.low, busy.high
    if len(seen.compute_s) >= SPREADS_WITH:
        low, high = (float(each) / compute_s for each in np.quantile(list(seen.compute_s), (0.05, 0.95)))
    return Pieces(compute_s, seen.pull_s + seen.push_s, updated_s, min(low, 1.0), max(high, 1.0))
