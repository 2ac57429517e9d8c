"""Order statistics of replicas' times: the expected time until the k-th of several replicas is done.

::

    E[X_{k:P}] = ∫_0^∞ P(at most k - 1 are done by x) dx = ∫_0^∞ P(at least P - k + 1 are not) dx

With n replicas of one kind and n' of another, where M and M' are not done: P(M + M' ≥ m) = Σ_i P(M = i) P(M' ≥ m - i).
Everything that is added is positive, so long tails keep their digits.

The integral, to a part in 10^10, is that of a function that falls from 1 to 0: in pieces between marks and, beyond the
last mark, in pieces that double; each piece is halved until that changes nothing.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import erfc, exp, inf, sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.clock import distributions
from paceline.clock.distributions import Constant, Distribution, Lognormal, Normal
from paceline.core.errors import InputError
from paceline.core.registry import registered
from paceline.core.types import Seconds

Floats: TypeAlias = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_PRECISION = 1e-10
_HALVINGS = 40
# Near the end of the doubles.
_FAR = 1e300
# Lower limit of the argument of a logarithm that may be 0.
_TINY = 1e-300


def integral(function: Callable[[Floats], Floats], marks: Sequence[float]) -> float:
    """Compute ∫_0^∞ function.

    Args:
        function: of many points at once; at most 1, and falling faster than 1/x in the end.
        marks: above 0, growing: where it bends or jumps; the last is where its tail begins.

    >>> round(integral(lambda x: np.exp(-x), [1.0]), 9)
    1.0
    >>> round(integral(lambda x: (1 + x) ** -1.5, [1.0]), 7)
    2.0
    """
    marks = marks or [1.0]
    ends = [0.0]
    for mark, following in pairwise([*marks, marks[-1]]):  # no piece is longer than all before it
        ends.append(mark)
        while 2 * ends[-1] < following:
            ends.append(2 * ends[-1])
    total = 0.0
    for a, b in pairwise(ends):
        total += _piece(function, a, b, total)
    # Beyond the last mark: pieces that double, until one adds too little; the rest falls as the last two did, as a
    # geometric series, which is infinite where they don't fall.
    tail, last, start, width, rest = 0.0, 0.0, ends[-1], ends[-1] or 1.0, inf
    while rest > _PRECISION * (total + tail) and start + width < _FAR:
        piece = _piece(function, start, start + width, total + tail)
        rest = 0.0 if piece == 0 else inf if last <= piece else piece * piece / (last - piece)
        tail, last, start, width = tail + piece, piece, start + width, 2 * width
    return total + (tail + rest)


def _piece(function: Callable[[Floats], Floats], a: float, b: float, before: float) -> float:
    """Integrate from a to b, to a part of the whole until b."""

    def gauss(a: float, b: float) -> float:
        half = (b - a) / 2
        return half * float(_WEIGHTS @ function(a + half * (1 + _NODES)))

    first = gauss(a, b)
    waiting, total, error = [(a, b, first, 0)], 0.0, _PRECISION * (before + first)
    while waiting:
        left, right, whole, halvings = waiting.pop()
        middle = (left + right) / 2
        halves = gauss(left, middle), gauss(middle, right)
        if abs(sum(halves) - whole) <= error or halvings == _HALVINGS:
            total += sum(halves)
        else:
            waiting += [(left, middle, halves[0], halvings + 1), (middle, right, halves[1], halvings + 1)]
    return total


# ------------------------------------------------------------------------------------------------------------- replicas

# P(X > x) of many x.
Survival: TypeAlias = Callable[[Floats], Floats]


class IdenticalReplicas(NamedTuple):
    """Replicas whose times have one distribution."""

    replicas: int
    survival: Survival
    marks: tuple[Seconds, ...]
    """Times at which it bends, jumps or falls: ends of an integral's pieces."""
    power: float = inf
    """Exponent of its tail, P(X > x) ~ x^-power; infinite where it falls faster than any."""


def identical(replicas: int, distribution: Distribution, extra_s: Seconds = 0.0) -> IdenticalReplicas:
    """Return replicas of a distribution.

    Args:
        replicas: their number.
        distribution: of a time.
        extra_s: constant that is added to each time.

    Raises:
        InputError: a distribution that is none of those that have a name.
    """
    survival, marks, power = _survival(distribution)
    return IdenticalReplicas(replicas, lambda x: survival(x - extra_s), tuple(extra_s + mark for mark in marks), power)


def erlang(replicas: int, shift_s: Seconds, mean_s: Seconds, steps: int) -> IdenticalReplicas:
    """Return replicas that take so many exponential steps in a row: P(X > x) = e^-y Σ_{i < steps} y^i / i!."""

    def survival(x: Floats) -> Floats:
        y = np.maximum(0.0, (x - steps * shift_s) / mean_s)
        orders = np.arange(steps)
        # In logarithms: powers and factorials of hundreds of steps overflow.
        logs = orders * np.log(np.maximum(y, _TINY))[:, None] - y[:, None] - _log_factorials(steps - 1)
        return np.asarray(np.exp(logs).sum(axis=1))

    mean = steps * (shift_s + mean_s)
    return IdenticalReplicas(replicas, survival, (steps * shift_s, mean, mean + 8 * mean_s * sqrt(steps)))


