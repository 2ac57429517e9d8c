"""A replica of several workers that pushes to servers: a process for each of them, all on one host.

::

    leader     listen at a socket in a folder of their own ... address of the memory of Δ and A, commands ... push
    follower   connect ........................................ map it, its part of the replica

The leader is the client of the server, as a replica of one worker is. The followers read A and write Δ in its memory,
so one version of A is read by all of them, and what is pushed is one Δ.
"""

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.comm.shm.rendezvous import SegmentAddress
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.records import Account, WorkerFigures
from paceline.core.types import Seconds, Version
from paceline.engine.base import Job
from paceline.engine.own_states import OwnState, own_bytes
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.server import messages
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.messages import ReplicaAssignment
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.push_client import CancelFlag, PushClient
from paceline.engine.server.server_link import ServerLinks
from paceline.engine.server_optimizer import server_slices
from paceline.engine.spmd.group_member import open_member
from paceline.engine.spmd.replica_group import CommandPipe, EndCommand, Leave, send_all
from paceline.engine.worker import ClientWorker, InMemorySink, InstrumentedReplica, WorkerMetrics
from paceline.engine.worker_metrics import SpanLog, worker_figures
from paceline.replica.flat_state import FlatLayout, FlatState

# Period at which a follower looks for its leader.
LOOK_S: Seconds = 0.02


@dataclass(frozen=True)
class PushMemory:
    """The memory of Δ and A of one replica, as its workers read and write it."""

    buffers: PushBuffers

    def version(self, buffer: int) -> Version:
        """Return the version of the A that was sent last."""
        del buffer  # there is one
        return int(self.buffers.version)

    def read(self, buffer: int) -> FlatState:
        """Return that A."""
        del buffer
        return self.buffers.sent

    def delta(self, slot: int) -> FlatState:
        """Return Δ."""
        del slot  # there is one
        return self.buffers.delta


@dataclass(frozen=True)
class Gang:
    """The workers of one replica, as they find each other.

    Args:
        job: what is run.
        replica: its number.
        token: of this incarnation of it.
    """

    job: Job
    replica: int
    token: str

    @property
    def folder(self) -> Path:
        """Folder in which they meet; only processes of this user see into it."""
        return Path(tempfile.gettempdir()) / f"paceline-{self.token}"

    @property
    def places(self) -> list[Coordinate]:
        """Places of the workers, the leader's first."""
        mesh = self.job.strategy.mesh
        return [mesh.coordinate(rank) for rank in mesh.replica_ranks(self.replica)]

    def leave(self) -> None:
        """Remove the folder if this worker is the last of them; to be called once its process group is gone.

        Torch 2.13's FileStore removes its file with the last of its ranks, but aborts a process whose folder goes
        meanwhile.
        """
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextlib.contextmanager
    def led(self) -> Iterator[list[CommandPipe]]:
        """Context manager of the leader: pipes to all followers, in their order.

        Raises:
            WaitTimeoutError: some do not come in time.
        """
        followers, timeout_s = self.places[1:], self.job.timeout_s
        self.folder.mkdir(mode=0o700)
        with contextlib.ExitStack() as closing:
            closing.callback((self.folder / "leader").unlink, missing_ok=True)
            connections = dict[int, Connection]()
            with socket.socket(socket.AF_UNIX) as listening:
                with _by_descriptor(self.folder) as short:
                    listening.bind(f"{short}/leader")
                listening.listen(len(followers))
                listening.settimeout(timeout_s)
                while len(connections) < len(followers):
                    try:
                        accepted, _ = listening.accept()
                    except TimeoutError:
                        absent = [p.label for i, p in enumerate(followers, 1) if i not in connections]
                        raise WaitTimeoutError(
                            f"replica {self.places[0].label} waited {timeout_s:g} s for {', '.join(absent)} to start; "
                            "write a larger timeout_s="
                        ) from None
                    connection = closing.enter_context(Connection(accepted.detach()))
                    connections[int(connection.recv_bytes())] = connection
            yield [
                CommandPipe(connections[i], f"replica {place.label}", timeout_s) for i, place in enumerate(followers, 1)
            ]

    @contextlib.contextmanager
    def followed(self, worker: int) -> Iterator[CommandPipe]:
        """Context manager of a follower: the pipe to its leader.

        Raises:
            WorkerError: there is none.
        """
        deadline = time.monotonic() + self.job.timeout_s
        with socket.socket(socket.AF_UNIX) as found:
            while True:
                try:
                    with _by_descriptor(self.folder) as short:
                        found.connect(f"{short}/leader")
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise WorkerError(f"replica {self.places[worker].label} found no leader: {error}") from error
                    time.sleep(LOOK_S)  # it says nothing before it listens
            with Connection(found.detach()) as connection:
                connection.send_bytes(str(worker).encode())
                yield CommandPipe(connection, f"replica {self.places[0].label}", self.job.timeout_s)


