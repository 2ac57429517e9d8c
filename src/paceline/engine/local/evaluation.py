"""The queue of snapshots to evaluate, and the process that evaluates them off the training path.

The scorer process: scores snapshots off the training path.
"""

import contextlib
import functools
import json
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.comm.shared_pickle import SharedObject, unpack
from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.evaluation import Evaluator, SnapshotInfo, room
from paceline.engine.remote_errors import SCORER, failure, worker_failed
from paceline.replica.flat_state import FlatLayout, FlatState

ENTRY = "paceline.engine.local.evaluation:main"


class EvaluationQueue:
    """The scorer process of a run, and what it has still to score. Where it is killed, main scores the rest.

    It is given one snapshot at a time, in one piece of shared memory; the others queue up here.

    Args:
        job: of the run.
        fork_server: makes the process.
        parcel: the job.
        layout: of A.
        patient: use only idle cores; not where the run waits for a score.
    """

    def __init__(
        self, job: Job, fork_server: ForkServer, parcel: SharedObject, layout: FlatLayout, *, patient: bool
    ) -> None:
        self._job, self._fork_server, self._layout = job, fork_server, layout
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._segment, self._slot = new_snapshot(layout)
        fds = [parcel.fd, theirs.fileno(), self._segment.fd]
        with theirs:
            self.child = fork_server.spawn(ENTRY, {"patient": patient}, fds)
        self._queue: deque[tuple[SnapshotInfo, FlatState]] = deque()
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

    def hand_in(self, state: FlatState, moment: SnapshotInfo) -> None:
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
        self._fork_server.forget(self.child)

    @functools.cached_property
    def _scorer(self) -> Evaluator:
        return Evaluator(self._job.program, self._job.program.build())

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


def new_snapshot(layout: FlatLayout) -> tuple[SharedMemory, FlatState]:
    """Shared memory for one state of its own."""
    arena = _arena(layout)
    segment = SharedMemory.create("snapshot", arena.size_bytes, reserved_bytes=arena.size_bytes)
    return segment, _state(segment, arena, layout)


def snapshot_in(fd: int, layout: FlatLayout) -> FlatState:
    """The state that lies behind a file descriptor; closes it."""
    arena = _arena(layout)
    segment = SharedMemory.attach(fd, arena.size_bytes)
    try:
        return _state(segment, arena, layout)
    finally:
        segment.close()


def _arena(layout: FlatLayout) -> Arena:
    arena = Arena()
    for i, block in enumerate((*layout.parameters, *layout.buffers)):
        arena.add(str(i), (block.elements,), block.dtype)
    return arena


def _state(segment: SharedMemory, arena: Arena, layout: FlatLayout) -> FlatState:
    vectors = list(arena.tensors(segment).values())
    count = len(layout.parameters)
    return FlatState(layout, vectors[:count], vectors[count:])


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry: scores what it is sent until the other end hangs up."""
    job_fd, link_fd, slot_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            _serve(unpack(SharedObject(job_fd)), link, slot_fd, patient=args["patient"])
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(failure(SCORER, error))
            raise SystemExit(1) from error


def _serve(job: Job, link: socket.socket, slot_fd: int, *, patient: bool) -> None:
    torch.set_num_threads(1)
    if patient:
        # Only cycles that nobody else wants, so that scoring never bends the timing of the workers.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    module = job.program.build()
    snapshot = snapshot_in(slot_fd, FlatLayout.of(module, job.running_buffers))
    scorer = Evaluator(job.program, module)
    while moment := link.recv(1 << 16):
        record = scorer.score(snapshot, SnapshotInfo(**json.loads(moment)))
        link.send(json.dumps(record.row()).encode())
