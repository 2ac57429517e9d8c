"""How many Δs to wait for: backups that are left out, and AdaSync's K, which grows as the loss falls.

What replicas that take different times make of each policy, one equation a function.

Letters: P replicas, K the Δs of an update, X the time of one Δ, X_{k:P} the k-th shortest of P of them, H_n the n-th
harmonic number, s the bound of stale-synchronous replicas. The policies are those of Dutta et al. 2018 (1803.01113,
2003.10579)::

    K-sync          the first K replicas; the others are cancelled           buffered:k=K,cancel=true
    K-batch-sync    the first K Δs of anybody; what is under way is cancelled  buffered:k=K,hold=false,cancel=true
    K-async         the first K replicas; the others go on                   buffered:k=K
    K-batch-async   every K Δs; nobody waits                                 buffered:k=K,hold=false

How many to wait for is in :mod:`paceline.planner.closed_forms`; :mod:`paceline.planner.policies` simulates what has no
equation.

The pace of a policy by equations, where replicas take equal times but for a delay that some of them have.

::

    synchronous; K-sync              E[X_{K:P}]
    asynchronous; K-batch-async      K / Σ 1 / E[X_r]       staleness (P - 1) / K
    H local steps, synchronous       E[max of Σ of H X]     where delays are exponential, or always the same
    stale-synchronous                T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c), over drawn X

Quick for any number of replicas; all other policies are simulated.
"""

from collections.abc import Callable
from itertools import islice
from math import exp, inf, lgamma, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.aggregation import Aggregation, Asynchronous, Buffered, LocalSteps, StaleSynchronous, Synchronous
from paceline.clock.distributions import Constant, Distribution, Exponential, Pareto, ShiftedExponential
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.order_statistics import Alike, alike, erlang, expected_s
from paceline.planner.policy_simulation import Pace, attempts


def one_for_all(k: int) -> float:
    """Updates that a run takes with K Δs each, where every Δ is worth the same: 1 / K."""
    return 1 / k


def best_backups(
    distribution: Distribution, replicas: int, updates: Callable[[int], float] = one_for_all
) -> tuple[int, Seconds]:
    """b, how many of P replicas not to wait for: argmin of E[X_{P-b:P}] · updates(P - b).

    Source: Chen et al. 2016 (1604.00981), section 3, where the updates that a run takes with K are measured.

    Args:
        distribution: of a replica's time.
        replicas: P, backups among them.
        updates: that a run takes with K Δs each, up to a factor; for a noise scale of N Δs ``1 + N / K``.

    Returns:
        b, and the seconds of an update.

    >>> from paceline.clock.distributions import Constant, ShiftedExponential
    >>> best_backups(Constant(1.0), 8), best_backups(ShiftedExponential(1.0, 0.5), 8)[0]
    ((0, 1.0), 1)
    """
    check(1, replicas)
    each = {k: order_statistic_s(distribution, k, replicas) for k in range(replicas, 0, -1)}
    best = min(each, key=lambda k: each[k] * updates(k))
    return replicas - best, each[best]


def adasync_k(initial: int, loss_ratio: float, replicas: int, *, batches: bool = False) -> int:
    """AdaSync's K for a loss F_t, of K_0 for F_0: never below K_0, at most P, rounded down.

    ::

        K-sync, K-async                K² / (P - K) = K_0² / (P - K_0) · F_0 / F_t
        K-batch-sync, K-batch-async    K = K_0 · √(F_0 / F_t)

    Source: Dutta et al. 2020 (2003.10579): both minimise 2 (F_0 - F*) E[T(K)] / (η t) + L η σ² / (K m) over each
    interval, with E[T] growing as log(P / (P - K)) or as K.

    Args:
        initial: K_0.
        loss_ratio: F_0 / F_t.
        replicas: P.
        batches: whether one replica may bring several Δs of an update.

    >>> [adasync_k(2, ratio, 8) for ratio in (1, 4, 16, 1e9)], adasync_k(2, 4, 8, batches=True)
    ([2, 3, 5, 7], 4)
    """
    check(initial, replicas)
    if not loss_ratio > 0:
        raise InputError(f"loss_ratio={loss_ratio}; write F_0 / F_t, above 0.")
    if batches:
        found = initial * sqrt(loss_ratio)
    elif initial == replicas:
        found = float(replicas)
    else:
        c = initial**2 / (replicas - initial) * loss_ratio
        found = 2 * c * replicas / (sqrt(c * c + 4 * c * replicas) + c)
    return max(initial, min(replicas, int(found * (1 + 1e-12))))  # a root that is whole may come out just below