def expected_s(k: int, groups: Sequence[IdenticalReplicas]) -> Seconds:
    """Compute E[X_{k:P}] of one or two groups; infinite where the tail is too heavy for a mean.

    Args:
        k: 1: the first, P: the last.
        groups: P replicas together.

    Raises:
        InputError: more than two groups with replicas in them, or a k outside 1 to P.

    >>> from paceline.clock import parse
    >>> round(expected_s(2, [identical(4, parse("exponential:mean=1"))]), 9)  # 1/4 + 1/3
    0.583333333
    >>> expected_s(3, [identical(2, parse("0.1")), identical(1, parse("normal:mean=1,std=0.1"))]).__round__(6)
    1.0
    """
    groups = [group for group in groups if group.replicas]
    replicas = sum(group.replicas for group in groups)
    if not 1 <= k <= replicas or len(groups) > 2:
        raise InputError(f"the {k}th of {replicas} replicas of {len(groups)} kinds; write k from 1 to P, of two kinds.")
    slow = replicas - k + 1
    powers = sorted(power for group in groups for power in [group.power] * group.replicas)
    # The k-th is late only if so many are: tails multiply, so their powers add up; a mean needs more than 1.
    if sum(powers[:slow]) <= 1:
        return inf
    marks = sorted({mark for group in groups for mark in group.marks if mark > 0})
    return integral(lambda x: _at_least(slow, groups, x), marks)


def _at_least(slow: int, groups: Sequence[IdenticalReplicas], x: Floats) -> Floats:
    """Compute P(so many are not done by x)."""
    first, *others = groups
    own = _counts(first, x)
    if not others:
        return np.asarray(own[:, slow:].sum(axis=1))
    tails = np.cumsum(_counts(others[0], x)[:, ::-1], axis=1)[:, ::-1]  # P(M' ≥ j), j from 0
    needed = np.clip(slow - np.arange(own.shape[1]), 0, None)
    possible = needed < tails.shape[1]
    return np.asarray((own[:, possible] * tails[:, needed[possible]]).sum(axis=1))


def _counts(group: IdenticalReplicas, x: Floats) -> Floats:
    """Compute [x, i]: P(i of the group are not done by x), the binomial of P(X > x)."""
    not_done = np.clip(group.survival(x), 0.0, 1.0)[:, None]
    logs = _log_factorials(group.replicas)
    i = np.arange(group.replicas + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        late = np.where(i == 0, 0.0, i * np.log(not_done))  # 0 · log 0 is 0
        done = np.where(i == group.replicas, 0.0, (group.replicas - i) * np.log1p(-not_done))
    return np.asarray(np.exp(logs[-1] - logs - logs[::-1] + late + done))


def _log_factorials(largest: int) -> Floats:
    """Compute log i! of 0 to the largest."""
    return np.append(0.0, np.cumsum(np.log(np.arange(1, largest + 1, dtype=np.float64))))


# -------------------------------------------------------------------------------------------- P(X > x), marks and power


def _survival(distribution: Distribution) -> tuple[Survival, tuple[Seconds, ...], float]:
    marks: tuple[Seconds, ...]
    match distribution:
        case Constant() | Normal(std=0):
            value = distribution.mean_s
            return lambda x: (x < value).astype(np.float64), (value,), inf
        case Lognormal(median, 0):
            return _survival(Constant(median))
        case distributions.Exponential(mean):
            return lambda x: np.exp(-np.maximum(x, 0.0) / mean), (0.0, mean, 8 * mean), inf
        case distributions.ShiftedExponential(shift, mean):
            marks = (shift, shift + mean, shift + 8 * mean)
            return lambda x: np.exp(-np.maximum(x - shift, 0.0) / mean), marks, inf
        case distributions.Pareto(scale, shape):
            return lambda x: (np.maximum(x, scale) / scale) ** -shape, (scale, 2 * scale), shape
        case Lognormal(median, sigma):
            marks = tuple(median * exp(z * sigma) for z in (-8, -2, 0, 2, 8))
            return lambda x: _normal_tail(np.log(np.maximum(x, _TINY) / median) / sigma), marks, inf
        case Normal(mean, std):
            marks = tuple(mean + z * std for z in (-8, -2, 0, 2, 8)) + ((0.0,) if mean < 8 * std else ())
            if distribution.negative == "clip":
                return lambda x: np.where(x < 0, 1.0, _normal_tail((x - mean) / std)), marks, inf
            marks += tuple(z * std - mean for z in (2, 8))  # of the absolute value

            def absolute(x: Floats) -> Floats:
                return np.where(x < 0, 1.0, _normal_tail((x - mean) / std) + _normal_tail((x + mean) / std))

            return absolute, marks, inf
        case distributions.Trace():
            values = np.sort(np.array(distribution.values, dtype=np.float64))
            marks = tuple(sorted({*distribution.values}))
            return lambda x: np.asarray(1.0 - np.searchsorted(values, x, side="right") / len(values)), marks, inf
    names = ", ".join(sorted(registered(Distribution)))
    raise InputError(f"P(X > x) of {distribution} is not known here; write one of {names}.")


def _normal_tail(z: Floats) -> NDArray[np.float64]:
    """Compute P(a standard normal > z)."""
    return np.array([0.5 * erfc(each / sqrt(2.0)) for each in z.tolist()])
