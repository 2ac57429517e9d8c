"""The contract of a program whose parameters are updated block by block, in an order that a scheduler chooses.

Rows of data are divided among workers; blocks of parameters are nobody's: each round a scheduler chooses some, and all
workers contribute to their new values::

    scheduler --- blocks, their values ---> worker 0: push on its rows --+
                                            worker 1: push on its rows --+-- Σ partial sums --> pull: new values
    scheduler --- the new values ---------> all workers: absorb (residuals of their rows)

These are STRADS's primitives schedule, push and pull (Lee et al. 2014, arXiv 1406.4580); ``absorb`` is its *sync*.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

Numbers: TypeAlias = NDArray[np.int64]
"""Numbers of blocks or of rows."""

State = TypeVar("State")


class ScheduledProgram(ABC, Generic[State]):
    """min over A of Σ over rows of loss + penalty, by updates of a few blocks of A at a time.

    ``State`` is what one worker keeps: its rows of the data and what it derives from them, residuals say. ``push``
    and ``absorb`` may change it and nothing else; all other methods change nothing. Arrays that begin with a block
    axis are (chosen blocks, ...), with one shape of a block for all of them.
    """

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows of data, which are divided among workers."""

    @abstractmethod
    def initial(self) -> Array:
        """Return A_0: (blocks, ...)."""

    @abstractmethod
    def start(self, rows: Numbers) -> State:
        """Return the state of the worker that has these rows, which ascend."""

    @abstractmethod
    def push(self, state: State, chosen: Numbers, values: Array) -> Array:
        """Return a worker's partial sums for the chosen blocks, (chosen, ...); they are added over all workers."""

    @abstractmethod
    def pull(self, sums: Array, chosen: Numbers, values: Array) -> Array:
        """Return new values of the chosen blocks, of the shape of ``values``, from the sums over all workers."""

    @abstractmethod
    def absorb(self, state: State, chosen: Numbers, before: Array, after: Array) -> None:
        """Bring a worker's state up to date with new values of the blocks that it has pushed for last."""

    @abstractmethod
    def dependency(self, chosen: Numbers, values: Array) -> Array:
        """Return how much each two of these blocks depend on each other, (chosen, chosen): 0 for not at all.

        Blocks are updated at once only if it is below the scheduler's bound. Its diagonal is not looked at.
        """

    @abstractmethod
    def loss(self, state: State) -> float:
        """Return the loss of a worker's rows."""

    def penalty(self, values: Array) -> float:
        """Return what the objective has besides the losses, from all of A."""
        del values
        return 0.0

    def block_costs(self) -> Array:
        """Return the cost of an update of each block, relative to others: (blocks,)."""
        return np.ones(self.blocks)

    def row_costs(self) -> Array:
        """Return the cost of each row in an update, relative to others, by which rows are divided: (rows,)."""
        return np.ones(self.rows)

    def row_values(self, state: State) -> Array | None:
        """Return parameters that belong to the worker's rows and never leave it, (its rows, ...); None: it has none."""
        del state
        return None
