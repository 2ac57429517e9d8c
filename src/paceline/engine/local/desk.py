"""Where snapshots are handed in for scoring, and records come back."""

import functools
import json
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paceline.comm import liveness
from paceline.comm.nursery import Nursery
from paceline.comm.segments import Arena, Segment
from paceline.comm.shipping import Parcel
from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.failure import worker_failed
from paceline.engine.scoring import Moment, Scorer, room
from paceline.replica.state import Layout, State

ENTRY = "paceline.engine.local.scorer:main"


class Desk:
    """The scorer process of a run, and what it has still to score. Where it is killed, main scores the rest.

    It is given one snapshot at a time, in one piece of shared memory; the others queue up here.

    Args:
        job: of the run.
        nursery: makes the process.
        parcel: the job.
        layout: of A.
        patient: use only idle cores; not where the run waits for a score.
    """

    def __init__(self, job: Job, nursery: Nursery, parcel: Parcel, layout: Layout, *, patient: bool) -> None:
        self._job, self._nursery, self._layout = job, nursery, layout
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._segment, self._slot = new_snapshot(layout)
        fds = [parcel.fd, theirs.fileno(), self._segment.fd]
        with theirs:
            self.child = nursery.spawn(ENTRY, {"patient": patient}, fds)
        self._queue: deque[tuple[Moment, State]] = deque()
        self._early: list[Record] = []
        self._asked = False
        self._room = room(layout.nbytes)
        self.alive = True

    def fileno(self) -> int:
        """Readable when a record is there, or the scorer has gone."""
        return self._link.fileno()

    @property
    def waiting(self) -> int:
        """How many snapshots are not scored yet."""
        return len(self._queue)

    def hand_in(self, state: State, moment: Moment) -> None:
        """Have a copy of ``state`` scored."""
        while self.alive and len(self._queue) >= self._room:
            self._early += self._receive(self._job.timeout_s)
        self._queue.append((moment, state.clone()))
        self._ask()

    def collect(self) -> list[Record]:
        """The records that have come back."""
        records, self._early = [*self._early, *self._receive(0.0)], []
        return records

    def score_rest(self) -> Iterator[Record]:
        """Score here what a scorer that has gone has left."""
        self.give_up()
        yield from self.collect()
        while self._queue:
            moment, state = self._queue.popleft()
            yield self._scorer.score(state, moment)

    def give_up(self) -> None:
        """End the scorer."""
        liveness.kill(self.child.pidfd)
        self.alive = False

    def close(self) -> None:
        """End the scorer and let go of what was not scored."""
        self.give_up()
        self._link.close()
        self._segment.close()
        self._queue.clear()
        self._nursery.forget(self.child)

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self._job.program, self._job.program.build())

    def _ask(self) -> None:
        """Give the scorer the first of the queue, if it has nothing to do."""
        if not self._queue or self._asked or not self.alive:
            return
        moment, state = self._queue[0]
        self._slot.copy_(state)
        try:
            self._link.send(json.dumps(asdict(moment)).encode())
            self._asked = True
        except OSError:
            self.alive = False

    def _receive(self, timeout_s: Seconds) -> list[Record]:
        """The record that has come back, if one has; one that is waited for in vain is the scorer's last."""
        if not self.alive:
            return []
        self._link.settimeout(timeout_s)
        try:
            message = self._link.recv(1 << 18)
        except BlockingIOError:
            return []
        except (ConnectionError, TimeoutError):
            message = b""
        if not message:
            self.give_up()
            return []
        return [self._taken(json.loads(message))]

    def _taken(self, answer: dict[str, Any]) -> Record:
        if "failed" in answer:
            raise WorkerError(worker_failed(answer))
        self._asked = False
        self._queue.popleft()
        self._ask()
        return Record.of(answer)


def new_snapshot(layout: Layout) -> tuple[Segment, State]:
    """Shared memory for one state of its own."""
    arena = _arena(layout)
    segment = Segment.create("snapshot", arena.size_bytes, reserved_bytes=arena.size_bytes)
    return segment, _state(segment, arena, layout)


def snapshot_in(fd: int, layout: Layout) -> State:
    """The state that lies behind a file descriptor; closes it."""
    arena = _arena(layout)
    segment = Segment.attach(fd, arena.size_bytes)
    try:
        return _state(segment, arena, layout)
    finally:
        segment.close()


def _arena(layout: Layout) -> Arena:
    arena = Arena()
    for i, block in enumerate((*layout.parameters, *layout.buffers)):
        arena.add(str(i), (block.elements,), block.dtype)
    return arena


def _state(segment: Segment, arena: Arena, layout: Layout) -> State:
    vectors = list(arena.tensors(segment).values())
    count = len(layout.parameters)
    return State(layout, vectors[:count], vectors[count:])
