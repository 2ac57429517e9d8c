"""The parameter arena in shared memory, laid out alike in every process, and the pool of its version buffers.

::

    version v     v = 0 .. P+1: an A that a replica reads, or the next one; the main process, or idle replicas, write it
                  while it is not read, and never after it has been granted to a replica
    Δ slots r     one, or several where a replica goes on while its Δ waits in the buffer; written by its replica
                  between a grant that names it and its completion
    memory        the optimizer's state, twice, and Σ weight·Δ: where replicas make the updates

P replicas read at most P versions, and one is the current A: among P + 2 one is always free. So an update is written
where no process reads, a grant names a version and copies nothing, nothing is locked and nothing is torn. Pages that
were never touched cost nothing: lockstep training needs two versions. Replicas map versions read-only: a worker that
writes A there is killed, and can't corrupt what the others read.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.core.types import ReplicaId
from paceline.engine.local.control_block import ControlBlock
from paceline.engine.own_states import own_bytes
from paceline.engine.run_context import RunContext
from paceline.replica.flat_state import FlatLayout, FlatState


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The contents of an arena; the same in every process of a run."""

    state: FlatLayout
    """Of A and of each Δ."""
    replicas: int = 0
    """0: a single state is shared, as that to evaluate."""
    slots: int = 0
    """Δ buffers of each replica; 0: replicas write A in place."""
    optimizer_vectors: int = 0
    """Vectors of optimizer state for each vector of A."""
    workers: int = 0
    """Of all replicas."""
    own_bytes: int = 0
    """Address space of a copy of what a worker keeps from Δ to Δ, of which each has two; 0: there are none."""

    @classmethod
    def of(cls, context: RunContext, state: FlatLayout, optimizer_vectors: int) -> "ArenaLayout":
        """Return the layout of a run's arena."""
        workers = context.job.strategy.workers
        own = own_bytes(context, state)
        return cls(state, context.replicas, context.delta_slots, optimizer_vectors, workers, own)

    @property
    def versions(self) -> int:
        """Number of version buffers: one for each reading replica, the present version and the next one."""
        return self.replicas + 2 if self.slots else 1


