"""Problems of scheduled parameters, and programs that fail on purpose."""

import os
import signal
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import Lasso, MatrixFactorization
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram


def design(rows: int, columns: int, *, seed: int = 0, correlation: float = 0.0) -> NDArray[np.float64]:
    """Columns of unit norm; each two of them are as correlated, but for chance."""
    rng = np.random.default_rng(seed)
    own, common = rng.standard_normal((rows, columns)), rng.standard_normal((rows, 1))
    mixed = np.sqrt(1 - correlation) * own + np.sqrt(correlation) * common
    mixed -= mixed.mean(0)
    return np.asarray(mixed / np.linalg.norm(mixed, axis=0))


def lasso(
    rows: int = 120, columns: int = 40, *, seed: int = 0, correlation: float = 0.0, share: float = 0.1
) -> tuple[Lasso, float]:
    """A Lasso whose coefficients fall as 1 / k; and scikit-learn's objective of it. ``share``: λ / least for β = 0."""
    from sklearn.linear_model import Lasso as Reference

    matrix, rng = design(rows, columns, seed=seed, correlation=correlation), np.random.default_rng([seed, 1])
    true = rng.permutation(1 / np.arange(1, columns + 1)) * rng.choice([-1, 1], columns)
    y = matrix @ true + 0.01 * rng.standard_normal(rows) / np.sqrt(rows)
    penalty = share * float(np.abs(matrix.T @ y).max())
    best = Reference(alpha=penalty / rows, fit_intercept=False, tol=1e-15, max_iter=10**6).fit(matrix, y).coef_
    return Lasso(matrix, y, penalty=penalty), objective(matrix, y, penalty, best)


def objective(matrix: Any, y: Any, penalty: float, coefficients: Any) -> float:
    rest = y - matrix @ coefficients
    return float(rest @ rest / 2 + penalty * np.abs(coefficients).sum())


def factorization(
    rows: int = 30, columns: int = 20, ranks: int = 3, seed: int = 0, **others: Any
) -> MatrixFactorization:
    """Of a matrix of that many ranks with some noise, of which 60 % is known."""
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((rows, ranks)) @ rng.standard_normal((ranks, columns))
    whole += 0.1 * rng.standard_normal(whole.shape)
    row, column = np.nonzero(rng.random(whole.shape) < 0.6)
    options = {"shape": whole.shape, "ranks": ranks, "penalty": 0.3, "seed": seed} | others
    return MatrixFactorization(row, column, whole[row, column], **options)


class Mean(ScheduledProgram[Any]):
    """Coordinates of a mean, which are independent; ``fault`` befalls the last worker's third push, or main."""

    def __init__(self, fault: str = "", workers: int = 2) -> None:
        self.data = np.arange(24.0).reshape(6, 4)
        self.fault, self.pushes = fault, 0
        self.last = workers - 1

    @property
    def blocks(self) -> int:
        return 4

    @property
    def rows(self) -> int:
        return 6

    def initial(self) -> Array:
        return np.zeros(4)

    def start(self, rows: Numbers) -> Any:
        return {"data": self.data[rows], "is_last": self.last in rows}

    def push(self, state: Any, chosen: Numbers, values: Array) -> Array:
        self.pushes += 1
        if state["is_last"] and self.pushes == 3:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raises":
                raise KeyError("a bug of the program")
            if self.fault == "silent":
                threading.Event().wait(1000)
        if self.fault == "shape":
            return np.zeros(17)
        return np.asarray(state["data"][:, chosen].sum(0))

    def pull(self, sums: Array, chosen: Numbers, values: Array) -> Array:
        if self.fault == "interrupted":
            raise KeyboardInterrupt
        if self.fault == "overflow":
            return np.full(len(chosen), np.inf)
        return sums / self.rows

    def absorb(self, state: Any, chosen: Numbers, before: Array, after: Array) -> None:
        state["data"][:, chosen] += 0.0

    def dependency(self, chosen: Numbers, values: Array) -> Array:
        if self.fault == "dependency":
            return np.full((len(chosen), len(chosen)), np.nan)
        return np.zeros((len(chosen), len(chosen)))

    def loss(self, state: Any) -> float:
        return np.inf if self.fault == "infinite" else 1.0
