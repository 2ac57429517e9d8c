"""Equations of stragglers: the time of an update and its staleness, one function an equation.

Letters: P replicas, K the Δs of an update, X the time of one Δ, X_{k:P} the k-th shortest of P of them, H_n the n-th
harmonic number. The policies are those of Dutta et al. 2018 (1803.01113, 2003.10579)::

    K-sync          the first K replicas; the others are cancelled           buffered:k=K,cancel=true
    K-batch-sync    the first K Δs of any replica; pending ones are cancelled  buffered:k=K,hold=false,cancel=true
    K-async         the first K replicas; the others go on                   buffered:k=K
    K-batch-async   every K Δs; no replica waits                             buffered:k=K,hold=false

The planner itself integrates (paceline.planner.order_statistics); these hold it and the simulated paces to account.
"""

from collections.abc import Callable
from math import exp, inf, lgamma, sqrt

from paceline.clock.distributions import Constant, Distribution, Exponential, Pareto, ShiftedExponential
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.order_statistics import erlang, expected_s, identical


def one_for_all(k: int) -> float:
    """Return the updates of a run with K Δs each, where every Δ is worth the same: 1 / K."""
    return 1 / k


def best_backups(
    distribution: Distribution, replicas: int, updates: Callable[[int], float] = one_for_all
) -> tuple[int, Seconds]:
    """Return b, the replicas of P not to wait for: argmin of E[X_{P-b:P}] · updates(P - b).

    Source: Chen et al. 2016 (1604.00981), section 3, where the updates that a run takes with K are measured.

    Args:
        distribution: of a replica's time.
        replicas: P, backups among them.
        updates: that a run takes with K Δs each, up to a factor; for a noise scale of N Δs ``1 + N / K``.

    Returns:
        b, and the seconds of an update.
    """
    check(1, replicas)
    each = {k: order_statistic_s(distribution, k, replicas) for k in range(replicas, 0, -1)}
    best = min(each, key=lambda k: each[k] * updates(k))
    return replicas - best, each[best]


def adasync_k(initial: int, loss_ratio: float, replicas: int, *, batches: bool = False) -> int:
    """Return AdaSync's K for a loss F_t, of K_0 for F_0: never below K_0, at most P, rounded down.

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
    """Return H_n = Σ 1/i."""
    return float(sum(1 / i for i in range(1, n + 1)))


# ------------------------------------------------------------------------------------------------- seconds an update


def order_statistic_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """Return E[X_{K:P}], when the K-th of P replicas is done.

    ::

        constant               x
        exponential            mean · (H_P - H_{P-K})
        shifted exponential    shift + mean · (H_P - H_{P-K})
        Pareto                 scale · Γ(P+1) Γ(P-K+1-1/α) / (Γ(P-K+1) Γ(P+1-1/α)); infinite for (P-K+1) α ≤ 1
        any other              integrated, to a part in 10^9

    Source: David and Nagaraja, Order Statistics, 2003; as used in 1803.01113.

    Raises:
        InputError: K is not one of 1 to P.
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
    return expected_s(k, [identical(replicas, distribution)])


def _pareto(inverse: float, k: int, replicas: int) -> float:
    left = replicas - k + 1
    if left <= inverse:
        return inf
    return exp(lgamma(replicas + 1) + lgamma(left - inverse) - lgamma(left) - lgamma(replicas + 1 - inverse))


def synchronous_s(distribution: Distribution, replicas: int) -> Seconds:
    """Return E[X_{P:P}]: all wait for the last."""
    return order_statistic_s(distribution, replicas, replicas)


def k_sync_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    """Return E[X_{K:P}]: each update begins anew with all P."""
    return order_statistic_s(distribution, k, replicas)


def backups_s(distribution: Distribution, backups: int, replicas: int) -> Seconds:
    """Return the time of ``synchronous:backups=b`` for exponential times: late replicas finish their Δ in vain.

    With l late and f at work for this update, one of the f + l is done after mean / (f + l) more::

        T(f, l) = (mean + f · T(f - 1, l) + l · T(f + 1, l - 1)) / (f + l)        T = 0 where f + l = b

    An update leaves b replicas computing, all of them late from then on, and P - b that begin: T(P - b, b). Ours.

    Raises:
        InputError: another distribution, or b outside 0 to P - 1.
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
    """Return K · mean / P for exponential times, x · ⌈K/P⌉ for equal ones; no other is known.

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
    """Return E[X_{K:P}] for exponential times, which have no memory; x / ⌊P/K⌋ for equal ones; no other is known.

    It is less than E[X_{K:P}] where a replica that has computed for long is soon done: it began before the update did.

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
    """Return K · E[X] / P whatever the distribution: no replica waits, so each has a Δ every E[X]."""
    check(k, None, replicas)
    return k * distribution.mean_s / replicas


def asynchronous_s(distribution: Distribution, replicas: int) -> Seconds:
    """Return E[X] / P."""
    return k_batch_async_s(distribution, 1, replicas)


def local_steps_s(distribution: Distribution, period: int, replicas: int) -> Seconds:
    """Return E[max over P of the sum of H times]: an update after H local steps each; exact for exponential steps.

    Raises:
        InputError: neither exponential, nor shifted, nor constant.
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
    """Return P / K - 1 whatever the distribution: an update uses K Δs, so each replica has one in every P/K-th."""
    check(k, replicas)
    return replicas / k - 1


def k_batch_async_staleness(k: int, replicas: int) -> float:
    """Return (P - 1) / K whatever the distribution: while a Δ is computed, P - 1 others arrive on average."""
    check(k, None, replicas)
    return (replicas - 1) / k


def k_async_fresh(k: int, replicas: int) -> float:
    """Return p_0 = K / P for exponential times: the share of Δs that were computed from the A they are applied to."""
    check(k, replicas)
    return k / replicas


def check(k: int, most: int | None, replicas: int | None = None) -> None:
    """Refuse a K outside 1 to P, or where one replica may bring several Δs below 1."""
    if k < 1 or (most is not None and k > most) or (replicas is not None and replicas < 1):
        raise InputError(f"K={k} of P={replicas or most} replicas; write K from 1{f' to {most}' if most else ''}.")


def _unknown(policy: str, distribution: Distribution, text: str) -> InputError:
    return InputError(
        f"no equation is known for {policy} with {distribution}; write pace(parse({text!r}), …), which simulates it."
    )