class ParameterArena:
    """The versions of A, the Δs, the optimizer's state and the control words of one run in shared memory.

    Buffers that not every run touches get memory only when they are committed: see :meth:`commit`.

    Args:
        layout: of the arena.
        fd: of the shared memory; None: create it.
    """

    def __init__(self, layout: ArenaLayout, fd: int | None = None) -> None:
        self.layout, self._arena = layout, Arena()
        self._uncommitted: dict[str, tuple[int, int]] = {}
        words = ControlBlock.size(layout.replicas, layout.slots, layout.workers)
        at = self._arena.add("words", (words,), torch.int64)
        # First what every run touches, in one piece to be reserved at once: two versions, and a Δ of each replica.
        for v in range(min(2, layout.versions)):
            self._add(f"version {v}")
        for r in range(layout.replicas if layout.slots else 0):
            self._add(f"delta {r} 0")
        if layout.own_bytes:
            own_words_at = self._arena.add("own words", (3 * layout.workers + 1,), torch.int64)
        touched = self._arena.size_bytes
        for slot in range(1, layout.slots):
            for r in range(layout.replicas):
                self._add(f"delta {r} {slot}", committed=False)
        for v in range(2, layout.versions):
            self._add(f"version {v}", committed=False)
        if layout.slots:
            memory = [f"memory {copy} {m}" for copy in (0, 1) for m in range(layout.optimizer_vectors)]
            for name in ("sum", *memory):
                self._add(name, committed=False, buffers=False)
        self.own_begin = self._arena.add("own", (2 * layout.workers * layout.own_bytes,), torch.uint8)
        """Offset of the copies of what replicas keep."""
        size = self._arena.size_bytes
        if fd is None:
            self.segment = SharedMemory.create("run", size, reserved_bytes=touched)
        else:
            self.segment = SharedMemory(fd, size)
        self.control = ControlBlock(self.segment.buffer[at : at + 8 * words], layout.replicas, layout.workers)
        self.own_words = memoryview(b"").cast("q")
        """Words that say which copies of what replicas keep are whole."""
        if layout.own_bytes:
            count = 8 * (3 * layout.workers + 1)
            self.own_words = self.segment.buffer[own_words_at : own_words_at + count].cast("q")
        self._readable: SharedMemory | None = None
        self.mapped: dict[str, FlatState] = {}
        """The states that have been mapped, by name; "readonly v" where they can't be written."""

    def _add(self, name: str, *, committed: bool = True, buffers: bool = True) -> None:
        start, state = self._arena.size_bytes, self.layout.state
        for i, block in enumerate((*state.parameters, *state.buffers) if buffers else state.parameters):
            self._arena.add(f"{name}: {i}", (block.elements,), block.dtype)
        if not committed and self._arena.size_bytes > start:
            self._uncommitted[name] = start, self._arena.size_bytes - start

    def version(self, v: int) -> FlatState:
        """Return version buffer ``v``; call :meth:`commit` before the first write."""
        return self._map(f"version {v}", f"version {v}", self.segment)

    def readonly_version(self, v: int) -> FlatState:
        """Return version buffer ``v`` where a write is a segmentation fault."""
        self._readable = self._readable or self.segment.readable()
        return self._map(f"readonly {v}", f"version {v}", self._readable)

    def delta(self, replica: ReplicaId, slot: int) -> FlatState:
        """Return a Δ buffer of a replica; call :meth:`commit` before the first write."""
        return self._map(f"delta {replica} {slot}", f"delta {replica} {slot}", self.segment)

    @cached_property
    def sums(self) -> list[Tensor]:
        """Vectors for Σ weight·Δ of an update in slices; call :meth:`commit` before the first write."""
        return self._parameters("sum", self.segment)

    @cached_property
    def memory(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Two copies of the optimizer's state for each vector of A; call :meth:`commit` before the first write."""
        kinds, vectors = range(self.layout.optimizer_vectors), range(len(self.layout.state.parameters))

        def copy(number: int) -> list[list[Tensor]]:
            by_kind = [self._parameters(f"memory {number} {m}", self.segment) for m in kinds]
            return [[kind[i] for kind in by_kind] for i in vectors]

        return copy(0), copy(1)

    def commit(self, *names: str) -> None:
        """Reserve the memory of these buffers, so that a later write can't fail for lack of it; once is enough.

        Raises:
            PacelineError: there is not that much.
        """
        for name in names if self._uncommitted else ():
            place = self._uncommitted.pop(name, None)
            if place is not None:
                self.segment.reserve(*place)

    def close(self) -> None:
        """Release the memory; vectors returned before keep it mapped as long as they live."""
        self.mapped.clear()
        for vectors in ("sums", "memory"):
            self.__dict__.pop(vectors, None)
        self.segment.close()
        if self._readable is not None:
            self._readable.close()

    def _map(self, key: str, name: str, segment: SharedMemory) -> FlatState:
        state = self.mapped.get(key)
        if state is None:
            layout = self.layout.state
            first = len(layout.parameters)
            buffers = [self._arena.tensor(segment, f"{name}: {first + i}") for i in range(len(layout.buffers))]
            state = self.mapped[key] = FlatState(layout, self._parameters(name, segment), buffers)
        return state

    def _parameters(self, name: str, segment: SharedMemory) -> list[Tensor]:
        return [self._arena.tensor(segment, f"{name}: {i}") for i in range(len(self.layout.state.parameters))]


class VersionPool:
    """The version buffers of an arena with their reader counts. At first buffer 0 is the present A, without readers.

    Args:
        arena: of its P + 2 buffers P readers and the present A always leave one free.
    """

    def __init__(self, arena: ParameterArena) -> None:
        self._arena = arena
        self._free = list(reversed(range(1, arena.layout.versions)))
        self._reads: dict[ReplicaId, int] = {}
        self._readers = [0] * arena.layout.versions
        self.current = 0
        """Index of the buffer of the present A."""

    def acquire(self, replica: ReplicaId) -> int:
        """Let a replica read the present A from now on; returns the index of its buffer."""
        self._reads[replica] = buffer = self.current
        self._readers[buffer] += 1
        return buffer

    def release(self, replica: ReplicaId) -> None:
        """End a replica's read, if it has one: it has computed, or its worker has exited."""
        buffer = self._reads.pop(replica, None)
        if buffer is not None:
            self._readers[buffer] -= 1
            if not self._readers[buffer] and buffer != self.current:
                self._free.append(buffer)

    def free(self) -> int:
        """Return the index of a buffer without readers that is not the present A; it has memory.

        Raises:
            PacelineError: there is not that much memory.
        """
        self._arena.commit(f"version {self._free[-1]}")
        return self._free[-1]

    def commit_write(self, buffer: int) -> None:
        """Make the buffer that :meth:`free` returned the present A."""
        taken = self._free.pop()
        assert taken == buffer, "not the buffer that was free"
        before, self.current = self.current, buffer
        if not self._readers[before]:
            self._free.append(before)
