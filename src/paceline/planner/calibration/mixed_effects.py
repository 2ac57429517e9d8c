"""Generalised least squares with random effects: few corrections fitted to rows that have something in common.

What rows that have something in common are off by together is an effect, and each effect is shrunk towards none::

    e_i = Σ effects of what row i has + g_i · d + ε_i
    effect ~ N(0, s²) for each value of each key, d ~ N(0, s_own²) for each source, ε_i ~ N(0, n_i²)
    K_ij = Σ s_key² [same value] + s_like² [same source] exp(-|z_i - z_j|² / 2) + s_own² [same source] g_i · g_j
    ê* = k*ᵀ (K + N)⁻¹ e        variance = k** + n² - k*ᵀ (K + N)⁻¹ k*

A mixed model, with effects integrated out (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning,
2006, equations 2.25 and 2.26): few rows of a source move its effect little, many rows wholly. d is by how much a source
deviates from all in what is corrected, g_i by how much that shows in row i: a source with slow links informs about rows
that wait for links, and about others little. A family's effect likewise acts on the share in which its devices compute.

The corrections x are pulled towards what is expected of them::

    minimise  (y - f(x))ᵀ V⁻¹ (y - f(x)) + xᵀx        V = K + N

by Gauss-Newton steps, in two rounds: first with each row's noise as expected, then with more for outliers. Widths of
intervals follow from how far rows are off where they, their model or their source are left out (conformal prediction).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


class Traits(NamedTuple):
    """What a row may have in common with others."""

    keys: tuple[Any, ...]
    """Values in the order of :attr:`Scales.keys`."""
    source: str
    place: tuple[float, ...]
    """Logarithms of its sizes, in units in which rows are alike within 1."""
    noise: float
    """n, as expected."""
    group: Hashable = None
    """Rows that are left out together."""
    slopes: tuple[float, ...] = ()
    """g: by how much the logarithm of what is computed grows with each correction, in its standard deviations."""
    share: float = 1.0
    """The part of the computed time that depends on the device alone."""
    pulls: bool = True
    """Whether the corrections of all are fitted to it; if not, it informs of effects alone."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations of logarithms, chosen once for all rows."""

    keys: Mapping[str, float]
    like: float
    noise: float
    own: float = 0.0
    """Deviation of a source's own corrections, in units of what is expected of all."""
    device: str = ""
    """The key whose effect acts on the share of a row that depends on the device."""
    device_slopes: tuple[float, ...] = ()
    """Weight of each slope in that share; empty: all of a row depends on its device."""


def covariance(first: Sequence[Traits], second: Sequence[Traits], scales: Scales) -> Array:
    """Return K: one row for each of the first, one column for each of the second."""
    result = np.zeros((len(first), len(second)))
    shares = np.outer([each.share for each in first], [each.share for each in second])
    for at, (name, scale) in enumerate(scales.keys.items()):
        same = _same([each.keys[at] for each in first], [each.keys[at] for each in second])
        result += scale**2 * (same * shares if name == scales.device else same)
    left, right = (np.array([each.place for each in rows], dtype=np.float64) for rows in (first, second))
    near = np.exp(-np.square(left[:, None, :] - right[None, :, :]).sum(axis=2) / 2)
    left, right = (np.array([each.slopes for each in rows], dtype=np.float64) for rows in (first, second))
    same = _same([each.source for each in first], [each.source for each in second])
    return np.asarray(result + same * (scales.like**2 * near + scales.own**2 * (left @ right.T)))


def _same(first: Sequence[Any], second: Sequence[Any]) -> Array:
    numbers: dict[Any, int] = {}
    left = np.array([numbers.setdefault(each, len(numbers)) for each in first])
    right = np.array([numbers.setdefault(each, len(numbers)) for each in second])
    return np.asarray(np.equal(left[:, None], right[None, :]), dtype=np.float64)


# Standard deviations beyond which a row counts as far off, as Huber's loss has it (1.345 for 95 % efficiency).
_TOLERATED = 1.5
_ROUNDS = 3


def noise(errors: Array, shared: Array, expected: Array) -> Array:
    """Return n² of each row: as expected, and more for outliers (reweighted as for Huber's loss)."""
    variances = expected**2
    for _ in range(_ROUNDS):
        own = np.abs(variances * np.linalg.solve(shared + np.diag(variances), errors))
        variances = expected**2 * np.maximum(1.0, own / (_TOLERATED * expected))
    return variances


