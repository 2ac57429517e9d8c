"""An update of A, made in parts by the replicas that wait for it.

::

    main      describes the task, assigns parts, wakes --- waits --------------------------- the new A is there
    worker 0  waits for its release ... makes part 0: reads Δs and the old A, writes the new one ... waits on
    worker 1  waits for its release ... makes part 1

What is read stays as it was until all parts are made: A, the optimizer's memory and the Δs; what is written is read by
nobody. So a part can be made again by somebody else, if its worker died over it, and an update is neither lost nor made
twice. With clipping there are two tasks: Σ weight·Δ with its norm, then the step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.engine.local.board import Part, Task
from paceline.engine.local.store import Store
from paceline.replica.kernels import decode

CHUNK = 2**16
"""Elements that are summed and stepped on before the next ones are: they fit into a core's own cache."""

LINE = 64
"""Elements of whole cache lines and of whole vector instructions, of any dtype: a part rounds as the whole does."""


class Bench:
    """Where parts are made, in any process of a run.

    Args:
        store: its vectors.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch: dict[torch.dtype, Tensor] = {}

    def make(self, task: Task, part: Part) -> float:
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

    def _step(self, task: Task, i: int, span: slice) -> None:
        store = self._store
        here, there = (store.version(v).parameters[i][span] for v in (task.here, task.there))
        copies = zip(store.memory[1 - task.memory][i], store.memory[task.memory][i], strict=True)
        memory = [new[span].copy_(old[span]) for new, old in copies]
        decode(task.kernel).step(here, there, self._gradient(task, i, span), memory)

    def _gradient(self, task: Task, i: int, span: slice) -> Tensor:
        sums = self._store.sums[i][span]
        scratch = self._room(sums)
        if task.of_sum:
            return torch.mul(sums, task.deltas[0][2], out=scratch)
        if len(task.deltas) == 1 and task.deltas[0][2] == 1.0:
            replica, slot, _ = task.deltas[0]
            return self._store.delta(replica, slot).parameters[i][span]
        return self._sum(task, i, span, scratch)

    def _sum(self, task: Task, i: int, span: slice, out: Tensor) -> Tensor:
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


def chunks(elements: int, part: Part) -> Iterator[slice]:
    """A part of a vector, in pieces; no two parts share a cache line.

    >>> [list(chunks(250, Part(1, number, 3))) for number in range(3)]
    [[slice(0, 64, None)], [slice(64, 128, None)], [slice(128, 250, None)]]
    """
    start, end = (_bound(elements, number, part.of) for number in (part.number, part.number + 1))
    for first in range(start, end, CHUNK):
        yield slice(first, min(end, first + CHUNK))


def _bound(elements: int, number: int, of: int) -> int:
    return elements if number == of else elements * number // of // LINE * LINE
