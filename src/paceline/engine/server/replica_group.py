"""A replica of several workers that pushes to servers: a process for each of them.

::

    leader     address of the memory of Δ and A, commands ................ push
    follower   map it, or memory of its own on another host ... its part

The leader is the client of the server, as a replica of one worker is. The followers read A and write Δ in its memory,
or are sent their part and send it (:mod:`paceline.engine.server.gang`); so one version of A is read by all of them, and
what is pushed is one Δ.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from paceline.comm.shm.rendezvous import SegmentAddress
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.records import Account, WorkerFigures
from paceline.core.types import Version
from paceline.engine.client_worker import ClientWorker, InstrumentedReplica
from paceline.engine.own_states import OwnState, own_bytes
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.server import messages
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.gang import Gang, RemotePipe
from paceline.engine.server.messages import ReplicaAssignment
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.push_client import CancelFlag, PushClient
from paceline.engine.server.server_link import ServerLinks
from paceline.engine.server_optimizer import server_slices
from paceline.engine.spmd.group_member import GroupMember, open_member
from paceline.engine.spmd.replica_group import CommandPipe, EndCommand, Leave, send_all
from paceline.engine.worker_metrics import InMemorySink, SpanLog, WorkerMetrics, worker_figures
from paceline.replica.flat_state import FlatLayout, FlatState


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


def share_buffers(buffers: PushBuffers, pipes: Sequence[CommandPipe]) -> PushMemory:
    """Tell all followers of this host where the memory of Δ and A is, and the others that they have none."""
    for pipe in pipes:
        pipe.send(None if isinstance(pipe, RemotePipe) else asdict(buffers.address))
    return PushMemory(buffers)


def shared_buffers(pipe: CommandPipe, run: RunContext, layout: FlatLayout, workers: int) -> PushBuffers:
    """Map the memory of Δ and A that the leader has, or make such memory for a part of them."""
    found = pipe.answer("the memory of Δ and A")
    address = None if found is None else SegmentAddress(**found)
    most, ahead = own_bytes(run, layout), run.job.strategy.pull_ahead
    return PushBuffers(layout, address, own_bytes=most, workers=workers, sparse=True, pull_ahead=ahead)


def bind(pipe: CommandPipe, member: GroupMember[PushMemory], number: int, *, keeps: bool) -> None:
    """Have what a follower on another host reads and writes travel by its pipe, at either end.

    Args:
        pipe: of that follower, or of another one.
        member: of the worker at this end.
        number: of the follower.
        keeps: whether the replica keeps something that is read.
    """
    if isinstance(pipe, RemotePipe):
        buffers = member.memory.buffers
        read, written = member.part_of(number, buffers.sent, buffers.delta)
        pipe.bind([*read, buffers.version], written, buffers.part_buffer(number) if keeps else None)


def kept_before(pipe: CommandPipe, buffers: PushBuffers) -> OwnState | None:
    """Return what the replica kept before, which is in the memory that it shares, or comes as bytes from its host."""
    found = pipe.answer("what the replica kept")
    if isinstance(found, bytes):
        return OwnState.read(memoryview(found)) if found else None
    return buffers.kept(found)


def merged(own: OwnState | None, buffers: PushBuffers, workers: int) -> OwnState | None:
    """Return what all workers of a replica keep; None: one of them could not leave it."""
    parts = [own, *(buffers.part(worker) for worker in range(1, workers))]
    found = [part for part in parts if part is not None]
    return OwnState.merged(found) if len(found) == workers else None


def lead(gang: Gang, assignment: ReplicaAssignment, links: ServerLinks, cancel: CancelFlag) -> messages.Ended:
    """Run the loop of a replica of several workers, as the first of them."""
    job, replica, sink = gang.job, gang.replica, InMemorySink()
    ahead = job.strategy.pull_ahead
    set_threads_and_seed(job, replica)
    with contextlib.ExitStack() as closing:
        spans = SpanLog(job.trace, *gang.places[0])
        closing.callback(spans.close)
        pipes, rendezvous = closing.enter_context(gang.led())

        def memory(run: RunContext, layout: FlatLayout) -> PushMemory:
            most, workers = own_bytes(run, layout), len(gang.places)
            return share_buffers(PushBuffers(layout, own_bytes=most, workers=workers, pull_ahead=ahead), pipes)

        kept = assignment.kept or {}
        member = closing.enter_context(open_member(job, gang.places[0], rendezvous, kept, memory, spans.recorder))
        context, size, buffers = member.run, member.parameter_bytes, member.memory.buffers
        attempt = max(assignment.attempt, context.positions[replica].attempt)
        slices = server_slices(context, member.layout, links.count)
        codecs = [DeltaCodec.of(context, part) for part in slices]
        client = PushClient(
            links, slices, codecs, assignment, attempt, buffers, cancel, sink, job.timeout_s, pull_ahead=ahead
        )
        closing.callback(client.close)
        own = member.own if own_bytes(context, member.layout) else None
        for number, pipe in enumerate(pipes, 1):
            bind(pipe, member, number, keeps=own is not None)
        if own is not None:
            before = client.go_on(lambda: merged(OwnState.of(own), buffers, len(gang.places)))
            if before is not None:
                before.restore(own, member.layout)
            buffers.leave(attempt, before)  # for the others
            for pipe in pipes:
                pipe.send(bytes(buffers.kept_bytes(attempt)) if isinstance(pipe, RemotePipe) else attempt)
        metrics = WorkerMetrics(sink, replica, spans.recorder, 2 * size, context.per_step)
        client.waited = metrics.waited
        measured = InstrumentedReplica(member.leader(pipes, client, lambda _: None), metrics, client, size)
        report = functools.partial(links.first.call, "reported")
        worker = ClientWorker(context, replica, measured, client, metrics, assignment.micro_steps, report=report)
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
        pipe, rendezvous = closing.enter_context(gang.followed(number))

        def memory(run: RunContext, layout: FlatLayout) -> PushMemory:
            buffers = shared_buffers(pipe, run, layout, workers)
            closing.callback(buffers.close)
            return PushMemory(buffers)

        kept = assignment.kept or {}
        member = closing.enter_context(open_member(job, place, rendezvous, kept, memory, spans.recorder))
        buffers, keeps = member.memory.buffers, own_bytes(member.run, member.layout) > 0 and member.own is not None
        bind(pipe, member, number, keeps=keeps)
        leave: Leave = lambda _: None  # noqa: E731
        if keeps and (own := member.own) is not None:
            before = kept_before(pipe, buffers)
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