@dataclass(frozen=True)
class Effects:
    """Effects that were fitted to rows.

    Args:
        traits: of each row.
        errors: e, logarithms of measured over computed.
        noises: n².
        scales: as above.
    """

    traits: Sequence[Traits]
    errors: Array
    noises: Array
    scales: Scales

    def of(self, row: Traits) -> tuple[float, float]:
        """Return ê* of a row and its standard deviation."""
        shared = covariance([row], self.traits, self.scales)[0]
        weights = self.inverse @ shared
        own = float(covariance([row], [row], self.scales)[0, 0]) + row.noise**2
        return float(weights @ self.errors), float(np.sqrt(max(own - shared @ weights, row.noise**2)))

    def left_out(self, together: Sequence[Hashable]) -> tuple[Array, Array]:
        """Return by how much each row is off what the rows of other kinds predict, and that error's deviation.

        Equations 5.12 of the same book, for several rows at a time: e_B - ê_B = ([V⁻¹]_BB)⁻¹ [V⁻¹e]_B, with variance
        ([V⁻¹]_BB)⁻¹; of its own noise only what is expected of it.

        Args:
            together: for each row, the kind of the rows that are left out with it.
        """
        errors, variances = np.zeros(len(self.errors)), np.zeros(len(self.errors))
        weighed = self.inverse @ self.errors
        for each in dict.fromkeys(together):
            own = np.array([at for at, other in enumerate(together) if other == each])
            spread = np.linalg.inv(self.inverse[np.ix_(own, own)])
            errors[own], variances[own] = spread @ weighed[own], np.diag(spread)
        expected = np.array([each.noise**2 for each in self.traits])
        return errors, np.sqrt(np.maximum(variances - self.noises + expected, expected))

    @cached_property
    def inverse(self) -> Array:
        """The inverse V⁻¹: a few hundred rows, with noise on the diagonal, so it is well conditioned."""
        whole = covariance(self.traits, self.traits, self.scales) + np.diag(self.noises)
        return np.asarray(np.linalg.inv(whole))


def fitted(
    computed: Callable[[Array], Array],
    measured: Array,
    traits: Sequence[Traits],
    scales: Scales,
    start: Array,
    steps: int,
) -> tuple[Array, Effects]:
    """Fit corrections and effects; return x, and the effects that remain.

    Args:
        computed: x -> f, the logarithm of each row.
        measured: y.
        traits: of each row, without slopes.
        scales: of effects.
        start: where to begin; zeros, or the result for nearly the same rows.
        steps: of each round, at the most; each computes all rows once for each correction.
    """
    expected = np.array([each.noise for each in traits])
    x, noises = start, expected**2

    def at(x: Array) -> tuple[Array, list[Traits]]:
        """Return y - f at x, and the rows with their slopes there."""
        logs, slopes = linearised(computed, x)
        return measured - logs, [sloped(row, own, scales) for row, own in zip(traits, slopes, strict=True)]

    errors, rows = at(x)
    for _ in range(2):
        for at_step in range(steps):  # Gauss-Newton with these noises
            root = np.linalg.cholesky(covariance(rows, rows, scales) + np.diag(noises))
            slopes = np.array([each.slopes if each.pulls else np.zeros(len(x)) for each in rows])
            equations = np.concatenate([np.linalg.solve(root, slopes), np.eye(len(x))])
            target = np.concatenate([np.linalg.solve(root, errors), -x])  # the prior pulls x towards 0
            step = np.linalg.lstsq(equations, target, rcond=None)[0]
            # Later steps by half: slopes, and with them K, differ at both ends of a step, between which x would swing.
            step = step if at_step < WHOLE_STEPS else step / 2
            x = x + step * min(1.0, FARTHEST / max(FARTHEST, float(np.abs(step).max())))
            errors, rows = at(x)
            if np.abs(step).max() < DIFFERENCE:
                break
        noises = noise(errors, covariance(rows, rows, scales), expected)
    return x, Effects(rows, errors, noises, scales)


def sloped(row: Traits, slopes: Array, scales: Scales) -> Traits:
    """Return a row with its slopes and the share that depends on its device."""
    share = float(slopes @ np.array(scales.device_slopes)) if scales.device_slopes and np.any(slopes) else 1.0
    return row._replace(slopes=tuple(slopes), share=share)


