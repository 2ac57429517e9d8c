"""A worker process of a replica that has several: a stage, a shard, or both.

::

    main --- grants, wakeups ---> leader (stage 0, shard 0): the loop, the batches, the completions
                                    |  commands, batches
                                    +---> follower (stage 0, shard 1), follower (stage 1, shard 0), ...

Where one of them has exited, the others exit without a message, since main has seen it.
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.core.mesh import Coordinate
from paceline.core.types import Clock, Version
from paceline.engine.base import LoopEvent
from paceline.engine.client_worker import ClientWorker, InstrumentedReplica
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.own_state import OwnStates
from paceline.engine.local.worker_main import SharedMemoryClient, connected, report_to_main
from paceline.engine.local.worker_processes import PEER_DIED
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.spmd.group_member import GroupMember, error_message, open_member
from paceline.engine.spmd.process_group import Rendezvous
from paceline.engine.spmd.replica_group import CommandPipe, EndCommand, Leave, PeerExited, send_all
from paceline.engine.worker_metrics import WorkerMetrics
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.trace.recorder import NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Run a worker process of a replica of several.

    Args:
        args: ``place``, of this worker; ``store``, the path of the file by which its replica's workers rendezvous;
            ``remembers``, vectors of optimizer state in the arena; ``traced``, whether there is a file for spans;
            ``first``, micro-steps of replicas before it that have died, and ``kept``, what those had chosen.
        fds: arena, job, eventfds of the replica and of main, link to main, the file for spans, then pipes: the
            leader's to each follower, a follower's to its leader.
    """
    arena_fd, job_fd, own_fd, main_fd, link_fd, *rest = fds
    place = Coordinate(*args["place"])

    def message(error: BaseException) -> bytes | None:
        return None if isinstance(error, SystemExit) else error_message(place, error)

    with connected(job_fd, link_fd, message) as (job, link):
        recorder = Recorder(*place, rest.pop(0)) if args["traced"] else NullRecorder()
        set_threads_and_seed(job, place.replica)
        mesh = job.strategy.mesh
        ranks = mesh.replica_ranks(place.replica)
        number = mesh.rank(place)

        def memory(run: RunContext, layout: FlatLayout) -> "ArenaMemory":
            arena = ParameterArena(ArenaLayout.of(run, layout, args["remembers"]), arena_fd)
            return ArenaMemory(arena, place.replica)

        try:
            meeting = Rendezvous.by_file(number - ranks.start, len(ranks), args["store"])
            with open_member(job, place, meeting, args["kept"], memory, recorder) as member:
                worker = _Worker(member, number, place, recorder)
                leads = number == ranks.start
                others = [other for other in ranks if other != number] if leads else [ranks.start]
                names = [f"replica {mesh.coordinate(other).label}" for other in others] if rest else []
                peers = zip(rest, names, strict=True)
                pipes = [CommandPipe(Connection(fd), name, job.timeout_s) for fd, name in peers]
                told = {"ready": number, "pid": os.getpid(), "kept": dict(member.kept)}
                ready = functools.partial(link.send, json.dumps(told).encode())
                if leads:
                    client = SharedMemoryClient(member.memory.arena, place.replica, own_fd, main_fd)
                    worker.lead(client, pipes, ready, args["first"], functools.partial(report_to_main, link))
                else:
                    worker.follow(pipes[0], ready)
        except PeerExited as error:
            raise SystemExit(PEER_DIED) from error


@dataclass(frozen=True)
class ArenaMemory:
    """The arena, as the workers of one replica read and write it."""

    arena: ParameterArena
    replica: int

    def version(self, buffer: int) -> Version:
        """Return the version of A that is in a buffer."""
        return self.arena.control.versions[buffer]

    def read(self, buffer: int) -> FlatState:
        """Return A in a buffer."""
        return self.arena.readonly_version(buffer)

    def delta(self, slot: int) -> FlatState:
        """Return the Δ in a slot."""
        return self.arena.delta(self.replica, slot)


class _Worker:
    """This process in the run.

    Args:
        member: its part of the replica.
        number: its rank in the mesh.
        place: the same as coordinates.
        recorder: of its spans.
    """

    def __init__(
        self, member: GroupMember[ArenaMemory], number: int, place: Coordinate, recorder: Recorder | NullRecorder
    ) -> None:
        self._member, self._number, self._place, self._recorder = member, number, place, recorder
        self._arena = member.memory.arena
        self._arena.control.metrics.parameter_bytes[number] = member.parameter_bytes

    def lead(
        self,
        client: SharedMemoryClient,
        pipes: Sequence[CommandPipe],
        ready: Callable[[], object],
        first: int,
        report: Callable[[LoopEvent], None],
    ) -> None:
        """Run the replica's loop after ``first`` micro-steps of replicas before it, after a call of ``ready``."""
        metrics = self._metrics(2 * self._member.parameter_bytes)
        leader = self._member.leader(pipes, client, self._go_on(client.attempt))
        measured = InstrumentedReplica(leader, metrics, client, self._member.parameter_bytes)
        worker = ClientWorker(self._member.run, self._place.replica, measured, client, metrics, first, report=report)
        ready()
        worker.run(self._member.run.job.loop)
        send_all(pipes, EndCommand())
        self._add_payload(0)  # pulls and pushes of the leader are counted step by step

    def follow(self, pipe: CommandPipe, ready: Callable[[], object]) -> None:
        """Execute the leader's commands, after a call of ``ready``."""
        metrics = self._metrics(0)
        leave = self._go_on(self._arena.control.completed[self._place.replica])
        follower = self._member.follower(pipe, metrics, leave)
        ready()
        try:
            follower.run()
        finally:
            metrics.close()
        self._add_payload(2 * self._member.parameter_bytes * follower.step)

    def _go_on(self, attempt: Clock) -> Leave:
        """Go on with what the replica kept after an attempt; return what leaves a copy after the next ones."""
        states, own = OwnStates.of(self._arena), self._member.own
        if states is None or own is None:
            return lambda _: None
        states.begin(self._member.run, self._number, attempt, own)
        return functools.partial(states.leave, self._number, own=own)

    def _add_payload(self, nbytes: int) -> None:
        """Count bytes of A and Δ that this worker has moved, and those that it has sent within the replica."""
        metrics = self._arena.control.metrics
        figures = metrics.figures(self._number)
        payload = figures.payload_bytes + nbytes + self._member.sent_bytes
        metrics.measure(self._number, figures._replace(payload_bytes=payload))

    def _metrics(self, step_bytes: int) -> WorkerMetrics:
        metrics = self._arena.control.metrics
        return WorkerMetrics(metrics, self._number, self._recorder, step_bytes, self._member.run.per_step)
