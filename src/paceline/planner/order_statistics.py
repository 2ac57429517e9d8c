"""The integral from 0 to infinity of a function that falls from 1 to 0, to a part in 10^10.

Between the marks and beyond the last of them in pieces that double: each is halved until halving it changes nothing.

When the k-th of several replicas is done, on average, whatever their times are drawn from.

::

    E[X_{k:P}] = ∫_0^∞ P(at most k - 1 are done by x) dx = ∫_0^∞ P(at least P - k + 1 are not) dx

With n replicas of one kind and n' of another, where M and M' are not done: P(M + M' ≥ m) = Σ_i P(M = i) P(M' ≥ m - i).
Everything that is added is positive, so long tails keep their digits.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import erfc, exp, inf, sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.clock.distributions import (
    DISTRIBUTIONS,
    Constant,
    Distribution,
    Exponential,
    Lognormal,
    Normal,
    Pareto,
    ShiftedExponential,
    Trace,
)
from paceline.core.errors import InputError
from paceline.core.types import Seconds

Floats: TypeAlias = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_PRECISION = 1e-10
_HALVINGS = 40


def integral(function: Callable[[Floats], Floats], marks: Sequence[float]) -> float:
    """∫_0^∞ function.

    Args:
        function: of many points at once; at most 1, and falling faster than 1/x in the end.
        marks: above 0, growing: where it bends or jumps; the last is where its tail begins.

    >>> round(integral(lambda x: np.exp(-x), [1.0]), 9)
    1.0
    >>> round(integral(lambda x: (1 + x) ** -1.5, [1.0]), 7)
    2.0
    """
    ends = [0.0, *_doubled(marks or [1.0])]
    total = 0.0
    for a, b in pairwise(ends):
        total += _piece(function, a, b, total)
    return total + _tail(function, ends[-1], total)


def _doubled(marks: Sequence[float]) -> Iterator[float]:
    """The marks and what lies between them, none more than twice the one before it."""
    for mark, following in pairwise([*marks, marks[-1]]):
        yield mark
        while 2 * mark < following:
            mark *= 2
            yield mark


def _tail(function: Callable[[Floats], Floats], start: float, before: float) -> float:
    """Pieces that double, until one adds too little; what is beyond it falls as the last two did."""
    total, last, width, beyond = 0.0, 0.0, start or 1.0, inf
    while beyond > _PRECISION * (before + total) and start + width < _FAR:
        piece = _piece(function, start, start + width, before + total)
        beyond = _geometric(piece, last)
        total, last, start, width = total + piece, piece, start + width, 2 * width
    return total + beyond


def _geometric(piece: float, last: float) -> float:
    """All that would follow if each piece were to the one before it as this one is: infinite where they don't fall."""
    if piece == 0:
        return 0.0
    return piece * piece / (last - piece) if last > piece else inf


_FAR = 1e300
"""Near the end of the doubles."""


def _piece(function: Callable[[Floats], Floats], a: float, b: float, before: float) -> float:
    """From a to b, to a part of all until b."""
    first = _gauss(function, a, b)
    waiting, total, error = [(a, b, first, 0)], 0.0, _PRECISION * (before + first)
    while waiting:
        left, right, whole, halvings = waiting.pop()
        middle = (left + right) / 2
        halves = _gauss(function, left, middle), _gauss(function, middle, right)
        if abs(sum(halves) - whole) <= error or halvings == _HALVINGS:
            total += sum(halves)
        else:
            waiting += [(left, middle, halves[0], halvings + 1), (middle, right, halves[1], halvings + 1)]
    return total


def _gauss(function: Callable[[Floats], Floats], a: float, b: float) -> float:
    half = (b - a) / 2
    return half * float(_WEIGHTS @ function(a + half * (1 + _NODES)))


Survival: TypeAlias = Callable[[Floats], Floats]
"""P(X > x) of many x."""


class Alike(NamedTuple):
    """Replicas whose times are drawn from one distribution."""

    replicas: int
    survival: Survival
    marks: tuple[Seconds, ...]
    """Where it bends, jumps or falls: what an integral has to look at."""
    power: float = inf
    """Of its tail, P(X > x) ~ x^-power; infinite where it falls faster than any."""


def alike(replicas: int, distribution: Distribution, extra_s: Seconds = 0.0) -> Alike:
    """Replicas of a distribution.

    Args:
        replicas: of them.
        distribution: of a time.
        extra_s: what each takes beside what is drawn.

    Raises:
        InputError: a distribution that is none of those that have a name.
    """
    survival, marks, power = _told(distribution)
    return Alike(replicas, lambda x: survival(x - extra_s), tuple(extra_s + mark for mark in marks), power)


def erlang(replicas: int, shift_s: Seconds, mean_s: Seconds, steps: int) -> Alike:
    """Replicas that each take so many exponential steps in a row: P(X > x) = e^-y Σ_{i < steps} y^i / i!."""

    def survival(x: Floats) -> Floats:
        y = np.maximum(0.0, (x - steps * shift_s) / mean_s)
        orders = np.arange(steps)
        logs = orders * np.log(np.maximum(y, _TINY))[:, None] - y[:, None] - _log_factorials(steps - 1)
        return np.asarray(np.exp(logs).sum(axis=1))

    mean = steps * (shift_s + mean_s)
    return Alike(replicas, survival, (steps * shift_s, mean, mean + 8 * mean_s * sqrt(steps)))


