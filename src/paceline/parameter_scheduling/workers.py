"""Workers, each with its rows of the data: in this process under a simulated clock, or in processes of their own.

What crosses between scheduler and workers is the same in both, and so are the bits that come out: partial sums are
added in the order of the workers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.clock.distributions import Distribution
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram


class Worker:
    """One worker: the state of its rows."""

    def __init__(self, program: ScheduledProgram[Any], rows: Numbers) -> None:
        self._program, self._rows = program, rows
        self._state = program.start(rows)
        self._before: tuple[Numbers, Array] | None = None

    def push(self, chosen: Numbers, values: Array) -> Array:
        """Return this worker's partial sums."""
        self._before = chosen, values
        sums = np.asarray(self._program.push(self._state, chosen, values), np.float64)
        if sums.shape[:1] != chosen.shape:
            raise InputError(
                f"push returned an array of shape {sums.shape} for {len(chosen)} blocks; return (chosen, ...)"
            )
        return sums

    def absorb(self, after: Array) -> None:
        """Bring the state up to date with new values of the blocks that were pushed for."""
        assert self._before is not None, "there was a push"
        self._program.absorb(self._state, *self._before, after)

    def loss(self) -> float:
        """Return the loss of these rows."""
        return float(self._program.loss(self._state))

    def row_values(self) -> Array | None:
        """Return what the program keeps for each of these rows."""
        values = self._program.row_values(self._state)
        if values is not None and len(values) != len(self._rows):
            raise InputError(f"row_values has {len(values)} rows of {len(self._rows)}; return (the worker's rows, ...)")
        return values


class Workers(ABC):
    """All workers, as the scheduler sees them; a context manager."""

    def __init__(self, rows: Sequence[Numbers]) -> None:
        self.rows = rows
        self.time_s: Seconds = 0.0
        """Time of all rounds so far, without evaluations."""
        self.pushed_bytes = 0
        """Partial sums, of all workers."""
        self.sent_bytes = 0
        """Numbers and values of blocks, to all workers."""

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def push(self, chosen: Numbers, values: Array) -> Array:
        """Return the sums over all workers."""
        parts = self.pushed(chosen, values)
        total = next(iter(parts)).copy()
        for part in parts[1:]:  # in this order, whoever was first: sums of floats depend on it
            total += part
        self.pushed_bytes += sum(part.nbytes for part in parts)
        self.sent_bytes += len(self.rows) * (chosen.nbytes + values.nbytes)
        return total

    def absorb(self, after: Array) -> None:
        """Give all workers the new values of the blocks that they have pushed for."""
        self.absorbed(after)
        self.sent_bytes += len(self.rows) * after.nbytes

    def loss(self) -> float:
        """Return the loss of all rows."""
        return sum(self.losses())

    def row_values(self) -> Array | None:
        """Return what workers keep for their rows, in the order of the data."""
        found = list(self.kept())
        whole: Array | None = None
        for rows, values in zip(self.rows, found, strict=True):
            if values is not None:
                if whole is None:
                    whole = np.zeros((sum(map(len, self.rows)), *values.shape[1:]))
                whole[rows] = values
        return whole

    @abstractmethod
    def pushed(self, chosen: Numbers, values: Array) -> Sequence[Array]:
        """Return the partial sums of each worker."""

    @abstractmethod
    def absorbed(self, after: Array) -> None: ...

    @abstractmethod
    def losses(self) -> Iterable[float]: ...

    @abstractmethod
    def kept(self) -> Iterable[Array | None]: ...

    @abstractmethod
    def close(self) -> None:
        """End what was started; idempotent."""


class VirtualWorkers(Workers):
    """Workers of this process. A round takes as long as its slowest worker.

    Args:
        program: what they work on.
        rows: of each worker.
        operation_s: seconds of one unit of cost of a block in one of a row.
        message: seconds that a worker's messages of a round take.
        seed: of their draws.
    """

    def __init__(
        self,
        program: ScheduledProgram[Any],
        rows: Sequence[Numbers],
        *,
        operation_s: Seconds,
        message: Distribution,
        seed: int,
    ) -> None:
        super().__init__(rows)
        self._workers = [Worker(program, own) for own in rows]
        costs = program.row_costs()
        self._rows_s = np.array([operation_s * float(costs[own].sum()) for own in rows])
        self._block_costs = program.block_costs()
        self._messages = [message.stream(np.random.default_rng([seed, worker])) for worker in range(len(rows))]

    def pushed(self, chosen: Numbers, values: Array) -> Sequence[Array]:
        messages_s = np.array([next(each) for each in self._messages])
        self.time_s += float(np.max(self._rows_s * self._block_costs[chosen].sum() + messages_s))
        return [worker.push(chosen, values) for worker in self._workers]

    def absorbed(self, after: Array) -> None:
        for worker in self._workers:
            worker.absorb(after)

    def losses(self) -> Iterable[float]:
        return [worker.loss() for worker in self._workers]

    def kept(self) -> Iterable[Array | None]:
        return [worker.row_values() for worker in self._workers]

    def close(self) -> None:
        pass