def harmonic(n: int) -> float:
    """H_n = Σ 1/i.

    >>> harmonic(0), harmonic(4)
    (0.0, 2.083333333333333)
    """
    return float(sum(1 / i for i in range(1, n + 1)))


# ------------------------------------------------------------------------------------------------- seconds an update


def order_statistic_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """E[X_{K:P}], when the K-th of P replicas is done.

    ::

        constant               x
        exponential            mean · (H_P - H_{P-K})
        shifted exponential    shift + mean · (H_P - H_{P-K})
        Pareto                 scale · Γ(P+1) Γ(P-K+1-1/α) / (Γ(P-K+1) Γ(P+1-1/α)); infinite for (P-K+1) α ≤ 1
        any other              integrated, to a part in 10^9

    Source: David and Nagaraja, Order Statistics, 2003; as used in 1803.01113.

    Raises:
        InputError: K is not one of 1 to P.

    >>> from paceline.clock import parse
    >>> texts = ["0.5", "exponential:mean=1", "normal:mean=9,std=1"]
    >>> [round(order_statistic_s(parse(text), 4, 4), 6) for text in texts]
    [0.5, 2.083333, 10.029375]
    """
    check(k, replicas)
    match distribution:
        case Constant(value):
            return value
        case Exponential(mean):
            return mean * (harmonic(replicas) - harmonic(replicas - k))
        case ShiftedExponential(shift, mean):
            return shift + mean * (harmonic(replicas) - harmonic(replicas - k))
        case Pareto(scale, shape):
            return scale * _pareto(1 / shape, k, replicas)
    return expected_s(k, [alike(replicas, distribution)])


def _pareto(inverse: float, k: int, replicas: int) -> float:
    left = replicas - k + 1
    if left <= inverse:
        return inf
    return exp(lgamma(replicas + 1) + lgamma(left - inverse) - lgamma(left) - lgamma(replicas + 1 - inverse))


def synchronous_s(distribution: Distribution, replicas: int) -> Seconds:
    """E[X_{P:P}]: all wait for the last."""
    return order_statistic_s(distribution, replicas, replicas)


def k_sync_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """E[X_{K:P}]: each update begins anew with all P."""
    return order_statistic_s(distribution, k, replicas)


def backups_s(distribution: Distribution, backups: int, replicas: int) -> Seconds:
    """Of ``synchronous:backups=b`` for exponential times: those who are late finish what they compute, for nothing.

    With l late and f at work for this update, one of the f + l is done after mean / (f + l) more::

        T(f, l) = (mean + f · T(f - 1, l) + l · T(f + 1, l - 1)) / (f + l)        T = 0 where f + l = b

    An update leaves b replicas computing, all of them late from then on, and P - b that begin: T(P - b, b). Ours.

    Raises:
        InputError: another distribution, or b outside 0 to P - 1.

    >>> round(backups_s(Exponential(1.0), 2, 8), 4), round(k_sync_s(Exponential(1.0), 6, 8), 4)
    (1.5344, 1.2179)
    """
    check(replicas - backups, replicas)
    if not isinstance(distribution, Exponential):
        raise _unknown("backups", distribution, f"synchronous:backups={backups}")
    before = [0.0] * (backups + 1)  # T by l, of f + l at work; nothing is left to wait for
    for working in range(backups + 1, replicas + 1):
        now = list[float]()
        for late in range(backups + 1):
            fresh = working - late
            refreshed = late * now[late - 1] if late else 0.0
            now.append((distribution.mean + fresh * before[late] + refreshed) / working if fresh >= 0 else 0.0)
        before = now
    return before[backups]


