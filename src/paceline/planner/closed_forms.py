"""Pace of a policy by equations, where replicas take equal times but for a delay that some of them have.

::

    synchronous; K-sync              E[X_{K:P}]
    asynchronous; K-batch-async      K / Σ 1 / E[X_r]       staleness (P - 1) / K
    H local steps, synchronous       E[max of Σ of H X]     where delays are exponential, or always the same
    stale-synchronous                T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c), over drawn X

Letters: P replicas, K the Δs of an update, X the time of one Δ, X_{k:P} the k-th shortest of P of them, s the bound of
stale-synchronous replicas. K-sync cancels all but the first K replicas of an update, K-batch-async uses every K Δs of
any replica; Dutta et al. 2018 (1803.01113). These take milliseconds for any number of replicas; all other policies are
simulated (policies.py).
"""

from itertools import islice
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.aggregation import Aggregation, Asynchronous, Buffered, LocalSteps, StaleSynchronous, Synchronous
from paceline.clock.distributions import Constant, Exponential, ShiftedExponential
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.order_statistics import IdenticalReplicas, erlang, expected_s, identical
from paceline.planner.policy_simulation import Pace, attempts


class DelayedReplicas(NamedTuple):
    """Replicas of which some are delayed."""

    replicas: int
    batch_s: Seconds
    delay: Delay | None

    @property
    def slowed(self) -> int:
        """Number of replicas that draw delays."""
        return len(self.delay.slowed(self.replicas, seed=0)) if self.delay else 0


def predicted_pace(policy: Aggregation[Any], group: DelayedReplicas) -> Pace | None:
    """Return the pace of a resolved policy; None: it has to be simulated.

    >>> from paceline.aggregation import parse
    >>> group = DelayedReplicas(4, 0.1, Delay.parse("fraction=0.5 0.3"))
    >>> texts = ("synchronous", "buffered:k=2,cancel=true", "asynchronous", "local-steps:period=8")
    >>> [predicted_pace(parse(text), group).step_s(4).__round__(4) for text in texts]
    [0.4, 0.2, 0.16, 0.4]
    >>> predicted_pace(parse("smooth-switch:every=9"), group) is None
    True
    """
    match policy:
        case Synchronous(backups=0):
            return _k_sync(group.replicas, group)
        case Buffered(k=k, hold=True, cancel=cancel) if cancel or k == group.replicas:
            return _k_sync(k, group)
        case Buffered(k=k, hold=False, cancel=False):
            return _k_batch_async(k, group)
        case Asynchronous():
            return _k_batch_async(1, group)
        case StaleSynchronous(bound=bound):
            return _stale_synchronous(bound, group)
        case LocalSteps(period=period, over=Synchronous(backups=0)):
            return _local_steps(period, group)
    return None


def _k_sync(k: int, group: DelayedReplicas) -> Pace:
    replicas, batch_s, delay = group
    kinds = [identical(replicas - group.slowed, Constant(batch_s))]
    if delay:
        kinds.append(identical(group.slowed, delay.distribution, batch_s))
    update_s = expected_s(k, kinds) if batch_s or delay else 0.0
    return Pace(update_s, k, 0.0, 1.0, 1 - k / replicas, batch_s)


def _k_batch_async(k: int, group: DelayedReplicas) -> Pace:
    """Each replica brings a Δ every E[X_r], and while one is computed P - 1 others arrive on average.

    The share of fresh Δs is known for one replica alone: else it depends on more than means.
    """
    replicas, batch_s, delay = group
    late_s = delay.distribution.mean_s if delay else 0.0
    kinds = [(replicas - group.slowed, batch_s), (group.slowed, batch_s + late_s)]
    batches_per_s = sum(count / mean if mean else inf for count, mean in kinds if count)
    fresh = 1.0 if replicas == 1 and k == 1 else None
    return Pace(k / batches_per_s, k, (replicas - 1) / k, fresh, 0.0, batch_s)


