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
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.own_state import OwnStates
from paceline.engine.local.worker_main import SharedMemoryClient, connected
from paceline.engine.local.worker_processes import PEER_DIED
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.spmd.group_member import GroupMember, error_message, open_member
from paceline.engine.spmd.replica_group import CommandPipe, EndCommand, Leave, PeerExited, send_all
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics
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
        worker = _Worker(mesh.rank(place), place, recorder)

        def memory(run: RunContext, layout: FlatLayout) -> "ArenaMemory":
            worker.arena = ParameterArena(ArenaLayout.of(run, layout, args["remembers"]), arena_fd)
            return ArenaMemory(worker.arena, place.replica)

        try:
            with open_member(job, place, args["store"], args["kept"], memory, recorder) as member:
                leads = worker.number == ranks.start
                others = [other for other in ranks if other != worker.number] if leads else [ranks.start]
                names = [f"replica {mesh.coordinate(other).label}" for other in others] if rest else []
                peers = zip(rest, names, strict=True)
                pipes = [CommandPipe(Connection(fd), name, job.timeout_s) for fd, name in peers]
                told = {"ready": worker.number, "pid": os.getpid(), "kept": dict(member.kept)}
                ready = functools.partial(link.send, json.dumps(told).encode())
                worker.arena.control.metrics.parameter_bytes[worker.number] = member.parameter_bytes
                if leads:
                    client = SharedMemoryClient(worker.arena, place.replica, own_fd, main_fd)
                    worker.lead(member, client, pipes, ready, args["first"])
                else:
                    worker.follow(member, pipes[0], ready)
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
        number: its rank in the mesh.
        place: the same as coordinates.
        recorder: of its spans.
    """

    arena: ParameterArena

    def __init__(self, number: int, place: Coordinate, recorder: Recorder | NullRecorder) -> None:
        self.number, self._place, self._recorder = number, place, recorder

    def lead(
        self,
        member: GroupMember,
        client: SharedMemoryClient,
        pipes: Sequence[CommandPipe],
        ready: Callable[[], object],
        first: int,
    ) -> None:
        """Run the replica's loop after ``first`` micro-steps of replicas before it, after a call of ``ready``."""
        metrics = self._metrics(member, 2 * member.parameter_bytes)
        leader = member.leader(pipes, client, self._go_on(member, client.attempt))
        measured = InstrumentedReplica(leader, metrics, client, member.parameter_bytes)
        worker = ClientWorker(member.run, self._place.replica, measured, client, metrics, first)
        ready()
        worker.run(member.run.job.loop)
        send_all(pipes, EndCommand())
        self._add_payload(member, 0)  # pulls and pushes of the leader are counted step by step

    def follow(self, member: GroupMember, pipe: CommandPipe, ready: Callable[[], object]) -> None:
        """Execute the leader's commands, after a call of ``ready``."""
        metrics = self._metrics(member, 0)
        leave = self._go_on(member, self.arena.control.completed[self._place.replica])
        follower = member.follower(pipe, metrics, leave)
        ready()
        try:
            follower.run()
        finally:
            metrics.close()
        self._add_payload(member, 2 * member.parameter_bytes * follower.step)

    def _go_on(self, member: GroupMember, attempt: Clock) -> Leave:
        """Go on with what the replica kept after an attempt; return what leaves a copy after the next ones."""
        states, own = OwnStates.of(self.arena), member.own
        if states is None or own is None:
            return lambda _: None
        states.begin(member.run, self.number, attempt, own)
        return functools.partial(states.leave, self.number, own=own)

    def _add_payload(self, member: GroupMember, nbytes: int) -> None:
        """Count bytes of A and Δ that this worker has moved, and those that it has sent within the replica."""
        metrics = self.arena.control.metrics
        figures = metrics.figures(self.number)
        payload = figures.payload_bytes + nbytes + member.sent_bytes
        metrics.measure(self.number, figures._replace(payload_bytes=payload))

    def _metrics(self, member: GroupMember, step_bytes: int) -> WorkerMetrics:
        metrics = self.arena.control.metrics
        return WorkerMetrics(metrics, self.number, self._recorder, step_bytes, member.run.per_step)
