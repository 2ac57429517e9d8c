"""P2P between threads: it checks that each message is the one that is expected, and blocks in two ways."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import WaitTimeoutError
from paceline.replica.pipeline.p2p_queue import P2P, StageReplicaGroup

BOUND_S = 60
"""Longer than any test takes, so that a deadlock ends."""


@dataclass
class Line:
    """Messages from one worker to another."""

    sent: list[tuple[Tensor, str]] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    taken: int = 0


class Hub:
    """All lines between the workers of a pipeline.

    Args:
        rendezvous: whether sending waits until the other side expects the message.
    """

    def __init__(self, *, rendezvous: bool = False) -> None:
        self.rendezvous = rendezvous
        self.lines: dict[tuple[int, int], Line] = defaultdict(Line)
        self.changed = threading.Condition()
        self.broken = False

    def wire(self, worker: int) -> "Thread":
        return Thread(self, worker)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        done = self.changed.wait_for(lambda: self.broken or until(), timeout=BOUND_S)
        if self.broken or not done:
            raise WaitTimeoutError(f"waited for {what}")

    def breaks(self) -> None:
        """Let the others stop waiting, since one worker has failed."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class Thread(P2P):
    """The P2P of one worker. A tensor is read when it is received: so it matters that it stays as it is until then."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self.hub, self.worker = hub, worker
        self.sent: list[tuple[Line, int]] = []
        """Not settled: on which line, and at which place."""

    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        assert tensor.is_contiguous()
        assert not tensor.is_conj(), "a mark is not in memory"
        assert not tensor.is_neg(), "a mark is not in memory"
        assert destination != self.worker
        with self.hub.changed:
            line = self.hub.lines[self.worker, destination]
            self.sent.append((line, len(line.sent)))
            line.sent.append((tensor, description))
            self.hub.changed.notify_all()
            if self.hub.rendezvous:
                count = len(line.sent)
                self.hub.wait(lambda: len(line.expected) >= count, f"{destination} to expect {description}")

    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> Callable[[], Tensor]:
        with self.hub.changed:
            line = self.hub.lines[source, self.worker]
            line.expected.append(description)
            self.hub.changed.notify_all()
            return Expected(self.hub, line, len(line.expected) - 1, tuple(shape), dtype)

    def wait_sends(self, newest: int = 0) -> None:
        with self.hub.changed:
            old = self.sent[: len(self.sent) - newest]
            self.hub.wait(lambda: all(line.taken > place for line, place in old), "what was sent to be taken")
            del self.sent[: len(old)]


@dataclass
class Expected:
    hub: Hub
    line: Line
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        with self.hub.changed:
            self.hub.wait(lambda: len(self.line.sent) > self.place, self.line.expected[self.place])
            tensor, what = self.line.sent[self.place]
            assert what == self.line.expected[self.place]
            assert (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype), what
            copy = tensor.clone()
            self.line.taken += 1
            self.hub.changed.notify_all()
        return copy


class Table:
    """The meeting point of the replicas of one stage."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.brought: dict[int, tuple[Tensor, str]] = {}
        self.all_there = threading.Barrier(count, timeout=BOUND_S)


class Turns(StageReplicaGroup):
    """One replica of a stage; all of them have to sum the same."""

    def __init__(self, table: Table, copy: int) -> None:
        super().__init__(first=copy == 0)
        self.table, self.copy = table, copy

    def all_reduce(self, vector: Tensor, description: str) -> None:
        self.table.brought[self.copy] = vector.clone(), description
        self.table.all_there.wait()
        vectors, words = zip(*(self.table.brought[copy] for copy in range(self.table.count)), strict=True)
        self.table.all_there.wait()
        assert set(words) == {description}
        assert {each.shape for each in vectors} == {vector.shape}
        vector.copy_(torch.stack(vectors).sum(0))


def in_threads(hub: Hub, workers: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at once; the first failure is raised, and stops the others."""
    results: list[Any] = [None] * len(workers)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        torch.set_num_threads(1)  # OpenMP counts them for each thread that calls it
        try:
            results[index] = workers[index]()
        except BaseException as error:
            failures.append(error)
            hub.breaks()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * BOUND_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
