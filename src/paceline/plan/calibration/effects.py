"""What rows that have something in common are off by together, each such effect shrunk towards none.

::

    e_i = Σ effects of what row i has + ε_i            effect ~ N(0, s²) for each value of each key, ε_i ~ N(0, n_i²)
    K_ij = Σ s_key² [same value] + s_like² [same source] exp(-|z_i - z_j|² / 2)
    ê* = k*ᵀ (K + N)⁻¹ e        variance = k** + n² - k*ᵀ (K + N)⁻¹ k*

A mixed model, with effects integrated out (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning,
2006, equations 2.25 and 2.26): few rows of a source move its effect little, many rows wholly. Rows that are far off all
of their like get more noise, so that they pull less.
"""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Scales:
    """Standard deviations of logarithms, chosen once for all rows."""

    keys: Mapping[str, float]
    like: float
    noise: float


def covariance(first: Sequence[Traits], second: Sequence[Traits], scales: Scales) -> Array:
    """K, one row for each of the first."""
    found = np.zeros((len(first), len(second)))
    for at, scale in enumerate(scales.keys.values()):
        found += scale**2 * _same([each.keys[at] for each in first], [each.keys[at] for each in second])
    return found + scales.like**2 * _alike(first, second)


def _same(first: Sequence[Any], second: Sequence[Any]) -> Array:
    numbers: dict[Any, int] = {}
    left = np.array([numbers.setdefault(each, len(numbers)) for each in first])
    right = np.array([numbers.setdefault(each, len(numbers)) for each in second])
    found: Array = np.equal(left[:, None], right[None, :]).astype(np.float64)
    return found


def _alike(first: Sequence[Traits], second: Sequence[Traits]) -> Array:
    left, right = (np.array([each.place for each in rows], dtype=np.float64) for rows in (first, second))
    apart = np.square(left[:, None, :] - right[None, :, :]).sum(axis=2)
    same = _same([each.source for each in first], [each.source for each in second])
    return np.asarray(same * np.exp(-apart / 2), dtype=np.float64)


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
        weights = self._inverse @ shared
        own = float(covariance([row], [row], self.scales)[0, 0]) + self.scales.noise**2
        return float(weights @ self.errors), float(np.sqrt(max(own - shared @ weights, self.scales.noise**2)))

    def left_out(self) -> tuple[Array, Array]:
        """Of each row: by how much it is off what all others foretell, and that error's standard deviation.

        Equations 5.12 of the same book: e_i - ê_i = [V⁻¹e]_i / [V⁻¹]_ii and σ_i² = 1 / [V⁻¹]_ii with V = K + N.
        """
        own = np.diag(self._inverse)
        return np.asarray((self._inverse @ self.errors) / own), np.asarray(1 / np.sqrt(own))

    @cached_property
    def _inverse(self) -> Array:
        """V⁻¹: a few hundred rows, with noise on the diagonal, so it is well conditioned."""
        whole = covariance(self.traits, self.traits, self.scales) + np.diag(self.noises)
        return np.asarray(np.linalg.inv(whole))
