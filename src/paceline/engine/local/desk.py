"""Where snapshots are handed in for scoring, and records come back."""

import json
import os
import socket
from dataclasses import asdict

from paceline.comm.nursery import Child, Nursery
from paceline.comm.segments import Arena, Segment
from paceline.comm.shipping import Parcel
from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.local.crew import worker_failed
from paceline.engine.scoring import Moment, Scorer
from paceline.replica.state import Layout, State

ENTRY = "paceline.engine.local.scorer:main"


class Desk:
    """The scorer process of a run, and what it has still to score. Where it is killed, main scores the rest.

    Args:
        job: of the run.
        nursery: makes the process.
        parcel: the job.
        patient: use only idle cores; not where the run waits for a score.
    """

    def __init__(self, job: Job, nursery: Nursery, parcel: Parcel, *, patient: bool) -> None:
        self._job = job
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.child: Child = nursery.spawn(ENTRY, {"patient": patient}, [parcel.fd, theirs.fileno()])
        self._open: dict[int, tuple[Moment, Segment]] = {}
        self._next = 0
        self._alive = True

    def fileno(self) -> int:
        """Readable when a record is there."""
        return self._link.fileno()

    @property
    def waiting(self) -> int:
        """How many snapshots are not scored yet."""
        return len(self._open)

    @property
    def alive(self) -> bool:
        """Whether the scorer still answers."""
        return self._alive

    def hand_in(self, state: State, moment: Moment) -> None:
        """Have a copy of ``state`` scored."""
        segment, copy = new_snapshot(state.layout)
        copy.copy_(state)
        self._open[self._next] = moment, segment
        try:
            request = json.dumps({"number": self._next, "moment": asdict(moment)}).encode()
            socket.send_fds(self._link, [request], [segment.fd])
        except OSError:
            self._alive = False
        self._next += 1

    def collect(self) -> list[Record]:
        """The records that have come back."""
        records: list[Record] = []
        while self._alive:
            try:
                message = self._link.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                message = b""
            if not message:
                self._alive = False
                break
            records.append(self._taken(json.loads(message)))
        return records

    def score_rest(self) -> list[Record]:
        """Score here what a scorer that was killed has left."""
        scorer = Scorer(self._job.program, self._job.program.build())
        layout = Layout.of(scorer.module, self._job.running_buffers)
        records = [scorer.score(snapshot_in(os.dup(s.fd), layout), moment) for moment, s in self._open.values()]
        self._drop()
        return records

    def close(self) -> None:
        """Hang up; the scorer ends."""
        self._link.close()
        self._drop()

    def _taken(self, answer: dict[str, object]) -> Record:
        if "failed" in answer:
            raise WorkerError(worker_failed(answer))
        number, row = answer["scored"], answer["record"]
        assert isinstance(number, int)
        assert isinstance(row, dict)
        self._open.pop(number)[1].close()
        return Record.of(row)

    def _drop(self) -> None:
        for _, segment in self._open.values():
            segment.close()
        self._open.clear()


def new_snapshot(layout: Layout) -> tuple[Segment, State]:
    """Shared memory for one state of its own."""
    arena = _arena(layout)
    segment = Segment.create("snapshot", arena.size_bytes)
    segment.reserve(0, arena.size_bytes)
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
