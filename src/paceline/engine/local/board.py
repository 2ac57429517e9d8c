"""The shared memory of a run: A, and for each replica what it reads, what it writes, and a few words of control.

::

    A              owner --> (copied at a release)
    read slot r    the A that replica r computes from: its parameters are views of it
    Δ slots r      one, or several where a replica goes on while its Δ waits in the buffer
    order r        coordinator --> worker: go / end, attempt number, micro-steps, version, Δ slot, cancelled attempt
    report r       worker --> coordinator: attempt number, how it ended, samples, loss, ...

A slot has one writer at a time: the coordinator's process writes a read slot only while its replica waits, a worker
writes a Δ slot only between a release that names it and its report. So nothing is locked and nothing is torn. The last
word written is the attempt number, and then a bell is rung, which is a system call: who sees the number sees the rest.
"""

from array import array
from dataclasses import dataclass

import torch

from paceline.comm.segments import Arena, Segment
from paceline.core.types import ReplicaId
from paceline.replica.state import Layout, State

WORDS = 32
"""8-byte words for each replica: an order, a report, figures."""

STEP_TIMES = 512
"""How many of a worker's latest step times are kept."""

GO, END = 1, 2
ARRIVED, CANCELLED = 1, 2


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told."""

    kind: int
    attempt: int
    micro_steps: int
    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells of one attempt."""

    ending: int
    attempt: int
    version: int
    slot: int
    samples: int
    finite: bool
    loss: float
    at_ns: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker has measured of itself so far."""

    steps: int
    busy_ns: int
    payload_bytes: int
    peak_memory_bytes: int


class Board:
    """A run's shared memory, laid out alike in every process.

    Args:
        layout: of A.
        replicas: P.
        slots: Δ slots of each replica; 0: replicas write A in place and have no slots at all.
        fd: of the segment; None: make it.
    """

    def __init__(self, layout: Layout, replicas: int, slots: int, fd: int | None = None) -> None:
        self._layout, self._arena = layout, Arena()
        words = self._arena.add("words", (replicas, WORDS), torch.int64)
        times = self._arena.add("times", (replicas, STEP_TIMES), torch.float64)
        self._place("A")
        for name in [f"read {r}" for r in range(replicas)] if slots else []:
            self._place(name)
        for slot in range(slots):
            for r in range(replicas):
                self._place(f"delta {r} {slot}")
            if slot == 0:
                needed = self._arena.size_bytes
        size = self._arena.size_bytes
        if fd is None:
            # What every run touches has its memory now; further slots take theirs as they are needed.
            self.segment = Segment.create("run", size, reserved_bytes=needed if slots else size)
        else:
            self.segment = Segment.attach(fd, size)
        self._words = self.segment.buffer[words : words + replicas * WORDS * 8].cast("q")
        self._reals = self.segment.buffer[words : words + replicas * WORDS * 8].cast("d")
        self._times = self.segment.buffer[times : times + replicas * STEP_TIMES * 8].cast("d")

    @property
    def state(self) -> State:
        """A."""
        return self._state("A")

    def read_slot(self, replica: ReplicaId) -> State:
        """What a replica computes from."""
        return self._state(f"read {replica}")

    def delta_slot(self, replica: ReplicaId, slot: int) -> State:
        """Where a replica writes Δ."""
        return self._state(f"delta {replica} {slot}")

    def give(self, replica: ReplicaId, order: Order) -> None:
        """Write an order; ring the worker's bell after it."""
        at = replica * WORDS
        self._words[at + 1 : at + 5] = _q(order.kind, order.micro_steps, order.version, order.slot)
        self._words[at] = order.attempt

    def order(self, replica: ReplicaId) -> Order:
        """The newest order."""
        attempt, kind, micro_steps, version, slot = self._words[replica * WORDS : replica * WORDS + 5]
        return Order(kind, attempt, micro_steps, version, slot)

    def cancel(self, replica: ReplicaId, attempt: int) -> None:
        """Call an attempt off; ring the worker's bell after it."""
        self._words[replica * WORDS + 5] = attempt

    def cancelled(self, replica: ReplicaId) -> int:
        """The newest attempt that was called off."""
        return self._words[replica * WORDS + 5]

    def excuse(self, replica: ReplicaId, until_ns: int) -> None:
        """Say that nothing will be heard of a worker until then: it is in a delay that was asked for."""
        self._words[replica * WORDS + 6] = until_ns

    def excused(self, replica: ReplicaId) -> int:
        """Until when nothing will be heard of a worker; 0 where there was no delay."""
        return self._words[replica * WORDS + 6]

    def tell(self, replica: ReplicaId, report: Report) -> None:
        """Write a report; ring the coordinator's bell after it."""
        at = replica * WORDS + 8
        self._words[at + 1 : at + 7] = _q(
            report.ending, report.version, report.slot, report.samples, int(report.finite), report.at_ns
        )
        self._reals[at + 7] = report.loss
        self._words[at] = report.attempt

    def told(self, replica: ReplicaId) -> int:
        """The newest attempt that was reported."""
        return self._words[replica * WORDS + 8]

    def report(self, replica: ReplicaId) -> Report:
        """The newest report."""
        at = replica * WORDS + 8
        attempt, ending, version, slot, samples, finite, at_ns = self._words[at : at + 7]
        return Report(ending, attempt, version, slot, samples, bool(finite), self._reals[at + 7], at_ns)

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: float | None = None) -> None:
        """Write a worker's figures, and the time of one more step."""
        at = replica * WORDS + 16
        if step_time_s is not None:
            self._times[replica * STEP_TIMES + figures.steps % STEP_TIMES] = step_time_s
        self._words[at : at + 4] = _q(figures.steps, figures.busy_ns, figures.payload_bytes, figures.peak_memory_bytes)

    def figures(self, replica: ReplicaId) -> Figures:
        """A worker's figures."""
        at = replica * WORDS + 16
        return Figures(*self._words[at : at + 4])

    def step_times(self, replica: ReplicaId) -> list[float]:
        """A worker's latest step times, in seconds, in no order."""
        times = self._times[replica * STEP_TIMES : (replica + 1) * STEP_TIMES]
        return [t for t in times if t > 0]

    def _place(self, name: str) -> None:
        for i, block in enumerate((*self._layout.parameters, *self._layout.buffers)):
            self._arena.add(f"{name}: {i}", (block.elements,), block.dtype)

    def _state(self, name: str) -> State:
        count = len(self._layout.parameters)
        vectors = [self._arena.tensor(self.segment, f"{name}: {i}") for i in range(count + len(self._layout.buffers))]
        return State(self._layout, vectors[:count], vectors[count:])


def _q(*words: int) -> memoryview:
    return memoryview(array("q", words))
