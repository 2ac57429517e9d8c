"""Fit few corrections to many rows that have something in common: generalised least squares with a prior.

::

    minimise  (y - f(x))ᵀ V⁻¹ (y - f(x)) + xᵀx        x deviations of the corrections from what is expected
                                                       V = K + N of effects.py

by Gauss's and Newton's steps, in two rounds: with each row's noise as expected, and then as what it is off its like
says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from paceline.plan.calibration.effects import Array, Effects, Scales, Traits, covariance, noise

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
