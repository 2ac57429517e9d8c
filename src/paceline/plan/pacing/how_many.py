"""How many Δs to wait for: backups that are left out, and AdaSync's K, which grows as the loss falls."""

from collections.abc import Callable
from math import sqrt

from paceline.clock.base import Distribution
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.plan.pacing.stragglers import check, order_statistic_s


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
