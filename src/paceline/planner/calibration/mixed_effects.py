"""Generalised least squares with random effects: few corrections fitted to rows that have something in common.

Fit few corrections to many rows that have something in common: generalised least squares with a prior.

::

    minimise  (y - f(x))ᵀ V⁻¹ (y - f(x)) + xᵀx        x deviations of the corrections from what is expected
                                                       V = K + N of effects.py

by Gauss's and Newton's steps, in two rounds: with each row's noise as expected, and then as what it is off its like
says.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


class Traits(NamedTuple):
    """Of a row: what it may have in common with others."""

    keys: tuple[Any, ...]
    """In the order of :attr:`Scales.keys`."""
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
    """Of what is computed, the part that hangs on the device alone."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations of logarithms, chosen once for all rows."""

    keys: Mapping[str, float]
    like: float
    noise: float
    own: float = 0.0
    """Of what a source has of its own in each correction, in what is expected of all."""
    device: str = ""
    """The key whose effect acts on the share of a row that hangs on the device."""


def covariance(first: Sequence[Traits], second: Sequence[Traits], scales: Scales) -> Array:
    """K, one row for each of the first."""
    found = np.zeros((len(first), len(second)))
    shares = np.outer([each.share for each in first], [each.share for each in second])
    for at, (name, scale) in enumerate(scales.keys.items()):
        same = _same([each.keys[at] for each in first], [each.keys[at] for each in second])
        found += scale**2 * (same * shares if name == scales.device else same)
    same = _same([each.source for each in first], [each.source for each in second])
    return found + same * (scales.like**2 * _alike(first, second) + scales.own**2 * _steep(first, second))


def _same(first: Sequence[Any], second: Sequence[Any]) -> Array:
    numbers: dict[Any, int] = {}
    left = np.array([numbers.setdefault(each, len(numbers)) for each in first])
    right = np.array([numbers.setdefault(each, len(numbers)) for each in second])
    found: Array = np.equal(left[:, None], right[None, :]).astype(np.float64)
    return found


def _alike(first: Sequence[Traits], second: Sequence[Traits]) -> Array:
    left, right = (np.array([each.place for each in rows], dtype=np.float64) for rows in (first, second))
    apart = np.square(left[:, None, :] - right[None, :, :]).sum(axis=2)
    return np.asarray(np.exp(-apart / 2), dtype=np.float64)


def _steep(first: Sequence[Traits], second: Sequence[Traits]) -> Array:
    left, right = (np.array([each.slopes for each in rows], dtype=np.float64) for rows in (first, second))
    return np.asarray(left @ right.T)


_TOLERATED = 1.5
"""Standard deviations beyond which a row counts as far off, as Huber's loss has it (1.345 for 95 % efficiency)."""
_ROUNDS = 3


def noise(errors: Array, shared: Array, expected: Array) -> Array:
    """n² of each row: as expected, and more of those that are far off."""
    found = expected**2
    for _ in range(_ROUNDS):
        own = np.abs(found * np.linalg.solve(shared + np.diag(found), errors))
        found = expected**2 * np.maximum(1.0, own / (_TOLERATED * expected))
    return found


