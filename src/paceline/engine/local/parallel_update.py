"""Splits one optimizer update among the workers that are idle.

Has the replicas that wait make an update, each a part of it.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.types import ReplicaId
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import ControlBlock, UpdateSlice, UpdateTask
from paceline.engine.local.worker_processes import WorkerProcesses
from paceline.engine.server_optimizer import ServerOptimizer, Weighted
from paceline.replica.clipping import clip_scale
from paceline.replica.optimizer_kernels import StepKernel, decode, encode

CHUNK = 2**16
"""Elements that are summed and stepped on before the next ones are: they fit into a core's own cache."""

LINE = 64
"""Elements of whole cache lines and of whole vector instructions, of any dtype: a part rounds as the whole does."""


class SliceOptimizer:
    """Where parts are made, in any process of a run.

    Args:
        store: its vectors.
    """

    def __init__(self, store: ParameterArena) -> None:
        self._store = store
        self._scratch: dict[torch.dtype, Tensor] = {}

    def make(self, task: UpdateTask, part: UpdateSlice) -> float:
        """Make one part of a task; the squared norm of its Σ weight·Δ where that is all that is asked for."""
        square = 0.0
        for i, vector in enumerate(self._store.sums):
            for span in chunks(len(vector), part):
                if task.only_sum:
                    total = self._sum(task, i, span, vector[span])
                    square += float(torch.linalg.vector_norm(total)) ** 2
                else:
                    self._step(task, i, span)
        return square

    def _step(self, task: UpdateTask, i: int, span: slice) -> None:
        store = self._store
        here, there = (store.version(v).parameters[i][span] for v in (task.here, task.there))
        copies = zip(store.memory[1 - task.memory][i], store.memory[task.memory][i], strict=True)
        memory = [new[span].copy_(old[span]) for new, old in copies]
        decode(task.kernel).step(here, there, self._gradient(task, i, span), memory)

    def _gradient(self, task: UpdateTask, i: int, span: slice) -> Tensor:
        sums = self._store.sums[i][span]
        scratch = self._room(sums)
        if task.of_sum:
            return torch.mul(sums, task.deltas[0][2], out=scratch)
        if len(task.deltas) == 1 and task.deltas[0][2] == 1.0:
            replica, slot, _ = task.deltas[0]
            return self._store.delta(replica, slot).parameters[i][span]
        return self._sum(task, i, span, scratch)

    def _sum(self, task: UpdateTask, i: int, span: slice, out: Tensor) -> Tensor:
        for j, (replica, slot, weight) in enumerate(task.deltas):
            vector = self._store.delta(replica, slot).parameters[i][span]
            if j:
                out.add_(vector, alpha=weight)
            else:
                torch.mul(vector, weight, out=out)
        return out

    def _room(self, like: Tensor) -> Tensor:
        if like.dtype not in self._scratch:
            self._scratch[like.dtype] = torch.empty(CHUNK, dtype=like.dtype)
        return self._scratch[like.dtype][: len(like)]


def chunks(elements: int, part: UpdateSlice) -> Iterator[slice]:
    """A part of a vector, in pieces; no two parts share a cache line.

    >>> [list(chunks(250, UpdateSlice(1, number, 3))) for number in range(3)]
    [[slice(0, 64, None)], [slice(64, 128, None)], [slice(128, 250, None)]]
    """
    start, end = (_bound(elements, number, part.of) for number in (part.number, part.number + 1))
    for first in range(start, end, CHUNK):
        yield slice(first, min(end, first + CHUNK))


def _bound(elements: int, number: int, of: int) -> int:
    return elements if number == of else elements * number // of // LINE * LINE


WORTH_BYTES = 2**26
"""What an update has to move for handing it out to pay: at 30 MiB and below main was quicker, at 88 two workers."""

Named = Sequence[tuple[ReplicaId, int, float]]
"""Δs as the store names them, (replica, slot), and their weights."""


