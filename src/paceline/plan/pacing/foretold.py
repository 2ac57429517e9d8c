"""The pace of a policy by equations, where replicas take equal times but for a delay that some of them have.

::

    synchronous; K-sync              E[X_{K:P}]
    asynchronous; K-batch-async      K / Σ 1 / E[X_r]       staleness (P - 1) / K
    H local steps, synchronous       E[max of Σ of H X]     where delays are exponential, or always the same
    stale-synchronous                T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c), over drawn X

Quick for any number of replicas; all other policies are simulated.
"""

from itertools import islice
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.aggregation import Aggregation, Asynchronous, Buffered, LocalSteps, StaleSynchronous, Synchronous
from paceline.clock.delay import Delay
from paceline.clock.distributions import Constant, Exponential, ShiftedExponential
from paceline.clock.times import Times
from paceline.core.types import Seconds
from paceline.plan.pacing.arrivals import Pace, attempts
from paceline.plan.pacing.order_statistics import Alike, alike, erlang, expected_s
from paceline.plan.pacing.stragglers import Clocks, k_batch_async_staleness, stale_synchronous


class Team(NamedTuple):
    """Replicas of which some are delayed."""

    replicas: int
    batch_s: Seconds
    delay: Delay | None

    @property
    def slowed(self) -> int:
        """How many draw delays."""
        return len(self.delay.slowed(self.replicas, seed=0)) if self.delay else 0

    @property
    def groups(self) -> list[Alike]:
        """Those that don't, and those that do."""
        steady = alike(self.replicas - self.slowed, Constant(self.batch_s))
        return [steady, alike(self.slowed, self.delay.distribution, self.batch_s)] if self.delay else [steady]

    @property
    def batches_per_s(self) -> float:
        """Of all replicas where nobody waits; infinite where batches take no time."""
        late_s = self.delay.distribution.mean_s if self.delay else 0.0
        kinds = [(self.replicas - self.slowed, self.batch_s), (self.slowed, self.batch_s + late_s)]
        return sum(count / mean if mean else inf for count, mean in kinds if count)


def foretold(policy: Aggregation[Any], team: Team) -> Pace | None:
    """The pace of a resolved policy; None: it has to be simulated.

    >>> from paceline.aggregation import parse
    >>> team = Team(4, 0.1, Delay.parse("fraction=0.5 0.3"))
    >>> [foretold(parse(text), team).step_s(4).__round__(4) for text in ("synchronous", "buffered:k=2,cancel=true")]
    [0.4, 0.2]
    >>> foretold(parse("asynchronous"), team).step_s(4).__round__(4), foretold(parse("smooth-switch:every=9"), team)
    (0.16, None)
    >>> foretold(parse("local-steps:period=8"), team).step_s(4).__round__(4)
    0.4
    """
    match policy:
        case Synchronous(backups=0):
            return _k_sync(team.replicas, team)
        case Buffered(k=k, hold=True, cancel=cancel) if cancel or k == team.replicas:
            return _k_sync(k, team)
        case Buffered(k=k, hold=False, cancel=False):
            return _k_batch_async(k, team)
        case Asynchronous():
            return _k_batch_async(1, team)
        case StaleSynchronous(bound=bound):
            return _stale_synchronous(bound, team)
        case LocalSteps(period=period, over=Synchronous(backups=0)):
            return _own_steps(period, team)
    return None


def _k_sync(k: int, team: Team) -> Pace:
    update_s = expected_s(k, team.groups) if team.batch_s or team.delay else 0.0
    return Pace(update_s, k, 0.0, 1.0, 1 - k / team.replicas, team.batch_s)


def _own_steps(period: int, team: Team) -> Pace | None:
    """Of all replicas at once, each after so many steps: of sums that are known."""
    steady = alike(team.replicas - team.slowed, Constant(period * team.batch_s))
    late = None if team.delay is None else _sums(period, team)
    if team.delay is not None and late is None:
        return None
    update_s = expected_s(team.replicas, [steady] if late is None else [steady, late])
    return Pace(update_s, period * team.replicas, 0.0, 1.0, 0.0, team.batch_s)


def _sums(period: int, team: Team) -> Alike | None:
    """Of as many times of a replica that is slowed; None where their distribution has no name."""
    assert team.delay is not None, "nobody is slowed"
    match team.delay.distribution:
        case Constant(value):
            return alike(team.slowed, Constant(period * (team.batch_s + value)))
        case Exponential(mean) if mean:
            return erlang(team.slowed, team.batch_s, mean, period)
        case ShiftedExponential(shift, mean) if mean:
            return erlang(team.slowed, team.batch_s + shift, mean, period)
    return None


def _k_batch_async(k: int, team: Team) -> Pace:
    """Fresh: with one replica all of them; else it depends on more than means."""
    fresh = 1.0 if team.replicas == 1 and k == 1 else None
    return Pace(k / team.batches_per_s, k, k_batch_async_staleness(k, team.replicas), fresh, 0.0, team.batch_s)


# ---------------------------------------------------------------------------------------------------- stale-synchronous

_ATTEMPTS = 50_000
"""To draw for all replicas together, and at least as many clocks as follow."""
_CLOCKS = 64
_CLOCKS_PER_BOUND = 40
_FORGOTTEN = 0.5
"""Of the clocks: until the quick ones have run into the bound."""


def _stale_synchronous(bound: int, team: Team) -> Pace:
    clocks = max(_CLOCKS, _CLOCKS_PER_BOUND * bound, _ATTEMPTS // team.replicas)
    found = stale_synchronous(_drawn(team, clocks), bound)
    first = int(clocks * _FORGOTTEN)
    began_s, ended_s = float(found.end_s[first].max()), float(found.end_s[-1].min())
    kept = (found.end_s > began_s) & (found.end_s <= ended_s)
    stale = _staleness(found, bound)[kept]
    updates = int(kept.sum())
    update_s = (ended_s - began_s) / updates if updates else nan
    return Pace(update_s, 1.0, float(stale.mean()), float((stale == 0).mean()), 0.0, team.batch_s, updates)


def _drawn(team: Team, clocks: int) -> NDArray[np.float64]:
    """[clock, replica]: what the simulation of the same replicas draws."""
    times = Times(compute=Constant(team.batch_s))
    streams = (attempts(times, team.delay, r, team.replicas, 0, 1) for r in range(team.replicas))
    return np.array([list(islice(stream, clocks)) for stream in streams], dtype=np.float64).T


def _staleness(found: Clocks, bound: int) -> NDArray[np.int64]:
    """Updates between reading A and applying Δ: an attempt reads what its own last Δ, or the slowest's, has made."""
    clocks, replicas = found.end_s.shape
    version = np.empty(clocks * replicas, dtype=np.int64)
    version[np.argsort(found.end_s, axis=None, kind="stable")] = np.arange(1, clocks * replicas + 1)
    made = version.reshape(clocks, replicas)
    read = np.zeros_like(made)
    read[1:] = made[:-1]
    slowest = np.argmax(found.end_s, axis=1)
    for clock in range(bound + 1, clocks):
        read[clock] = np.maximum(read[clock], made[clock - 1 - bound, slowest[clock - 1 - bound]])
    return made - 1 - read