def _local_steps(period: int, group: DelayedReplicas) -> Pace | None:
    """The last of all replicas, each after so many steps; None where the sum of their delays has no known form."""
    replicas, batch_s, delay = group
    late: IdenticalReplicas
    kinds = [identical(replicas - group.slowed, Constant(period * batch_s))]
    if delay is not None:
        match delay.distribution:
            case Constant(value):
                late = identical(group.slowed, Constant(period * (batch_s + value)))
            case Exponential(mean) if mean:
                late = erlang(group.slowed, batch_s, mean, period)
            case ShiftedExponential(shift, mean) if mean:
                late = erlang(group.slowed, batch_s + shift, mean, period)
            case _:
                return None
        kinds.append(late)
    return Pace(expected_s(replicas, kinds), period * replicas, 0.0, 1.0, 0.0, batch_s)


# ---------------------------------------------------------------------------------------------------- stale-synchronous

_ATTEMPTS = 50_000
"""Times to draw for all replicas together, for at least as many clocks as follow."""
_CLOCKS = 64
_CLOCKS_PER_BOUND = 40
_WARM_UP = 0.5
"""Share of the clocks until the fast replicas have run into the bound."""


class Clocks(NamedTuple):
    """Begin and end of each attempt, [clock, replica]."""

    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def stale_synchronous(times_s: NDArray[np.float64], bound: int) -> Clocks:
    """Compute T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c): no replica begins s + 1 ahead of the slowest.

    s = 0 is synchronous; s without end asynchronous. Source: Ho et al. 2013.

    Args:
        times_s: X, [clock, replica].
        bound: s.

    >>> two = np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    >>> stale_synchronous(two, 0).end_s.tolist(), stale_synchronous(two, 1).end_s.tolist()
    ([[1.0, 3.0], [4.0, 6.0], [7.0, 9.0]], [[1.0, 3.0], [2.0, 6.0], [4.0, 9.0]])
    """
    if bound < 0 or times_s.ndim != 2:
        raise InputError(f"bound={bound} for times of shape {times_s.shape}; write a bound of at least 0, [clock, P].")
    begin, end, slowest = np.zeros_like(times_s), np.zeros_like(times_s), np.zeros(len(times_s))
    for clock in range(len(times_s)):
        if clock:
            begin[clock] = end[clock - 1]
        if clock > bound:
            np.maximum(begin[clock], slowest[clock - 1 - bound], out=begin[clock])
        end[clock] = begin[clock] + times_s[clock]
        slowest[clock] = end[clock].max()
    return Clocks(begin, end)


def _stale_synchronous(bound: int, group: DelayedReplicas) -> Pace:
    replicas, batch_s, delay = group
    clocks = max(_CLOCKS, _CLOCKS_PER_BOUND * bound, _ATTEMPTS // replicas)
    # The same draws as the simulation of these replicas has.
    streams = (attempts(Times(compute=Constant(batch_s)), delay, r, replicas, 0, 1) for r in range(replicas))
    drawn = np.array([list(islice(stream, clocks)) for stream in streams], dtype=np.float64).T
    ends = stale_synchronous(drawn, bound).end_s
    # Updates between reading A and applying Δ: an attempt reads the version of its own last Δ or, where it had to wait,
    # that of the slowest's; ends in their order are the versions.
    version = np.empty(ends.size, dtype=np.int64)
    version[np.argsort(ends, axis=None, kind="stable")] = np.arange(1, ends.size + 1)
    written = version.reshape(ends.shape)
    read = np.zeros_like(written)
    read[1:] = written[:-1]
    slowest = np.argmax(ends, axis=1)
    for clock in range(bound + 1, clocks):
        read[clock] = np.maximum(read[clock], written[clock - 1 - bound, slowest[clock - 1 - bound]])
    began_s, ended_s = float(ends[int(clocks * _WARM_UP)].max()), float(ends[-1].min())
    kept = (ends > began_s) & (ends <= ended_s)
    stale = (written - 1 - read)[kept]
    updates = int(kept.sum())
    update_s = (ended_s - began_s) / updates if updates else nan
    return Pace(update_s, 1.0, float(stale.mean()), float((stale == 0).mean()), 0.0, batch_s, updates)
