"""Has the replicas that wait make an update, each a part of it."""

import math
from collections.abc import Callable, Sequence

from paceline.core.errors import PacelineError
from paceline.core.types import ReplicaId
from paceline.engine.local.board import Board, Part, Task
from paceline.engine.local.crew import Crew
from paceline.engine.local.parts import Bench
from paceline.engine.local.store import Store
from paceline.engine.owner import Owner, Weighted
from paceline.replica.clipping import clip_scale
from paceline.replica.kernels import Kernel, encode

WORTH_BYTES = 2**26
"""What an update has to move for handing it out to pay: at 30 MiB and below main was quicker, at 88 two workers."""

Named = Sequence[tuple[ReplicaId, int, float]]
"""Δs as the store names them, (replica, slot), and their weights."""


class Rounds:
    """The updates of one run that are made in parts.

    Args:
        store: its vectors.
        board: its words.
        crew: its workers.
        owner: of A.
        cores: how many parts an update is cut into at the most.
    """

    def __init__(self, store: Store, board: Board, crew: Crew, owner: Owner, cores: int) -> None:
        self._store, self._board, self._crew, self._owner, self._cores = store, board, crew, owner, cores
        self._bench = Bench(store)
        alone = not owner.divisible or cores < 2
        self._least = math.inf if alone else WORTH_BYTES / store.plan.layout.parameter_bytes - 2
        self._number = 0
        self._memory: int | None = None
        """Which copy of the optimizer's memory is the present one; None: it is not in the store yet."""

    def worth(self, deltas: int) -> bool:
        """Whether an update of so many Δs is better made by those who wait, where there are several."""
        return deltas >= self._least and self._settled()

    def apply(self, deltas: Weighted, names: Named, rate: float, places: tuple[int, int], by: list[ReplicaId]) -> None:
        """As ``Owner.apply``.

        Args:
            deltas: and their weights.
            names: of the same.
            rate: times the learning rate.
            places: of the present A, and of the next one.
            by: replicas that wait.
        """
        here, there = places

        def carry(kernel: Kernel, weights: Sequence[float]) -> None:
            named = tuple((r, slot, weight) for (r, slot, _), weight in zip(names, weights, strict=True))
            self._carry(kernel, named, here, there, by[: self._cores])

        self._owner.divide(deltas, rate, self._store.version(there), carry)

    def _carry(self, kernel: Kernel, named: Named, here: int, there: int, by: list[ReplicaId]) -> None:
        assert self._memory is not None, "the optimizer's memory is not in the store"
        bound = self._owner.clip_norm
        task = Task(0, False, False, here, there, self._memory, tuple(encode(kernel)), tuple(named))
        if bound is not None:
            square = self._hand_out(task._replace(only_sum=True), by)
            task = task._replace(of_sum=True, deltas=((0, 0, clip_scale(square, bound)),))
        self._hand_out(task, by)
        self._memory = 1 - self._memory
        self._owner.stepper.memory = self._store.memory[self._memory]

    def _hand_out(self, task: Task, by: list[ReplicaId]) -> float:
        """Have all parts made; returns the squared norm of Σ weight·Δ where that is asked for."""
        self._number += 1
        task = task._replace(number=self._number)
        self._board.describe(task)
        parts = {replica: Part(self._number, number, len(by)) for number, replica in enumerate(by)}
        for replica, part in parts.items():
            self._board.assign(replica, part)
            self._crew.ring(replica)
        self._crew.wait_for(self._has_made, parts, f"their part of update {self._owner.stepper.steps}")
        return sum(self._ended(task, replica, part) for replica, part in parts.items())

    def _has_made(self, replica: ReplicaId) -> bool:
        return self._board.has_made(replica, self._number)

    def _ended(self, task: Task, replica: ReplicaId, part: Part) -> float:
        """The squared norm of a part, which is made here if its worker died over it."""
        if self._has_made(replica):
            return self._board.square(replica)
        return self._bench.make(task, part)

    def _settled(self) -> bool:
        """Whether the optimizer's memory lies where others can reach it; without room for that, main makes all."""
        if self._memory is not None:
            return True
        remembers = range(self._store.plan.remembers)
        try:
            self._store.claim("sum", *(f"memory {copy} {m}" for copy in (0, 1) for m in remembers))
        except PacelineError:
            self._least = math.inf
            return False
        for mine, shared in zip(self._owner.stepper.memory, self._store.memory[0], strict=True):
            for vector, place in zip(mine, shared, strict=True):
                place.copy_(vector)
        self._memory, self._owner.stepper.memory = 0, self._store.memory[0]
        return True


class Helper:
    """A worker's side: makes its part while it waits.

    Args:
        board: of the run.
        bench: where parts are made.
        replica: whose.
        ring: wakes main.
    """

    def __init__(self, board: Board, bench: Bench, replica: ReplicaId, ring: Callable[[], None]) -> None:
        self._board, self._bench, self._replica, self._ring = board, bench, replica, ring

    def asked(self) -> bool:
        """Whether there is a part to make."""
        return self._board.part(self._replica) is not None

    def help(self) -> None:
        """Make the part that there is, if there is one."""
        part = self._board.part(self._replica)
        if part is not None:
            self._board.made(self._replica, part, self._bench.make(self._board.task(), part))
            self._ring()