def linearised(computed: Callable[[Array], Array], x: Array) -> tuple[Array, Array]:
    """Return the logarithm of each row at x, and by how much it grows with each deviation (finite differences)."""
    logs = computed(x)
    moved = [computed(x + DIFFERENCE * each) for each in np.eye(len(x))]
    return logs, np.stack([(other - logs) / DIFFERENCE for other in moved], axis=1)


# Standard deviations in one step: beyond, the linearisation is poor.
FARTHEST = 1.0
# Steps of a round that are taken whole.
WHOLE_STEPS = 2
# Of a standard deviation, for slopes: products of few words are of whole ones, so a smaller one would see steps.
DIFFERENCE = 0.05


# ------------------------------------------------------------------------------------------------------------ intervals

# The part of the measured rows that an interval is to contain.
COVERED = 0.9

# The prior of a source counts as much as so many of its rows or models.
PRIOR_WEIGHT = 2.0


@dataclass(frozen=True)
class Disagreement:
    """The factor c of each source, from how far off its rows were in deviations; each kind of rows counts once.

    Args:
        squares: by source, the mean square of each kind.
    """

    squares: Mapping[str, Mapping[Hashable, float]]

    @classmethod
    def of(cls, scores: Array, traits: Sequence[Traits], kinds: Sequence[Hashable]) -> "Disagreement":
        """Average the squared scores of rows by source and kind."""
        squares: dict[str, dict[Hashable, list[float]]] = {}
        for score, row, kind in zip(scores, traits, kinds, strict=True):
            squares.setdefault(row.source, {}).setdefault(kind, []).append(float(score) ** 2)
        return cls({name: {kind: float(np.mean(own)) for kind, own in by.items()} for name, by in squares.items()})

    def factor(self, source: str, without: Hashable = None) -> float:
        """Return c by all kinds but one; at least 1."""
        own = [square for kind, square in self.squares.get(source, {}).items() if kind != without]
        return sqrt(max(1.0, (PRIOR_WEIGHT + sum(own)) / (PRIOR_WEIGHT + len(own))))


@dataclass(frozen=True)
class Intervals:
    """Widths of the intervals of requested rows.

    Args:
        widths: w of a row whose model was seen, whose source was, and of any other.
        rows: how far rows of a source disagree.
        models: how far its models do.
        groups: models of sources that were seen.
    """

    widths: tuple[float, float, float]
    rows: Disagreement
    models: Disagreement
    groups: frozenset[Hashable]

    @classmethod
    def of(cls, effects: Effects) -> "Intervals":
        """Return the intervals that follow from how far off the rows were."""
        traits = effects.traits
        groups: list[Hashable] = [row.group for row in traits]

        def scores(kinds: Sequence[Hashable]) -> Array:
            errors, deviations = effects.left_out(kinds)
            return np.asarray(np.abs(errors) / deviations)

        def width(kinds: Sequence[Hashable]) -> tuple[float, Disagreement]:
            own = scores(kinds)
            disagreement = Disagreement.of(own, traits, kinds)
            factors = [disagreement.factor(row.source, kind) for row, kind in zip(traits, kinds, strict=True)]
            return _quantile(own / np.array(factors), traits), disagreement

        (of_row, rows), (of_group, models) = width(range(len(traits))), width(groups)
        of_source = _quantile(scores([row.source for row in traits]), traits)
        return cls((of_row, of_group, of_source), rows, models, frozenset(groups))

    def width(self, row: Traits) -> float:
        """Return w · c_s of a row."""
        if row.group in self.groups:
            return self.widths[0] * self.rows.factor(row.source)
        seen = row.source in self.models.squares
        return self.widths[1] * self.models.factor(row.source) if seen else self.widths[2]


def _quantile(scores: Array, traits: Sequence[Traits]) -> float:
    """Return the score below which nine of ten are, each source counting alike, and one more that is above all.

    Conformal, with weights: R. J. Tibshirani and others, Conformal Prediction Under Covariate Shift, 2019.
    """
    rows_of = Counter(row.source for row in traits)
    weights = np.array([1.0 / rows_of[row.source] for row in traits])
    order = np.argsort(scores)
    reached = np.cumsum(weights[order]) / (weights.sum() + weights.min())
    return float(scores[order][min(int(np.searchsorted(reached, COVERED)), len(scores) - 1)])
