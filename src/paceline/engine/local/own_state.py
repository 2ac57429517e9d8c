"""What replicas keep from Δ to Δ, in shared memory: for checkpoints, and for the workers that replace theirs.

A replica that steps by itself has an optimizer of its own, and under local SGD and elastic averaging parameters, too.
It leaves a copy of both beside its Δs, one buffer for even and one for odd attempts::

    worker   attempt 4: compute, leave 4, report completion | 5: compute, leave 5 ...
    main                                   read completion 4, decide, save: finds 4, whole, whatever becomes of 5

The copy of the newest completion that main has read is not overwritten before main has granted the attempt after the
next: so it is whole, also where the worker is killed while it writes the other one.

Under Hogwild, where a step takes less time than a copy and nobody grants it, replicas leave a copy when main asks.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.checkpoint.base import TensorChunk
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.local.arena import ParameterArena
from paceline.engine.own_states import KEY, OwnBuffers, OwnState
from paceline.engine.run_context import RunContext
from paceline.replica.local_sgd import KeepsState

# How long main waits for copies that it has asked for.
ANSWER_S: Seconds = 2.0

# What a replica has left once it makes no attempt any more: it answers no further question.
_LAST = 1 << 62


class OwnStates:
    """The buffers of all workers; the same in main and in each worker. A worker has the number of its rank in the mesh.

    Args:
        arena: of the run, with such buffers.
    """

    def __init__(self, arena: ParameterArena) -> None:
        self._arena = arena
        self._words = arena.own_words
        """Of each worker: the attempt in either buffer, and the newest question that it has answered."""
        self._asked = arena.own_words[-1:]
        """The newest question of main."""
        self.on_request = not arena.layout.slots
        """Whether copies are left when main asks."""
        self._workers = arena.layout.workers // arena.layout.replicas
        """Of each replica."""
        self._buffers = OwnBuffers(arena.segment, arena.own_begin, arena.layout.own_bytes)

    @classmethod
    def of(cls, arena: ParameterArena) -> "OwnStates | None":
        """Return those of a run; None: its replicas keep nothing, or nobody would read it."""
        return cls(arena) if arena.layout.own_bytes else None

    # -------------------------------------------------------------------------------------------------------- a worker

    def begin(self, context: RunContext, worker: int, attempt: Clock, own: KeepsState) -> None:
        """Let a worker go on with what its replica had after ``attempt``, in this run or in the one that goes on."""
        replica = worker // self._workers
        left = self.find(replica, attempt)
        layout = self._arena.layout.state
        if left is not None:
            left.restore(own, layout)
        elif attempt == context.positions[replica].attempt and (kept := OwnState.saved_for(context, replica)):
            kept.restore(own, layout)
            if not self.on_request:
                self.leave(worker, attempt, own=own)

    def asked(self, replica: ReplicaId) -> bool:
        """Return whether main has asked for a copy that a replica has not left."""
        return self.on_request and self._answered(replica)[0] < self._asked[0]

    def leave(self, worker: int, attempt: Clock, *, own: KeepsState) -> None:
        """Leave a copy of what a worker has after an attempt; nothing where there is no memory for it."""
        asked = self._asked[0]
        if self.on_request and not self.asked(worker):
            return
        index = self._index(worker, attempt)
        words = self._words[3 * worker : 3 * worker + 2]
        words[index % 2] = 0
        if self._buffers.write(index, OwnState.of(own)):
            words[index % 2] = attempt + 1
        self._answered(worker)[0] = asked  # last: main reads the copy once it sees it

    def leave_last(self, replica: ReplicaId, attempt: Clock, own: KeepsState) -> None:
        """Leave a copy at the end of a worker."""
        if self.on_request:
            self._answered(replica)[0] = -1
            self.leave(replica, attempt, own=own)
            self._answered(replica)[0] = _LAST

    # ------------------------------------------------------------------------------------------------------------ main

    def find(self, replica: ReplicaId, attempt: Clock) -> OwnState | None:
        """Return what a replica had after an attempt, or, where it is left on request, what it has left last."""
        found = list[OwnState]()
        for worker in range(replica * self._workers, (replica + 1) * self._workers):
            index = self._index(worker, attempt)
            label = self._words[3 * worker + index % 2]
            if not label or (not self.on_request and label != attempt + 1):
                return None
            found.append(OwnState.read(self._buffers.view(index)))
        return OwnState.merged(found)

    def snapshot(
        self, attempts: Sequence[Clock], alive: Callable[[ReplicaId], bool], notify: Callable[[ReplicaId], None]
    ) -> tuple[list[TensorChunk], dict[str, Any]]:
        """Return what replicas have after these attempts: chunks, and what is no tensor, for a checkpoint.

        Args:
            attempts: the newest of each that main has read.
            alive: returns whether a replica may still answer.
            notify: wakes a replica that waits for a grant.
        """
        chunks, saved = list[TensorChunk](), dict[str, Any]()
        replicas: Sequence[ReplicaId] = range(len(attempts))
        for replica in self._ask(replicas, alive, notify) if self.on_request else replicas:
            state = self.find(replica, attempts[replica])
            if state is not None:
                chunks += state.chunks(replica)
                saved[str(replica)] = state.saved
        return chunks, {KEY: saved}

    def _ask(
        self,
        replicas: Sequence[ReplicaId],
        alive: Callable[[ReplicaId], bool],
        notify: Callable[[ReplicaId], None],
    ) -> list[ReplicaId]:
        """Ask replicas for copies, wait for those that are alive, but not for long, and return who has left one."""
        self._asked[0] += 1
        for replica in filter(alive, replicas):
            notify(replica)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            late = [r for r in replicas if self._answered(r)[0] < self._asked[0] and alive(r)]
            if not late:
                break
            time.sleep(0.001)  # they are at work, and do not wake main
        return [r for r in replicas if self._answered(r)[0] >= self._asked[0]]

    def _answered(self, worker: int) -> "memoryview[int]":
        return self._words[3 * worker + 2 : 3 * worker + 3]

    def _index(self, worker: int, attempt: Clock) -> int:
        return 2 * worker + (0 if self.on_request else attempt % 2)
