"""Splits one optimizer update among the workers that are idle.

::

    main         write the task, assign slices, wake ---- wait for all of them ---- the next A is complete
    worker 0     idle ............................. slice 0 of A and of the optimizer's state ... idle
    worker 2     idle ............................. slice 1 ..................................... idle

What is read stays as it was until all parts are made: A, the optimizer's state and the Δs; what is written is read by
no process. So a part can be made again by another one if its worker died, and an update is neither lost nor made
twice. With clipping there are two tasks: Σ weight·Δ with its norm, then the step.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.types import ReplicaId
from paceline.device import CPU
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import UpdateSlice, UpdateTask
from paceline.engine.local.worker_processes import WorkerProcesses
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.replica.gradient_clipping import clip_scale
from paceline.replica.optimizer_kernels import StepKernel, decode, encode

# Elements that are summed and stepped on before the next ones are: they fit into a core's own cache.
CHUNK = 2**16

# Elements of whole cache lines and of whole vector instructions, of any dtype: a slice rounds as the whole does.
LINE = 64

# Bytes that an update has to move for a split to pay: at 30 MiB and below main was faster, at 88 two workers.
WORTH_BYTES = 2**26


@dataclass
class SliceOptimizer:
    """Computes slices of updates, in any process of a run."""

    _arena: ParameterArena
    _scratch: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False)

    def step(self, task: UpdateTask, part: UpdateSlice) -> float:
        """Compute one slice of a task; returns the squared norm of its Σ weight·Δ where only that is computed."""
        arena, square = self._arena, 0.0
        for i, vector in enumerate(arena.sums):
            for span in chunks(len(vector), part):
                if task.only_sum:
                    total = self._sum(task, i, span, vector[span])
                    square += float(torch.linalg.vector_norm(total)) ** 2
                    continue
                source, destination = (arena.version(v).parameters[i][span] for v in (task.source, task.destination))
                # State is stepped on in a copy of its own, so that main can redo the slice of a worker that dies.
                copies = zip(arena.memory[1 - task.memory][i], arena.memory[task.memory][i], strict=True)
                memory = [new[span].copy_(old[span]) for new, old in copies]
                decode(task.kernel).step(source, destination, self._gradient(task, i, span), memory)
        return square

    def _gradient(self, task: UpdateTask, i: int, span: slice) -> Tensor:
        sums = self._arena.sums[i][span]
        if not task.of_sum and len(task.deltas) == 1 and task.deltas[0][2] == 1.0:
            replica, slot, _ = task.deltas[0]
            return self._arena.delta(replica, slot).parameters[i][span]
        if sums.dtype not in self._scratch:
            self._scratch[sums.dtype] = torch.empty(CHUNK, dtype=sums.dtype)
        out = self._scratch[sums.dtype][: len(sums)]
        return torch.mul(sums, task.deltas[0][2], out=out) if task.of_sum else self._sum(task, i, span, out)

    def _sum(self, task: UpdateTask, i: int, span: slice, out: Tensor) -> Tensor:
        # In the order of the task, as the server's own sum: floating-point sums depend on it.
        for j, (replica, slot, weight) in enumerate(task.deltas):
            vector = self._arena.delta(replica, slot).parameters[i][span]
            if j:
                out.add_(vector, alpha=weight)
            else:
                torch.mul(vector, weight, out=out)
        return out


def chunks(elements: int, part: UpdateSlice) -> Iterator[slice]:
    """Yield a slice of a vector in chunks; no two slices share a cache line.

    >>> [list(chunks(250, UpdateSlice(1, number, 3))) for number in range(3)]
    [[slice(0, 64, None)], [slice(64, 128, None)], [slice(128, 250, None)]]
    """
    bounds = [elements * number // part.of // LINE * LINE for number in range(part.of)] + [elements]
    start, end = bounds[part.number], bounds[part.number + 1]
    for first in range(start, end, CHUNK):
        yield slice(first, min(end, first + CHUNK))


class ParallelUpdate:
    """The updates of one run that are computed in slices.

    Args:
        arena: of the run.
        workers: its worker processes.
        owner: of A.
    """

    def __init__(self, arena: ParameterArena, workers: WorkerProcesses, owner: ServerOptimizer) -> None:
        self._arena, self._control, self._workers, self._owner = arena, arena.control, workers, owner
        self._cores, self._slices = len(os.sched_getaffinity(0)), SliceOptimizer(arena)
        alone = not owner.divisible or self._cores < 2 or arena.layout.device != CPU
        # An update reads each Δ and A, and writes A.
        self._least_deltas = math.inf if alone else WORTH_BYTES / arena.layout.state.parameter_bytes - 2
        self._number = 0
        self._memory: int | None = None
        """Index of the present copy of the optimizer's state; None: it is not in the arena yet."""

    def worth(self, deltas: int) -> bool:
        """Return whether an update of so many Δs should be faster in slices, if several workers are idle."""
        if deltas < self._least_deltas:
            return False
        if self._memory is not None:
            return True
        names = [f"memory {copy} {m}" for copy in (0, 1) for m in range(self._arena.layout.optimizer_vectors)]
        try:
            self._arena.commit("sum", *names)
        except PacelineError:  # without memory for that main makes all updates
            self._least_deltas = math.inf
            return False
        for own, shared in zip(self._owner.flat_optimizer.state_vectors, self._arena.memory[0], strict=True):
            for vector, buffer in zip(own, shared, strict=True):
                buffer.copy_(vector)
        self._memory, self._owner.flat_optimizer.state_vectors = 0, self._arena.memory[0]
        return True

    def apply(
        self, deltas: Sequence[tuple[ReplicaId, int, float]], rate: float, buffers: tuple[int, int], by: list[ReplicaId]
    ) -> None:
        """Update A as ``ServerOptimizer.apply`` does.

        Args:
            deltas: (replica, slot, weight) of each Δ.
            rate: multiplies the learning rate.
            buffers: indices of the present A and of the next one.
            by: idle replicas.
        """
        source, destination = buffers
        replicas = by[: self._cores]

        def step(kernel: StepKernel, weights: Sequence[float]) -> None:
            assert self._memory is not None, "the optimizer's state is not in the arena"
            named = tuple((r, slot, weight) for (r, slot, _), weight in zip(deltas, weights, strict=True))
            task = UpdateTask(0, False, False, source, destination, self._memory, tuple(encode(kernel)), named)
            if self._owner.clip_norm is not None:
                square = self._run(task._replace(only_sum=True), replicas)
                task = task._replace(of_sum=True, deltas=((0, 0, clip_scale(square, self._owner.clip_norm)),))
            self._run(task, replicas)
            self._memory = 1 - self._memory
            self._owner.flat_optimizer.state_vectors = self._arena.memory[self._memory]

        states = [(self._arena.delta(replica, slot), weight) for replica, slot, weight in deltas]
        self._owner.divide(states, rate, self._arena.version(destination), step)

    def _run(self, task: UpdateTask, by: list[ReplicaId]) -> float:
        """Compute all slices of a task; returns the squared norm of Σ weight·Δ where only that is computed."""
        self._number += 1
        task = task._replace(number=self._number)
        self._control.write_task(task)
        parts = {replica: UpdateSlice(self._number, number, len(by)) for number, replica in enumerate(by)}
        for replica, part in parts.items():
            self._control.assign_slice(replica, part)
            self._workers.wakeups[replica].notify()

        def finished(replica: ReplicaId) -> bool:
            return self._control.finished_slices[replica] == task.number

        self._workers.wait_for(finished, parts, f"their part of update {self._owner.flat_optimizer.steps}")
        # A slice whose worker died is computed here: nothing that it reads was written. Squares are summed in the
        # order of the slices, so that the norm is the same whichever worker was first.
        return sum(
            self._control.slice_squares[replica] if finished(replica) else self._slices.step(task, part)
            for replica, part in parts.items()
        )
