"""Matrix factorisation by rank-one updates."""

from typing import Any, NamedTuple, final

import numpy as np

from paceline.core.errors import InputError, check_int, check_positive
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram
from paceline.parameter_scheduling.lasso import finite


class FactorRows(NamedTuple):
    """State of a worker: its rows of W, and the known entries in them."""

    row: Numbers
    """Of each entry, counted among the worker's rows."""
    column: Numbers
    residual: Array
    """a_ij - w_i·h_j of each entry."""
    factor: Array
    """W: (its rows, ranks)."""
    replaced: Array
    """W as it was before the last push."""


@final
class MatrixFactorization(ScheduledProgram[FactorRows]):
    """Σ over known entries of (a_ij - w_i·h_j)² + λ·(‖W‖² + ‖H‖²), a block for each rank.

    W and the entries are divided among workers by rows, so that all have about as many entries; W never leaves them.
    An update of rank k is exact in w_k, then in h_k, with residuals e_ij = a_ij - Σ_{l≠k} w_il·h_lj (CCD++, Yu et al.
    2012, once around)::

        push   w_ik = Σ_j e_ij·h_kj / (λ + Σ_j h_kj²) of the worker's rows; then Σ_i e_ij·w_ik and Σ_i w_ik² for each j
        pull   h_kj = Σ_i e_ij·w_ik / (λ + Σ_i w_ik²)

    Any two ranks depend on each other, as all fit the same residuals: with the check a round updates one, whose rows
    and columns the workers compute at once. ``run.values`` is H, (ranks, columns); ``run.row_values`` is W, (rows,
    ranks). W begins at zero and H is drawn with ``seed``.

    Args:
        row: row of each known entry, (entries,), whole numbers from 0; ``column``, ``value``: likewise.
        shape: rows and columns of the matrix.
        ranks: number of columns of W.
        penalty: λ.
        seed: of H_0.

    Raises:
        InputError: arrays of different lengths, entries outside of the shape, values that are not finite.
    """

    def __init__(
        self, row: Any, column: Any, value: Any, *, shape: tuple[int, int], ranks: int, penalty: float, seed: int = 0
    ) -> None:
        check_int("ranks", ranks, least=1)
        check_positive("penalty", penalty, instead=0.1)
        self.value, self.shape, self.ranks, self.weight = finite("value", value, 1), shape, ranks, float(penalty)
        self.row, self.column = _numbers("row", row, shape[0]), _numbers("column", column, shape[1])
        if not len(self.row) == len(self.column) == len(self.value):
            lengths = len(self.row), len(self.column), len(self.value)
            raise InputError(f"row, column and value have {lengths} entries; give as many of each")
        self._first: Array = np.random.default_rng(seed).standard_normal((ranks, shape[1])) / np.sqrt(ranks)

    @property
    def blocks(self) -> int:
        return self.ranks

    @property
    def rows(self) -> int:
        return self.shape[0]

    def initial(self) -> Array:
        return self._first

    def start(self, rows: Numbers) -> FactorRows:
        own = np.isin(self.row, rows)
        factor = np.zeros((len(rows), self.ranks))
        row = np.searchsorted(rows, self.row[own])
        return FactorRows(row, self.column[own], self.value[own], factor, factor.copy())

    def push(self, state: FactorRows, chosen: Numbers, values: Array) -> Array:
        sums = np.empty((len(chosen), 2, self.shape[1]))
        state.replaced[:, chosen] = state.factor[:, chosen]
        for at, rank in enumerate(chosen):
            other = values[at][state.column]
            expected = state.residual + state.factor[state.row, rank] * other
            state.factor[:, rank] = self._solved(state.row, expected, other, len(state.factor))
            own = state.factor[state.row, rank]
            sums[at] = _sums(state.column, expected, own, self.shape[1])
        return sums

    def pull(self, sums: Array, chosen: Numbers, values: Array) -> Array:
        solved: Array = sums[:, 0] / (self.weight + sums[:, 1])
        return solved

    def absorb(self, state: FactorRows, chosen: Numbers, before: Array, after: Array) -> None:
        for at, rank in enumerate(chosen):
            old = state.replaced[state.row, rank] * before[at][state.column]
            state.residual[:] += old - state.factor[state.row, rank] * after[at][state.column]

    def dependency(self, chosen: Numbers, values: Array) -> Array:
        return np.ones((len(chosen), len(chosen)))

    def loss(self, state: FactorRows) -> float:
        return float(state.residual @ state.residual) + self.weight * float(np.sum(state.factor**2))

    def penalty(self, values: Array) -> float:
        return self.weight * float(np.sum(values**2))

    def row_costs(self) -> Array:
        return np.bincount(self.row, minlength=self.rows).astype(np.float64)

    def row_values(self, state: FactorRows) -> Array:
        return state.factor

    def _solved(self, index: Numbers, expected: Array, other: Array, length: int) -> Array:
        products, squares = _sums(index, expected, other, length)
        solved: Array = products / (self.weight + squares)
        return solved


def _sums(index: Numbers, expected: Array, other: Array, length: int) -> tuple[Array, Array]:
    """Return Σ expected·other and Σ other² over the entries of each index."""
    products: Array = np.bincount(index, expected * other, length)  # type: ignore[assignment]  # of weights: floats
    squares: Array = np.bincount(index, other * other, length)  # type: ignore[assignment]
    return products, squares


def _numbers(name: str, values: Any, below: int) -> Numbers:
    array = np.array(values)
    whole = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    if not whole or (len(array) and not 0 <= array.min() <= array.max() < below):
        raise InputError(f"{name} must have whole numbers of at least 0 and below {below}; see shape=")
    return array.astype(np.int64)
