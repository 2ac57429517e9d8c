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

Where replicas compute on accelerators whose memory processes can share, versions and Δs lie on the first of these, and
the shared memory has their handles: see :class:`_DeviceBuffers`. There nothing is read-only.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline import device
from paceline.comm.device_memory import HANDLE_BYTES, DeviceMemory, shared_memory_of
from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.core.errors import PacelineError
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
    device: torch.device = device.CPU
    """Where versions and Δs are."""

    @classmethod
    def of(cls, context: RunContext, state: FlatLayout, optimizer_vectors: int) -> "ArenaLayout":
        """Return the layout of a run's arena."""
        workers, place = context.job.strategy.workers, arena_device(context.job.strategy.device)
        own = own_bytes(context, state)
        return cls(state, context.replicas, context.delta_slots, optimizer_vectors, workers, own, place)

    @property
    def versions(self) -> int:
        """Number of version buffers: one for each reading replica, the present version and the next one."""
        return self.replicas + 2 if self.slots else 1


def arena_device(kind: str) -> torch.device:
    """Return where A is if workers compute on devices of this type: on the first, if processes can share its memory."""
    return device.of_worker(kind, 0) if shared_memory_of(kind) is not None else device.CPU


class _DeviceBuffers:
    """Buffers in a device's memory, each of one state; a process that shares them finds their handles in words.

    Args:
        layout: of the states.
        place: the device.
        memory: shares its memory.
    """

    def __init__(self, layout: FlatLayout, place: torch.device, memory: DeviceMemory) -> None:
        self._device, self._memory, self._arena = place, memory, Arena()
        for i, block in enumerate((*layout.parameters, *layout.buffers)):
            self._arena.add(str(i), (block.elements,), block.dtype)
        self._bytes: dict[str, Tensor] = {}

    def allocate(self, name: str, handle: Tensor) -> None:
        """Allocate a buffer, and write its handle, unless that has been done."""
        if name not in self._bytes:
            self._bytes[name], exported = self._memory.allocate(self._arena.size_bytes, self._device)
            handle.copy_(torch.frombuffer(bytearray(exported.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8))

    def vectors(self, name: str, handle: Tensor) -> list[Tensor]:
        """Return the vectors of a buffer; where another process has allocated it, by its handle."""
        if name not in self._bytes:
            exported = bytes(handle.tolist())
            if not any(exported):
                raise PacelineError(f"{name} of the arena has no memory on {self._device} yet; commit it first")
            self._bytes[name] = self._memory.open(exported, self._arena.size_bytes, self._device)
        whole, found = self._bytes[name], list[Tensor]()
        for slot in self._arena.slots.values():
            end = slot.offset + slot.shape[0] * slot.dtype.itemsize
            found.append(whole[slot.offset : end].view(slot.dtype))
        return found

    def close(self) -> None:
        """Drop all buffers."""
        self._bytes.clear()


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
        shared = shared_memory_of(layout.device.type)
        self._on_device = _DeviceBuffers(layout.state, layout.device, shared) if shared is not None else None
        words = ControlBlock.size(layout.replicas, layout.slots, layout.workers)
        at = self._arena.add("words", (words,), torch.int64)
        # First what every run touches, in one piece to be reserved at once: two versions, and a Δ of each replica.
        first = [f"version {v}" for v in range(min(2, layout.versions))]
        first += [f"delta {r} 0" for r in range(layout.replicas if layout.slots else 0)]
        for name in first:
            self._add(name)
        if layout.own_bytes:
            own_words_at = self._arena.add("own words", (3 * layout.workers + 1,), torch.int64)
        touched = self._arena.size_bytes
        for slot in range(1, layout.slots):
            for r in range(layout.replicas):
                self._add(f"delta {r} {slot}", committed=False)
        for v in range(2, layout.versions):
            self._add(f"version {v}", committed=False)
        if layout.slots and self._on_device is None:
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
        if fd is None:
            self._allocate(*first)

    def _add(self, name: str, *, committed: bool = True, buffers: bool = True) -> None:
        start, state = self._arena.size_bytes, self.layout.state
        if self._on_device is not None:
            self._arena.add(_handle(name), (HANDLE_BYTES,), torch.uint8)
            return
        for i, block in enumerate((*state.parameters, *state.buffers) if buffers else state.parameters):
            self._arena.add(f"{name}: {i}", (block.elements,), block.dtype)
        if not committed and self._arena.size_bytes > start:
            self._uncommitted[name] = start, self._arena.size_bytes - start

    def version(self, v: int) -> FlatState:
        """Return version buffer ``v``; call :meth:`commit` before the first write."""
        return self._map(f"version {v}", f"version {v}", self.segment)

    def readonly_version(self, v: int) -> FlatState:
        """Return version buffer ``v`` where a write is a segmentation fault, if it is in the host's memory."""
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
        self._allocate(*names)
        for name in names if self._uncommitted else ():
            place = self._uncommitted.pop(name, None)
            if place is not None:
                self.segment.reserve(*place)

    def _allocate(self, *names: str) -> None:
        if self._on_device is not None:
            for name in names:
                self._on_device.allocate(name, self._arena.tensor(self.segment, _handle(name)))

    def close(self) -> None:
        """Release the memory; vectors returned before keep it mapped as long as they live."""
        self.mapped.clear()
        if self._on_device is not None:
            self._on_device.close()
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
            if self._on_device is None:
                vectors = [self._arena.tensor(segment, f"{name}: {i}") for i in range(first + len(layout.buffers))]
            else:
                vectors = self._on_device.vectors(name, self._arena.tensor(segment, _handle(name)))
            state = self.mapped[key] = FlatState(layout, vectors[:first], vectors[first:])
        return state

    def _parameters(self, name: str, segment: SharedMemory) -> list[Tensor]:
        return [self._arena.tensor(segment, f"{name}: {i}") for i in range(len(self.layout.state.parameters))]


def _handle(name: str) -> str:
    return f"{name}: handle"


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

    def read_by(self, replica: ReplicaId) -> int:
        """Return the index of the buffer that a replica reads, or has read for a Δ that is not decided on."""
        return self._reads[replica]

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