def expected_s(k: int, groups: Sequence[Alike]) -> Seconds:
    """E[X_{k:P}] of one or two groups; infinite where the tail is too heavy for a mean.

    Args:
        k: 1: the first, P: the last.
        groups: P replicas together.

    Raises:
        InputError: more than two groups with replicas in them, or a k outside 1 to P.

    >>> from paceline.clock import parse
    >>> round(expected_s(2, [alike(4, parse("exponential:mean=1"))]), 9)  # 1/4 + 1/3
    0.583333333
    >>> expected_s(3, [alike(2, parse("0.1")), alike(1, parse("normal:mean=1,std=0.1"))]).__round__(6)
    1.0
    """
    there = [group for group in groups if group.replicas]
    replicas = sum(group.replicas for group in there)
    if not 1 <= k <= replicas or len(there) > 2:
        raise InputError(f"the {k}th of {replicas} replicas of {len(there)} kinds; write k from 1 to P, of two kinds.")
    slow = replicas - k + 1
    powers = sorted(power for group in there for power in [group.power] * group.replicas)
    if sum(powers[:slow]) <= 1:
        return inf
    marks = sorted({mark for group in there for mark in group.marks if mark > 0})
    return integral(lambda x: _at_least(slow, there, x), marks)


def _at_least(slow: int, groups: Sequence[Alike], x: Floats) -> Floats:
    """P(that many are not done by x)."""
    first, *others = groups
    own = _counts(first, x)
    if not others:
        return np.asarray(own[:, slow:].sum(axis=1))
    tails = np.cumsum(_counts(others[0], x)[:, ::-1], axis=1)[:, ::-1]  # P(M' ≥ j), j from 0
    wanted = np.clip(slow - np.arange(own.shape[1]), 0, None)
    possible = wanted < tails.shape[1]
    return np.asarray((own[:, possible] * tails[:, wanted[possible]]).sum(axis=1))


def _counts(group: Alike, x: Floats) -> Floats:
    """[x, i]: P(i of the group are not done by x), the binomial of P(X > x)."""
    not_done = np.clip(group.survival(x), 0.0, 1.0)[:, None]
    logs = _log_factorials(group.replicas)
    i = np.arange(group.replicas + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        late = np.where(i == 0, 0.0, i * np.log(not_done))  # 0 · log 0 is 0
        done = np.where(i == group.replicas, 0.0, (group.replicas - i) * np.log1p(-not_done))
    found: Floats = np.exp(logs[-1] - logs - logs[::-1] + late + done)
    return found


_TINY = 1e-300
"""Where a logarithm is taken of what may be 0."""


def _log_factorials(largest: int) -> Floats:
    """log i! of 0 to the largest."""
    return np.append(0.0, np.cumsum(np.log(np.arange(1, largest + 1, dtype=np.float64))))


# ------------------------------------------------------------------------------------------- P(X > x), marks and power

_Told: TypeAlias = tuple[Survival, tuple[Seconds, ...], float]


def _told(distribution: Distribution) -> _Told:
    match distribution:
        case Constant() | Normal(std=0):
            value = distribution.mean_s
            return lambda x: (x < value).astype(np.float64), (value,), inf
        case Exponential(mean):
            return lambda x: np.exp(-np.maximum(x, 0.0) / mean), (0.0, mean, 8 * mean), inf
        case ShiftedExponential(shift, mean):
            marks = (shift, shift + mean, shift + 8 * mean)
            return lambda x: np.exp(-np.maximum(x - shift, 0.0) / mean), marks, inf
        case Pareto(scale, shape):
            return lambda x: (np.maximum(x, scale) / scale) ** -shape, (scale, 2 * scale), shape
        case Lognormal() | Normal():
            return _bell(distribution)
        case Trace():
            return _replayed(distribution.values), tuple(sorted({*distribution.values})), inf
    raise InputError(f"P(X > x) of {distribution} is not known here; write one of {', '.join(sorted(DISTRIBUTIONS))}.")


def _replayed(values: Sequence[Seconds]) -> Survival:
    ordered = np.sort(np.array(values, dtype=np.float64))

    def survival(x: Floats) -> Floats:
        return np.asarray(1.0 - np.searchsorted(ordered, x, side="right") / len(ordered))

    return survival


def _bell(distribution: Lognormal | Normal) -> _Told:
    """Whatever is normal, or whose logarithm is."""
    if isinstance(distribution, Lognormal):
        median, sigma = distribution.median, distribution.sigma
        marks = tuple(median * exp(z * sigma) for z in (-8, -2, 0, 2, 8))
        if sigma == 0:
            return _told(Constant(median))
        return lambda x: _above(np.log(np.maximum(x, _TINY) / median) / sigma), marks, inf
    mean, std = distribution.mean, distribution.std
    marks = tuple(mean + z * std for z in (-8, -2, 0, 2, 8)) + ((0.0,) if mean < 8 * std else ())
    if distribution.negative == "clip":
        return lambda x: np.where(x < 0, 1.0, _above((x - mean) / std)), marks, inf
    marks += tuple(z * std - mean for z in (2, 8))
    return lambda x: np.where(x < 0, 1.0, _above((x - mean) / std) + _above((x + mean) / std)), marks, inf


def _above(z: Floats) -> NDArray[np.float64]:
    """P(a standard normal > z)."""
    return np.array([0.5 * erfc(each / _ROOT) for each in z.tolist()])


_ROOT = sqrt(2.0)