@contextlib.contextmanager
def _by_descriptor(folder: Path) -> Iterator[str]:
    """Context manager: a short name of a folder, for a socket's has 107 bytes at most; OSError if it is absent."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def share_buffers(buffers: PushBuffers, pipes: Sequence[CommandPipe]) -> PushMemory:
    """Tell all followers where the memory of Δ and A is."""
    for pipe in pipes:
        pipe.send(json.dumps(asdict(buffers.address)))
    return PushMemory(buffers)


def shared_buffers(pipe: CommandPipe, layout: FlatLayout, own_bytes: int, workers: int) -> PushBuffers:
    """Map the memory of Δ and A that the leader has."""
    address = SegmentAddress(**json.loads(pipe.answer("the memory of Δ and A")))
    return PushBuffers(layout, address, own_bytes=own_bytes, workers=workers)


def merged(own: OwnState | None, buffers: PushBuffers, workers: int) -> OwnState | None:
    """Return what all workers of a replica keep; None: one of them could not leave it."""
    parts = [own, *(buffers.part(worker) for worker in range(1, workers))]
    found = [part for part in parts if part is not None]
    return OwnState.merged(found) if len(found) == workers else None


def lead(gang: Gang, assignment: ReplicaAssignment, links: ServerLinks, cancel: CancelFlag) -> messages.Ended:
    """Run the loop of a replica of several workers, as the first of them."""
    job, replica, sink = gang.job, gang.replica, InMemorySink()
    set_threads_and_seed(job, replica)
    with contextlib.ExitStack() as closing:
        spans = SpanLog(job.trace, *gang.places[0])
        closing.callback(spans.close)
        pipes = closing.enter_context(gang.led())

        def memory(run: RunContext, layout: FlatLayout) -> PushMemory:
            return share_buffers(PushBuffers(layout, own_bytes=own_bytes(run, layout), workers=len(gang.places)), pipes)

        path, kept = str(gang.folder / "ranks"), assignment.kept or {}
        member = closing.enter_context(open_member(job, gang.places[0], path, kept, memory, spans.recorder))
        context, size, buffers = member.run, member.parameter_bytes, member.memory.buffers
        attempt = max(assignment.attempt, context.positions[replica].attempt)
        slices = server_slices(context, member.layout, links.count)
        codecs = [DeltaCodec.of(context, part) for part in slices]
        client = PushClient(links, slices, codecs, assignment, attempt, buffers, cancel, sink, job.timeout_s)
        closing.callback(client.close)
        own = member.own if own_bytes(context, member.layout) else None
        if own is not None:
            before = client.go_on(lambda: merged(OwnState.of(own), buffers, len(gang.places)))
            if before is not None:
                before.restore(own, member.layout)
            buffers.leave(attempt, before)  # for the others
            for pipe in pipes:
                pipe.send(attempt)
        metrics = WorkerMetrics(sink, replica, spans.recorder, 2 * size, context.per_step)
        measured = InstrumentedReplica(member.leader(pipes, client, lambda _: None), metrics, client, size)
        worker = ClientWorker(context, replica, measured, client, metrics, assignment.micro_steps)
        for pipe in pipes:
            pipe.answer("its start")
        links.first.call("ready", replica, assignment.incarnation, dict(member.kept))
        worker.run(job.loop)
        send_all(pipes, EndCommand())
        figures = sink.newest._replace(payload_bytes=sink.newest.payload_bytes + member.sent_bytes)
        links.first.call("done", replica, assignment.incarnation, figures, list(sink.step_times))
        return messages.Ended(None, spans.read(), messages.WorkerMeasurements(figures, list(sink.step_times), size))


def follow(gang: Gang, assignment: ReplicaAssignment, number: int) -> messages.Ended:
    """Be another worker of a replica of several."""
    job, place, workers, sink = gang.job, gang.places[number], len(gang.places), InMemorySink()
    set_threads_and_seed(job, gang.replica)
    with contextlib.ExitStack() as closing:
        spans = SpanLog(job.trace, *place)
        closing.callback(spans.close)
        pipe = closing.enter_context(gang.followed(number))

        def memory(run: RunContext, layout: FlatLayout) -> PushMemory:
            buffers = shared_buffers(pipe, layout, own_bytes(run, layout), workers)
            closing.callback(buffers.close)
            return PushMemory(buffers)

        path, kept = str(gang.folder / "ranks"), assignment.kept or {}
        member = closing.enter_context(open_member(job, place, path, kept, memory, spans.recorder))
        buffers = member.memory.buffers
        leave: Leave = lambda _: None  # noqa: E731
        if own_bytes(member.run, member.layout) and (own := member.own) is not None:
            before = buffers.kept(pipe.answer("what the replica kept"))
            if before is not None:
                before.restore(own, member.layout)
            leave = lambda _: buffers.leave_part(number, OwnState.of(own))  # noqa: E731
        metrics = WorkerMetrics(sink, gang.replica, spans.recorder, 0, member.run.per_step)
        follower = member.follower(pipe, metrics, leave)
        pipe.send("ready")
        try:
            follower.run()
        finally:
            metrics.close()
        moved = 2 * member.parameter_bytes * follower.step + member.sent_bytes
        figures = sink.newest._replace(payload_bytes=sink.newest.payload_bytes + moved)
        measured = messages.WorkerMeasurements(figures, list(sink.step_times), member.parameter_bytes)
        return messages.Ended(None, spans.read(), measured)


def with_workers(account: Account, mesh: Mesh, measured: Mapping[Coordinate, messages.WorkerMeasurements]) -> Account:
    """Return an account with the figures of all workers, where replicas have several.

    Args:
        account: with those of the first worker of each replica.
        mesh: of all workers.
        measured: by each worker that has ended well.
    """
    if mesh.per_replica == 1:
        return account
    since_s = account.seconds - account.earlier_s
    rows = list[WorkerFigures]()
    for first, row in {Coordinate(row.replica): row for row in account.workers}.items():
        for place in (mesh.coordinate(rank) for rank in mesh.replica_ranks(first.replica)):
            if place in measured:
                figures = worker_figures(place, *measured[place], since_s)
                rows.append(replace(figures, optimizer_bytes=row.optimizer_bytes))
            elif place == first:
                rows.append(row)
    return replace(account, workers=tuple(rows))
