"""Evaluation in a process of its own: the main process's side, and the process's entry.

::

    main     queue |s3|s2|s1|s0|  -- counts of s0, over a socket; s0 lies in shared memory -->  process
             history  <------------------------- record, over the socket ------------------  evaluates s0
"""

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_pickle import SharedObject, unpack
from paceline.core.errors import SCORER, WorkerError, encode_failure, failure_text
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.device import CPU, of_worker, synchronize
from paceline.engine.base import Job
from paceline.engine.evaluation import EvaluationQueue, Evaluator, SnapshotInfo, become_evaluator
from paceline.engine.local.arena import ArenaLayout, ParameterArena, arena_device
from paceline.replica.flat_state import FlatLayout, FlatState

ENTRY = "paceline.engine.local.evaluation_process:main"


class EvaluationProcess:
    """The evaluator process of a run and its queue; if the process is killed, main evaluates the rest.

    The process is given one snapshot at a time, the first of the queue: it lies in memory that both share.

    Args:
        job: of the run.
        fork_server: starts the process.
        shared_job: the job, as the process reads it.
        layout: of A.
        idle_only: use only idle cores; not where the run waits for a record.
    """

    def __init__(
        self, job: Job, fork_server: ForkServer, shared_job: SharedObject, layout: FlatLayout, *, idle_only: bool
    ) -> None:
        self._timeout_s, self._fork_server = job.timeout_s, fork_server
        self.link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """Readable when a record is there, or the process has ended; with the process at the other end."""
        self._arena = ParameterArena(ArenaLayout(layout, device=arena_device(job.strategy.device)))
        with remote:
            fds = [shared_job.fd, remote.fileno(), self._arena.segment.fd]
            self.child = fork_server.spawn(ENTRY, {"idle_only": idle_only}, fds)
        self.queue = EvaluationQueue(job.program, layout.nbytes, device=_device(job))
        self._early: list[Record] = []
        self.alive = True

    def hand_in(self, state: FlatState, info: SnapshotInfo) -> None:
        """Queue a copy of ``state``; wait for room where memory is short."""
        while self.alive and self.queue.full:
            self._early += self._receive(self._timeout_s)
        if self.alive and not self.queue.snapshots:
            self._send(state, info)
        else:
            self.queue.snapshots.append((state.to(CPU) if state.device != CPU else state.clone(), info))

    def collect(self) -> list[Record]:
        """Return the records that have come back."""
        records, self._early = [*self._early, *self._receive(0.0)], []
        return records

    def evaluate_rest(self) -> Iterator[Record]:
        """Return the records that have come back, then evaluate here what the process has left."""
        self.kill()
        yield from self.collect()
        yield from self.queue.evaluate_all()

    def kill(self) -> None:
        """End the process; what is queued stays."""
        liveness.kill(self.child.pidfd)
        self.alive = False

    def close(self) -> None:
        """End the process and drop what was not evaluated."""
        self.kill()
        self.link.close()
        self._arena.close()
        self.queue.snapshots.clear()
        self._fork_server.forget(self.child)

    def _send(self, state: FlatState, info: SnapshotInfo) -> None:
        """Give the process, which has none, a snapshot, and make that the first of the queue."""
        self.queue.snapshots.appendleft((self._arena.version(0).copy_(state), info))
        synchronize(self._arena.layout.device)
        try:
            self.link.send(json.dumps(asdict(info)).encode())
        except OSError:
            self.alive = False

    def _receive(self, timeout_s: Seconds) -> list[Record]:
        """Return the record that has come back, if there is one; a process that times out here is ended."""
        if not self.alive:
            return []
        self.link.settimeout(timeout_s)
        try:
            message = self.link.recv(1 << 18)
        except BlockingIOError:
            return []
        except (ConnectionError, TimeoutError):
            message = b""
        if not message:
            self.kill()
            return []
        answer = json.loads(message)
        if "failed" in answer:
            raise WorkerError(failure_text(answer))
        self.queue.snapshots.popleft()
        if self.queue.snapshots:
            self._send(*self.queue.snapshots.popleft())
        return [Record.of(answer)]


def _device(job: Job) -> torch.device:
    """Return the device that evaluates: the next one after those of the workers."""
    return of_worker(job.strategy.device, job.strategy.workers)


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Entry of the process: evaluate what is sent until the other end hangs up."""
    job_fd, socket_fd, arena_fd = fds
    with socket.socket(fileno=socket_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            job.torch_settings.apply()
            become_evaluator(idle_only=args["idle_only"])
            module = job.program.build()
            layout = FlatLayout.of(module, job.running_buffers)
            shared = ArenaLayout(layout, device=arena_device(job.strategy.device))
            snapshot = ParameterArena(shared, arena_fd).version(0)
            evaluator = Evaluator(job.program, module, _device(job))
            while message := link.recv(1 << 16):
                record = evaluator.score(snapshot, SnapshotInfo(**json.loads(message)))
                link.send(json.dumps(record.row()).encode())
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(encode_failure(SCORER, error))
            raise SystemExit(1) from error
