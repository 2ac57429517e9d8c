"""Fit few corrections to many rows that have something in common: generalised least squares with a prior.

::

    minimise  (y - f(x))ᵀ V⁻¹ (y - f(x)) + xᵀx        x deviations of the corrections from what is expected
                                                       V = K + N of effects.py

by Gauss's and Newton's steps, in two rounds: with each row's noise as expected, and then as what it is off its like
says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.calibration.effects import Array, Effects, Scales, Traits, covariance, noise


@dataclass
class Mixed:
    """What is fitted.

    Args:
        computed: x -> f, the logarithm of each row.
        measured: y.
        traits: of each row.
        noise: n of each, as expected.
        scales: of effects.
    """

    computed: Callable[[Array], Array]
    measured: Array
    traits: Sequence[Traits]
    noise: Array
    scales: Scales

    def fitted(self, start: Array, steps: int) -> tuple[Array, Effects]:
        """x, and the effects of what is left.

        Args:
            start: where to begin; zeros, or what was found for nearly the same rows.
            steps: of each round, at the most; each computes all rows once for each correction.
        """
        shared = covariance(self.traits, self.traits, self.scales)
        noises = noise(np.zeros(len(self.measured)), shared, self.noise)
        for _ in range(2):
            start = self._round(start, np.asarray(np.linalg.cholesky(shared + np.diag(noises))), steps)
            noises = noise(self.errors(start), shared, self.noise)
        return start, Effects(self.traits, self.errors(start), noises, self.scales)

    def errors(self, found: Array) -> Array:
        """y - f."""
        return np.asarray(self.measured - self.computed(found))

    def _round(self, found: Array, root: Array, steps: int) -> Array:
        """The best of a straight line through the errors, and again from there."""
        for _ in range(steps):
            errors, slopes = self._slopes(found)
            rows = np.concatenate([np.linalg.solve(root, slopes), np.eye(len(found))])
            wanted = np.concatenate([np.linalg.solve(root, errors), -found])
            step = np.linalg.lstsq(rows, wanted, rcond=None)[0]
            found = found + step * min(1.0, FARTHEST / max(FARTHEST, float(np.abs(step).max())))
            if np.abs(step).max() < DIFFERENCE:
                break
        return found

    def _slopes(self, found: Array) -> tuple[Array, Array]:
        """Errors, and by how much what is computed grows with each deviation."""
        errors = self.errors(found)
        moved = [self.errors(found + DIFFERENCE * each) for each in np.eye(len(found))]
        return errors, np.stack([(errors - other) / DIFFERENCE for other in moved], axis=1)


FARTHEST = 1.0
"""Standard deviations in one step: beyond, a straight line says little."""
DIFFERENCE = 0.05
"""Of a standard deviation, for slopes: products of few words are of whole ones, so a smaller one would see steps."""
HELD = 0.9


def width(effects: Effects) -> float:
    """How many standard deviations hold nine of ten rows, each foretold by all others.

    Conformal: the ⌈0.9 (n + 1)⌉-th smallest of their errors (Papadopoulos et al., Inductive Confidence Machines, 2002).
    """
    errors, deviations = effects.left_out()
    ranked = np.sort(np.abs(errors) / deviations)
    place = int(np.ceil(HELD * (len(ranked) + 1))) - 1
    return float(ranked[min(place, len(ranked) - 1)])
