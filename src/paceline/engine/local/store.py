"""Where a run's vectors lie: one piece of shared memory, laid out alike in every process.

::

    version v     v = 0 .. P+1: an A that somebody reads, or the next one; the main process, or the replicas that
                  wait, write it while nobody reads it, and never after it has been sent to a replica
    Δ slots r     one, or several where a replica goes on while its Δ waits in the buffer; written by its replica
                  between a release that names it and its report
    memory        what the optimizer remembers, twice, and Σ weight·Δ: where replicas make the updates

P replicas read at most P versions, and one is the current A: among P + 2 there is always one that nobody needs. So an
update is written where no one looks, a release names a version and copies nothing, nothing is locked and nothing is
torn. Pages that were never touched cost nothing: lockstep training needs two versions. Replicas map versions
read-only: who writes A there is killed, and can't spoil what the others read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.comm.segments import Arena, Segment
from paceline.core.types import ReplicaId
from paceline.replica.state import Layout, State


@dataclass(frozen=True, slots=True)
class Plan:
    """What is laid out."""

    layout: Layout
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


class Store:
    """The vectors of one run.

    Args:
        plan: the same in every process.
        fd: of the shared memory; None: make it.
    """

    def __init__(self, plan: Plan, fd: int | None = None) -> None:
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
            self.segment = Segment.create("run", size, reserved_bytes=touched if plan.slots else size)
        else:
            self.segment = Segment.attach(fd, size)
        self._readable: Segment | None = None
        self._made: dict[Any, State] = {}

    @property
    def words(self) -> memoryview:
        """The control words, as bytes."""
        return self.segment.buffer[self._words : self._words + 8 * self.plan.words]

    def version(self, v: int) -> State:
        """One A; give it memory first."""
        found = self._made.get(v)
        return found if found is not None else self._keep(v, self._state(f"version {v}", self.segment))

    def reading(self, v: int) -> State:
        """One A, where it can't be written."""
        found = self._made.get(("reading", v))
        if found is not None:
            return found
        self._readable = self._readable or self.segment.readable()
        return self._keep(("reading", v), self._state(f"version {v}", self._readable))

    def delta(self, replica: ReplicaId, slot: int) -> State:
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

    def claim(self, *names: str) -> None:
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

    def _keep(self, name: Any, state: State) -> State:
        self._made[name] = state
        return state

    def _memory(self, copy: int) -> list[list[Tensor]]:
        kinds = [self._parameters(f"memory {copy} {m}", self.segment) for m in range(self.plan.remembers)]
        return [[kind[i] for kind in kinds] for i in range(len(self.plan.layout.parameters))]

    def _parameters(self, name: str, segment: Segment) -> list[Tensor]:
        return [self._arena.tensor(segment, f"{name}: {i}") for i in range(len(self.plan.layout.parameters))]

    def _state(self, name: str, segment: Segment) -> State:
        layout = self.plan.layout
        first = len(layout.parameters)
        buffers = [self._arena.tensor(segment, f"{name}: {first + i}") for i in range(len(layout.buffers))]
        return State(layout, self._parameters(name, segment), buffers)
