"""The parameter arena in shared memory, laid out alike in every process, and the pool of its versions.

Which version of A lies where, and who reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.core.types import ReplicaId
from paceline.replica.flat_state import FlatLayout, FlatState


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """What is laid out."""

    layout: FlatLayout
    replicas: int
    slots: int
    """Δ slots of each replica; 0: replicas write A in place."""
    remembers: int
    """Vectors of optimizer memory for each vector of A."""
    words: int
    """8-byte words of control."""

    @property
    def versions(self) -> int:
        """How many As there may be at once."""
        return self.replicas + 2 if self.slots else 1


class ParameterArena:
    """The vectors of one run.

    Args:
        plan: the same in every process.
        fd: of the shared memory; None: make it.
    """

    def __init__(self, plan: ArenaLayout, fd: int | None = None) -> None:
        self.plan, self._arena = plan, Arena()
        self._claims: dict[str, tuple[int, int]] = {}
        self._words = self._arena.add("words", (plan.words,), torch.int64)
        for v in range(min(2, plan.versions)):
            self._place_state(f"version {v}")
        for slot in range(plan.slots):
            for r in range(plan.replicas):
                self._place_state(f"delta {r} {slot}", claimed=slot == 0)
            if slot == 0:
                touched = self._arena.size_bytes  # by every run
        for v in range(2, plan.versions):
            self._place_state(f"version {v}", claimed=False)
        memory = [f"memory {copy} {m}" for copy in (0, 1) for m in range(plan.remembers)]
        for name in ["sum", *memory] if plan.slots else []:
            self._place_parameters(name)
        size = self._arena.size_bytes
        if fd is None:
            self.segment = SharedMemory.create("run", size, reserved_bytes=touched if plan.slots else size)
        else:
            self.segment = SharedMemory.attach(fd, size)
        self._readable: SharedMemory | None = None
        self._made: dict[Any, FlatState] = {}

    @property
    def words(self) -> memoryview:
        """The control words, as bytes."""
        return self.segment.buffer[self._words : self._words + 8 * self.plan.words]

    def version(self, v: int) -> FlatState:
        """One A; give it memory first."""
        found = self._made.get(v)
        return found if found is not None else self._keep(v, self._state(f"version {v}", self.segment))

    def readonly_version(self, v: int) -> FlatState:
        """One A, where it can't be written."""
        found = self._made.get(("reading", v))
        if found is not None:
            return found
        self._readable = self._readable or self.segment.readable()
        return self._keep(("reading", v), self._state(f"version {v}", self._readable))

    def delta(self, replica: ReplicaId, slot: int) -> FlatState:
        """Where a replica writes Δ; give it memory first."""
        found = self._made.get((replica, slot))
        if found is not None:
            return found
        return self._keep((replica, slot), self._state(f"delta {replica} {slot}", self.segment))

    @cached_property
    def sums(self) -> list[Tensor]:
        """Where Σ weight·Δ lies when it is made in parts; give it memory first."""
        return self._parameters("sum", self.segment)

    @cached_property
    def memory(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Two copies of what the optimizer remembers, for each vector of A; give them memory first."""
        return self._memory(0), self._memory(1)

    def commit(self, *names: str) -> None:
        """Give these memory now, so that a write can't meet a full memory later; once is enough.

        Raises:
            PacelineError: where there is not that much.
        """
        for name in names if self._claims else ():
            place = self._claims.pop(name, None)
            if place is not None:
                self.segment.reserve(*place)

    def close(self) -> None:
        """Let go of the memory; vectors taken before keep it as long as they live."""
        self._made.clear()
        for vectors in ("sums", "memory"):
            self.__dict__.pop(vectors, None)
        self.segment.close()
        if self._readable is not None:
            self._readable.close()

    def _place_state(self, name: str, *, claimed: bool = True) -> None:
        self._place(name, lambda: self._place_blocks(name, buffers=True), claimed=claimed)

    def _place_parameters(self, name: str) -> None:
        self._place(name, lambda: self._place_blocks(name, buffers=False), claimed=False)

    def _place(self, name: str, place: Callable[[], None], *, claimed: bool) -> None:
        start = self._arena.size_bytes
        place()
        if not claimed and self._arena.size_bytes > start:
            self._claims[name] = (start, self._arena.size_bytes - start)

    def _place_blocks(self, name: str, *, buffers: bool) -> None:
        layout = self.plan.layout
        for i, block in enumerate((*layout.parameters, *layout.buffers) if buffers else layout.parameters):
            self._arena.add(f"{name}: {i}", (block.elements,), block.dtype)

    def _keep(self, name: Any, state: FlatState) -> FlatState:
        self._made[name] = state
        return state

    def _memory(self, copy: int) -> list[list[Tensor]]:
        kinds = [self._parameters(f"memory {copy} {m}", self.segment) for m in range(self.plan.remembers)]
        return [[kind[i] for kind in kinds] for i in range(len(self.plan.layout.parameters))]

    def _parameters(self, name: str, segment: SharedMemory) -> list[Tensor]:
        return [self._arena.tensor(segment, f"{name}: {i}") for i in range(len(self.plan.layout.parameters))]

    def _state(self, name: str, segment: SharedMemory) -> FlatState:
        layout = self.plan.layout
        first = len(layout.parameters)
        buffers = [self._arena.tensor(segment, f"{name}: {first + i}") for i in range(len(layout.buffers))]
        return FlatState(layout, self._parameters(name, segment), buffers)


class VersionPool:
    """The places of a store's versions. At first the present A lies in place 0, and nobody reads.

    Args:
        store: among its P + 2 places there is always one that P readers and the present A leave free.
    """

    def __init__(self, store: ParameterArena) -> None:
        self._store = store
        self._free = list(reversed(range(1, store.plan.versions)))
        self._reads: dict[ReplicaId, int] = {}
        self._readers = [0] * store.plan.versions
        self._new = set(self._free)
        self.current = 0
        """Where the present A lies."""

    def acquire(self, replica: ReplicaId) -> int:
        """A replica computes from the present A from now on; where that lies."""
        self._reads[replica] = place = self.current
        self._readers[place] += 1
        return place

    def release(self, replica: ReplicaId) -> None:
        """A replica has computed, or is gone."""
        place = self._reads.pop(replica, None)
        if place is not None:
            self._readers[place] -= 1
            self._let_go(place)

    def free(self) -> int:
        """A place that nobody reads and that is not the present A; it has memory.

        Raises:
            PacelineError: there is not that much memory.
        """
        place = self._free[-1]
        if place in self._new:
            self._store.commit(f"version {place}")
            self._new.remove(place)
        return place

    def commit_write(self, place: int) -> None:
        """The place that :meth:`free` gave holds the present A now."""
        taken = self._free.pop()
        assert taken == place, "not the place that was free"
        before, self.current = self.current, place
        self._let_go(before)

    def _let_go(self, place: int) -> None:
        if not self._readers[place] and place != self.current:
            self._free.append(place)