@dataclass(frozen=True)
class Effects:
    """Fitted to rows.

    Args:
        traits: of each.
        errors: e, logarithms of measured over computed.
        noises: n².
        scales: as above.
    """

    traits: Sequence[Traits]
    errors: Array
    noises: Array
    scales: Scales

    def of(self, row: Traits) -> tuple[float, float]:
        """ê* of a row and its standard deviation."""
        shared = covariance([row], self.traits, self.scales)[0]
        weights = self.inverse @ shared
        own = float(covariance([row], [row], self.scales)[0, 0]) + row.noise**2
        return float(weights @ self.errors), float(np.sqrt(max(own - shared @ weights, row.noise**2)))

    def left_out(self, together: Sequence[Hashable]) -> tuple[Array, Array]:
        """Of each row: by how much it is off what all but those of its kind foretell, and that error's deviation.

        Equations 5.12 of the same book, for several rows at a time: e_B - ê_B = ([V⁻¹]_BB)⁻¹ [V⁻¹e]_B, which varies by
        ([V⁻¹]_BB)⁻¹, with V = K + N; of its own noise only what is expected of it.

        Args:
            together: of each row, what those have alike that are left out with it.
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
        """V⁻¹: a few hundred rows, with noise on the diagonal, so it is well conditioned."""
        whole = covariance(self.traits, self.traits, self.scales) + np.diag(self.noises)
        return np.asarray(np.linalg.inv(whole))


Straight: TypeAlias = tuple[Array, Sequence[Traits]]
"""Errors, and the rows with their slopes, for some x."""


@dataclass
class Mixed:
    """What is fitted.

    Args:
        computed: x -> f, the logarithm of each row.
        measured: y.
        traits: of each row, without slopes.
        scales: of effects.
        device: what each slope counts in the share of a row that hangs on its device; empty: all of it does.
    """

    computed: Callable[[Array], Array]
    measured: Array
    traits: Sequence[Traits]
    scales: Scales
    device: Sequence[float] = ()

    def fitted(self, start: Array, steps: int) -> tuple[Array, Effects]:
        """x, and the effects of what is left.

        Args:
            start: where to begin; zeros, or what was found for nearly the same rows.
            steps: of each round, at the most; each computes all rows once for each correction.
        """
        expected = np.array([each.noise for each in self.traits])
        found, here, noises = start, self._at(start), expected**2
        for _ in range(2):
            found, here = self._round(found, here, noises, steps)
            errors, traits = here
            noises = noise(errors, covariance(traits, traits, self.scales), expected)
        return found, Effects(traits, errors, noises, self.scales)

    def _round(self, found: Array, here: Straight, noises: Array, steps: int) -> tuple[Array, Straight]:
        """The best of a straight line through the errors, and again from there."""
        for _ in range(steps):
            errors, traits = here
            root = np.linalg.cholesky(covariance(traits, traits, self.scales) + np.diag(noises))
            slopes = np.array([each.slopes for each in traits])
            rows = np.concatenate([np.linalg.solve(root, slopes), np.eye(len(found))])
            wanted = np.concatenate([np.linalg.solve(root, errors), -found])
            step = np.linalg.lstsq(rows, wanted, rcond=None)[0]
            found = found + step * min(1.0, FARTHEST / max(FARTHEST, float(np.abs(step).max())))
            here = self._at(found)
            if np.abs(step).max() < DIFFERENCE:
                break
        return found, here

    def _at(self, found: Array) -> Straight:
        """y - f, and the rows with their slopes there."""
        computed, steep = straight(self.computed, found)
        traits = [sloped(each, own, self.device) for each, own in zip(self.traits, steep, strict=True)]
        return np.asarray(self.measured - computed), traits


def sloped(row: Traits, slopes: Array, device: Sequence[float] = ()) -> Traits:
    """With its slopes, and the share that hangs on its device; all of what no correction touches does."""
    share = float(slopes @ np.array(device)) if device and np.any(slopes) else 1.0
    return row._replace(slopes=tuple(slopes), share=share)


def straight(computed: Callable[[Array], Array], found: Array) -> tuple[Array, Array]:
    """The logarithm of each row, and by how much it grows with each deviation."""
    here = computed(found)
    moved = [computed(found + DIFFERENCE * each) for each in np.eye(len(found))]
    return here, np.stack([(other - here) / DIFFERENCE for other in moved], axis=1)


FARTHEST = 1.0
"""Standard deviations in one step: beyond, a straight line says little."""
DIFFERENCE = 0.05
"""Of a standard deviation, for slopes: products of few words are of whole ones, so a smaller one would see steps."""
