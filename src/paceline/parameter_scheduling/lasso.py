"""Lasso by parallel coordinate descent."""

from typing import Any, NamedTuple, final

import numpy as np

from paceline.core.errors import InputError, check_positive
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram


def finite(name: str, values: Any, dimensions: int) -> Array:
    """Return an array of float64 that is finite and not empty.

    Raises:
        InputError: it is not, or has another number of dimensions.
    """
    try:
        array = np.array(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is no array of numbers ({error}); write {name}=np.asarray(…, float)") from error
    if array.ndim != dimensions or not array.size:
        raise InputError(f"{name} has shape {array.shape}; give a non-empty array of {dimensions} dimension(s)")
    if not np.isfinite(array).all():
        raise InputError(f"{name} has values that are not finite; leave such rows out")
    return array


class LassoRows(NamedTuple):
    """State of a worker: its rows."""

    columns: Array
    """(its rows, coefficients), each column contiguous."""
    residual: Array
    """y - Xβ of its rows."""


@final
class Lasso(ScheduledProgram[LassoRows]):
    """½·‖y - Xβ‖² + λ·‖β‖₁, a block for each coefficient.

    Worker p pushes z_jp = x_jpᵀr_p + x_jpᵀx_jp·β_j, x_jp being its rows of column j, and the scheduler pulls
    β_j = S(Σ_p z_jp, λ) / x_jᵀx_j, with the soft threshold S. Columns j and k depend on each other by
    ``|x_jᵀx_k| / (‖x_j‖·‖x_k‖)``, which is ``|x_jᵀx_k|`` of the papers where columns have unit norm. There is no
    intercept: subtract means first. scikit-learn's ``Lasso(alpha=λ / rows, fit_intercept=False)`` has the same optimum.

    Args:
        X: design matrix, (rows, coefficients), dense; it is copied.
        y: (rows,).
        penalty: λ.

    Raises:
        InputError: shapes that do not match, values that are not finite, or a column of zeros.

    >>> import paceline
    >>> run = paceline.schedule_parameters(paceline.Lasso([[1, 0], [0, 2], [1, 0]], [3, 4, 1], penalty=1), workers=2)
    >>> run.values.round(6).tolist()
    [1.5, 1.75]
    """

    def __init__(self, X: Any, y: Any, *, penalty: float) -> None:  # noqa: N803 - its name everywhere
        check_positive("penalty", penalty, instead=0.1)
        self.X, self.y, self.weight = finite("X", X, 2), finite("y", y, 1), float(penalty)
        if len(self.X) != len(self.y):
            raise InputError(f"X has {len(self.X)} rows and y has {len(self.y)}; give as many of both")
        self._norms: Array = np.linalg.norm(self.X, axis=0)
        if not self._norms.all():
            column = int(np.argmin(self._norms))
            raise InputError(f"column {column} of X is all zeros, so any coefficient is as good; leave it out")

    @property
    def blocks(self) -> int:
        return len(self._norms)

    @property
    def rows(self) -> int:
        return len(self.X)

    def initial(self) -> Array:
        return np.zeros(self.blocks)

    def start(self, rows: Numbers) -> LassoRows:
        return LassoRows(np.asfortranarray(self.X[rows]), self.y[rows])

    def push(self, state: LassoRows, chosen: Numbers, values: Array) -> Array:
        # One by one: a product of several columns would add in another order than that of one.
        sums = np.empty((len(chosen), 2))
        for at, block in enumerate(chosen):
            column = state.columns[:, block]
            square = column @ column
            sums[at] = column @ state.residual + square * values[at], square
        return sums

    def pull(self, sums: Array, chosen: Numbers, values: Array) -> Array:
        products, squares = sums.T
        shrunk: Array = np.sign(products) * np.maximum(np.abs(products) - self.weight, 0) / squares
        return shrunk

    def absorb(self, state: LassoRows, chosen: Numbers, before: Array, after: Array) -> None:
        for block, change in zip(chosen, after - before, strict=True):
            if change:
                state.residual[:] -= change * state.columns[:, block]

    def dependency(self, chosen: Numbers, values: Array) -> Array:
        unit = self.X[:, chosen] / self._norms[chosen]
        cosines: Array = np.abs(unit.T @ unit)
        return cosines

    def loss(self, state: LassoRows) -> float:
        return float(state.residual @ state.residual) / 2

    def penalty(self, values: Array) -> float:
        return self.weight * float(np.abs(values).sum())