def k_batch_sync_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """K · mean / P for exponential times, x · ⌈K/P⌉ for equal ones; no other is known.

    Raises:
        InputError: another distribution, or K < 1.
    """
    check(k, None, replicas)
    match distribution:
        case Exponential(mean):
            return k * mean / replicas
        case Constant(value):
            return value * -(-k // replicas)
    raise _unknown("K-batch-sync", distribution, f"buffered:k={k},hold=false,cancel=true")


def k_async_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """E[X_{K:P}] for exponential times, which have no memory; x / ⌊P/K⌋ for equal ones; no other is known.

    Less than E[X_{K:P}] where who has computed for long is soon done: others began before the update did.

    Raises:
        InputError: another distribution, or K is not one of 1 to P.
    """
    check(k, replicas)
    match distribution:
        case Exponential():
            return order_statistic_s(distribution, k, replicas)
        case Constant(value):
            return value / (replicas // k)
    raise _unknown("K-async", distribution, f"buffered:k={k}")


def k_batch_async_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """K · E[X] / P whatever the distribution: nobody ever waits, so each replica brings a Δ every E[X].

    >>> k_batch_async_s(ShiftedExponential(1.0, 1.0), 4, 16)
    0.5
    """
    check(k, None, replicas)
    return k * distribution.mean_s / replicas


def asynchronous_s(distribution: Distribution, replicas: int) -> Seconds:
    """E[X] / P."""
    return k_batch_async_s(distribution, 1, replicas)


def local_steps_s(distribution: Distribution, period: int, replicas: int) -> Seconds:
    """E[max over P of the sum of H times]: of an update after H own steps each; exact for steps that are exponential.

    Raises:
        InputError: neither exponential, nor shifted, nor constant.

    >>> round(local_steps_s(Exponential(1.0), 16, 8) / 16, 4), round(synchronous_s(Exponential(1.0), 8), 4)
    (1.3826, 2.7179)
    """
    check(1, replicas)
    match distribution:
        case Constant(value):
            return period * value
        case Exponential(mean):
            return expected_s(replicas, [erlang(replicas, 0.0, mean, period)])
        case ShiftedExponential(shift, mean):
            return expected_s(replicas, [erlang(replicas, shift, mean, period)])
    raise _unknown("local steps", distribution, f"local-steps:period={period}")


# ------------------------------------------------------------------------------------------------------------ staleness


def k_async_staleness(k: int, replicas: int) -> float:
    """P / K - 1 whatever the distribution: an update uses K Δs, so each replica has one in every P/K-th."""
    check(k, replicas)
    return replicas / k - 1


def k_batch_async_staleness(k: int, replicas: int) -> float:
    """(P - 1) / K whatever the distribution: while a Δ is computed, others bring P - 1 on average."""
    check(k, None, replicas)
    return (replicas - 1) / k


def k_async_fresh(k: int, replicas: int) -> float:
    """p_0 = K / P for exponential times: the share of Δs that were computed from the A they are applied to."""
    check(k, replicas)
    return k / replicas


# ---------------------------------------------------------------------------------------------------- stale-synchronous


class Clocks(NamedTuple):
    """When attempts begin and end, [clock, replica]."""

    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def stale_synchronous(times_s: NDArray[np.float64], bound: int) -> Clocks:
    """T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c): nobody begins what is s + 1 ahead of the slowest.

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


def check(k: int, most: int | None, replicas: int | None = None) -> None:
    """Refuse a K outside 1 to P, or where one replica may bring several Δs below 1."""
    if k < 1 or (most is not None and k > most) or (replicas is not None and replicas < 1):
        raise InputError(f"K={k} of P={replicas or most} replicas; write K from 1{f' to {most}' if most else ''}.")


def _unknown(policy: str, distribution: Distribution, text: str) -> InputError:
    return InputError(
        f"no equation is known for {policy} with {distribution}; write pace(parse({text!r}), …), which simulates it."
    )


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
