"""What rows that have something in common are off by together, each such effect shrunk towards none.

::

    e_i = Σ effects of what row i has + g_i · d + ε_i
    effect ~ N(0, s²) for each value of each key, d ~ N(0, s_own²) for each source, ε_i ~ N(0, n_i²)
    K_ij = Σ s_key² [same value] + s_like² [same source] exp(-|z_i - z_j|² / 2) + s_own² [same source] g_i · g_j
    ê* = k*ᵀ (K + N)⁻¹ e        variance = k** + n² - k*ᵀ (K + N)⁻¹ k*

A mixed model, with effects integrated out (C. E. Rasmussen, C. K. I. Williams, Gaussian Processes for Machine Learning,
2006, equations 2.25 and 2.26): few rows of a source move its effect little, many rows wholly. d is by how much a source
deviates from all in what is corrected, g_i by how much that shows in row i: a source of slow links teaches of its rows
that wait for links, and of others little. A family's effect likewise acts on the share in which its devices compute.
Rows that are far off all of their like get more noise, and so pull less.
"""

from collections.abc import Hashable, Mapping, Sequence
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