class ParallelUpdate:
    """The updates of one run that are made in parts.

    Args:
        store: its vectors.
        board: its words.
        workers: its workers.
        owner: of A.
        cores: how many parts an update is cut into at the most.
    """

    def __init__(
        self, store: ParameterArena, board: ControlBlock, workers: WorkerProcesses, owner: ServerOptimizer, cores: int
    ) -> None:
        self._store, self._board, self._workers, self._owner, self._cores = store, board, workers, owner, cores
        self._bench = SliceOptimizer(store)
        alone = not owner.divisible or cores < 2
        self._least = math.inf if alone else WORTH_BYTES / store.plan.layout.parameter_bytes - 2
        self._number = 0
        self._memory: int | None = None
        """Which copy of the optimizer's memory is the present one; None: it is not in the store yet."""

    def worth(self, deltas: int) -> bool:
        """Whether an update of so many Δs is better made by those who wait, where there are several."""
        return deltas >= self._least and self._settled()

    def apply(self, deltas: Weighted, names: Named, rate: float, places: tuple[int, int], by: list[ReplicaId]) -> None:
        """As ``ServerOptimizer.apply``.

        Args:
            deltas: and their weights.
            names: of the same.
            rate: times the learning rate.
            places: of the present A, and of the next one.
            by: replicas that wait.
        """
        here, there = places

        def carry(kernel: StepKernel, weights: Sequence[float]) -> None:
            named = tuple((r, slot, weight) for (r, slot, _), weight in zip(names, weights, strict=True))
            self._carry(kernel, named, here, there, by[: self._cores])

        self._owner.divide(deltas, rate, self._store.version(there), carry)

    def _carry(self, kernel: StepKernel, named: Named, here: int, there: int, by: list[ReplicaId]) -> None:
        assert self._memory is not None, "the optimizer's memory is not in the store"
        bound = self._owner.clip_norm
        task = UpdateTask(0, False, False, here, there, self._memory, tuple(encode(kernel)), tuple(named))
        if bound is not None:
            square = self._hand_out(task._replace(only_sum=True), by)
            task = task._replace(of_sum=True, deltas=((0, 0, clip_scale(square, bound)),))
        self._hand_out(task, by)
        self._memory = 1 - self._memory
        self._owner.stepper.state_vectors = self._store.memory[self._memory]

    def _hand_out(self, task: UpdateTask, by: list[ReplicaId]) -> float:
        """Have all parts made; returns the squared norm of Σ weight·Δ where that is asked for."""
        self._number += 1
        task = task._replace(number=self._number)
        self._board.write_task(task)
        parts = {replica: UpdateSlice(self._number, number, len(by)) for number, replica in enumerate(by)}
        for replica, part in parts.items():
            self._board.assign_slice(replica, part)
            self._workers.notify(replica)
        self._workers.wait_for(self._has_made, parts, f"their part of update {self._owner.stepper.steps}")
        return sum(self._ended(task, replica, part) for replica, part in parts.items())

    def _has_made(self, replica: ReplicaId) -> bool:
        return self._board.slice_finished(replica, self._number)

    def _ended(self, task: UpdateTask, replica: ReplicaId, part: UpdateSlice) -> float:
        """The squared norm of a part, which is made here if its worker died over it."""
        if self._has_made(replica):
            return self._board.slice_square(replica)
        return self._bench.make(task, part)

    def _settled(self) -> bool:
        """Whether the optimizer's memory lies where others can reach it; without room for that, main makes all."""
        if self._memory is not None:
            return True
        remembers = range(self._store.plan.remembers)
        try:
            self._store.commit("sum", *(f"memory {copy} {m}" for copy in (0, 1) for m in remembers))
        except PacelineError:
            self._least = math.inf
            return False
        for mine, shared in zip(self._owner.stepper.state_vectors, self._store.memory[0], strict=True):
            for vector, place in zip(mine, shared, strict=True):
                place.copy_(vector)
        self._memory, self._owner.stepper.state_vectors = 0, self._store.memory[0]
        return True


class UpdateHelper:
    """A worker's side: makes its part while it waits.

    Args:
        board: of the run.
        bench: where parts are made.
        replica: whose.
        ring: wakes main.
    """

    def __init__(
        self, board: ControlBlock, bench: SliceOptimizer, replica: ReplicaId, ring: Callable[[], None]
    ) -> None:
        self._board, self._bench, self._replica, self._ring = board, bench, replica, ring

    def asked(self) -> bool:
        """Whether there is a part to make."""
        return self._board.pending_slice(self._replica) is not None

    def help(self) -> None:
        """Make the part that there is, if there is one."""
        part = self._board.pending_slice(self._replica)
        if part is not None:
            self._board.finish_slice(self._replica, part, self._bench.make(self._board.read_task(), part))
            self._ring()
