"""What replicas that take different times make of each policy, one equation a function.

Letters: P replicas, K the Δs of an update, X the time of one Δ, X_{k:P} the k-th shortest of P of them, H_n the n-th
harmonic number, s the bound of stale-synchronous replicas. The policies are those of Dutta et al. 2018 (1803.01113,
2003.10579)::

    K-sync          the first K replicas; the others are cancelled           buffered:k=K,cancel=true
    K-batch-sync    the first K Δs of anybody; what is under way is cancelled  buffered:k=K,hold=false,cancel=true
    K-async         the first K replicas; the others go on                   buffered:k=K
    K-batch-async   every K Δs; nobody waits                                 buffered:k=K,hold=false

How many to wait for is in :mod:`paceline.plan.pacing.how_many`; :mod:`paceline.plan.pacing.pace` simulates what has no
equation.
"""

from math import exp, inf, lgamma
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.clock.base import Distribution
from paceline.clock.distributions import Constant, Exponential, Pareto, ShiftedExponential
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.plan.pacing.order_statistics import alike, erlang, expected_s


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
