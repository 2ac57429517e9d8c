"""Executes the coordinator's decisions at a server: updates A, discards Δs, answers replicas.

An update writes its A into other vectors than those that were sent, or handed in for evaluation, as long as anything
refers to them: streams, the object store and other processes read them without a copy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.aggregation.base import Apply, Arrival
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import ChunksInMemory
from paceline.comm.recycling import RecyclingAllocator
from paceline.core.data_order import BatchRange
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.checkpointing import Snapshot
from paceline.engine.own_states import KEY, OwnState
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.run_state import delta_prefix
from paceline.engine.server.messages import END, Bytes, Reply, ServerGrant, arrays_of, state_of
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer, Summed, server_slices
from paceline.engine.worker_metrics import Figures, SpanLog
from paceline.replica.flat_state import FlatState
from paceline.replica.optimizer_state import merged_json
from paceline.trace.spans import SERVER


class ReplicaRecord:
    """Newest grant and figures of one replica; several processes in a row may be that replica, an incarnation each.

    Args:
        attempt: the newest before the run was resumed; 0: the run begins.
    """

    def __init__(self, attempt: Clock) -> None:
        self.attempt = attempt
        """The newest grant."""
        self.incarnation = 0
        """Number of the present process; what earlier ones still send is rejected."""
        self.ready = self.finished = self.dead = False
        """Whether its model is built; its loop has ended; it has died, and no other process replaces it."""
        self.excused_s: Seconds = 0.0
        """End of its last announced delay."""
        self.kept: Mapping[str, Any] | None = None
        """What its workers have chosen, which others that take their place need; None: it is one worker."""
        self.figures = self._before = Figures(0, 0, 0, 0)
        """Figures of all processes that were this replica, and of those before the present one."""
        self.step_times: Sequence[Seconds] = ()
        self._newest: Reply | None = None
        """The newest grant with its A, or the end; kept for a process that has to be given it again."""

    def reply(self, reply: Reply) -> None:
        """Answer the replica's call, or its next one."""
        self._newest = reply

    def reply_after(self, attempt: Clock) -> Reply | None:
        """Return the answer to a replica whose last complete attempt is this; None: it has to wait."""
        if self._newest is None or self._newest[0] is None or self._newest[0].attempt > attempt:
            return self._newest
        return None

    def measured(self, figures: Figures) -> None:
        """Add the figures so far of the present process to those of the processes before it."""
        steps, busy_ns, payload_bytes, peak = self._before
        self.figures = Figures(
            steps + figures.steps,
            busy_ns + figures.busy_ns,
            payload_bytes + figures.payload_bytes,
            max(peak, figures.peak_memory_bytes),
        )

    def lost(self) -> None:
        """Note that the process has died; the next one is another incarnation."""
        self._before = self.figures
        self.incarnation += 1
        self.ready, self.excused_s = False, 0.0

    def joins(self, attempt: Clock) -> None:
        """Note that a process is started that begins after all attempts under this number, complete or not."""
        self.lost()
        self.attempt, self._newest = attempt, None
        self.finished = self.dead = False


def _encoded(own: OwnState) -> Bytes:
    written = list[Bytes]()

    def memory(size: int) -> memoryview:
        written.append(np.empty(size, np.uint8))
        return written[0].data

    own.write(memory)
    return written[0]


@dataclass(frozen=True)
class ServerShare:
    """What one of several servers has of A.

    Args:
        servers: n; each has one slice.
        number: of this one.
        summed: returns the sums over all servers of numbers that each has of its slice.
    """

    servers: int = 1
    number: int = 0
    summed: Summed = list


ALONE = ServerShare()


class ServerExecutor:
    """Holds A and the undecided Δs of a run, or a slice of all of these, and executes its coordinator's decisions.

    Args:
        context: of the run.
        share: of this server.
        restore: whether A is that of the checkpoint with which the run goes on, if there is one.
        packed: what :meth:`packed` returned where that checkpoint was read; None: it is read here.
    """

    def __init__(
        self, context: RunContext, share: ServerShare, *, restore: bool = True, packed: Bytes | None = None
    ) -> None:
        self._context = context
        self.replicas = [ReplicaRecord(position.attempt) for position in context.positions]
        self.allocate = RecyclingAllocator().empty
        """Makes the vectors of A and of Δs."""
        resume = context.job.resume if restore else None
        self.version: Version = 0 if resume is None else resume.run.coordinator.version
        program, policy = context.job.program, context.policy
        _, state = first_state(program, context.job.running_buffers)
        self.start_digest = state.digest()
        """Of A_0."""
        self.slices = server_slices(context, state.layout, share.servers)
        """Of all servers."""
        self.part = self.slices[share.number]
        """Of this one."""
        if share.servers > 1:
            self.owner = ServerOptimizer(
                program,
                policy,
                self.part.of(state).clone(),
                part=self.part,
                summed=share.summed,
                one_replica=context.one_replica,
            )
        else:
            self.owner = ServerOptimizer(program, policy, state, one_replica=context.one_replica)
        """A and its optimizer; the vectors of an A are never written again."""
        self._vectors = len(state.vectors)
        self.statistics = DeltaStatistics(context.policy, self.owner)
        self.undecided: dict[tuple[ReplicaId, Clock], FlatState] = {}
        """Δs that were neither applied nor discarded."""
        if resume is not None:
            source = resume.checkpoint if packed is None else ChunksInMemory(OwnState.read(packed.data).parts)
            self.owner.go_on_with(resume.optimizer, source, options=resume.options)
            for name in resume.held if context.keeps_policy else []:
                self.undecided[name] = delta = self.owner.state.layout.new()
                source.read_into(self.owner.chunks_of(delta, delta_prefix(*name)))
        self.own: dict[ReplicaId, tuple[Clock, Bytes]] = {}
        """What replicas keep, and after which attempt; each array is written again no earlier than two grants later."""
        for replica, position in enumerate(context.positions if resume is not None and share.number == 0 else ()):
            if (kept := OwnState.saved_for(context, replica)) is not None:
                self.own[replica] = position.attempt, _encoded(kept)
        self._read: dict[ReplicaId, FlatState] = {}
        """A as each replica has read it last, where updates need it."""
        self.lent: dict[ReplicaId, Clock] = {}
        """Replicas whose Δ of this attempt is in memory that they write again once they have the next grant."""
        self.sent: tuple[Version, list[Bytes]] | None = None
        """The newest A that was sent, by its version: those who compute from one version have the same arrays."""
        self.replied: Callable[[ReplicaId], None] = lambda _: None
        """Called after a replica's record has another reply."""
        self.cancelled: Callable[[ReplicaId], None] = lambda _: None
        """Called when a replica's attempt is to stop."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before anything changes that a save may read."""
        self.spans = SpanLog(context.job.trace, SERVER)
        """Of the updates."""

    def packed(self) -> Bytes:
        """Return A, its optimizer's state and the Δs that the policy holds, as bytes."""
        return _encoded(OwnState(self.owner.state_json(), self._chunks()))

    def packed_slice(self, number: int) -> Bytes | None:
        """Return what another server has of the checkpoint with which the run goes on, if there is one."""
        if self._context.job.resume is None:
            return None
        return ServerExecutor(self._context, ServerShare(len(self.slices), number)).packed()

    def _chunks(self) -> list[TensorChunk]:
        held = (self.owner.chunks_of(delta, delta_prefix(*name)) for name, delta in self.undecided.items())
        return [*self.owner.chunks(), *(chunk for chunks in held for chunk in chunks)]

    def snapshot(self, attempts: Sequence[Clock], others: Sequence[Bytes] = ()) -> Snapshot:
        """Return A, its optimizer's state, the Δs that the policy holds, what replicas keep after these attempts.

        Args:
            attempts: the newest of each replica that is complete.
            others: what other servers have, :meth:`packed`.
        """
        parts = [OwnState.read(packed.data) for packed in others]
        chunks = [*self._chunks(), *(chunk for part in parts for chunk in part.parts)]
        optimizer = merged_json([self.owner.state_json(), *(part.saved for part in parts)])
        saved = dict[str, Any]()
        for replica, attempt in enumerate(attempts):
            if (kept := self.kept(replica, attempt)) is not None:
                own = OwnState.read(kept.data)
                chunks += own.chunks(replica)
                saved[str(replica)] = own.saved
        return Snapshot(chunks, optimizer, {KEY: saved}, settles=True)

    def take(self, replica: ReplicaId, attempt: Clock, arrays: Sequence[Bytes]) -> None:
        """Take a Δ, and what its replica keeps, where that follows; what it kept before is read no more."""
        self.undecided[replica, attempt] = self.delta_of(arrays)
        self.forget(replica)
        for own in arrays[self._vectors :]:
            self.own[replica] = attempt, own

    def delta_of(self, arrays: Sequence[Bytes]) -> FlatState:
        """Return the Δ that a replica has pushed."""
        return state_of(self.owner.state.layout, arrays[: self._vectors])

    def forget(self, replica: ReplicaId) -> None:
        """Forget what a replica kept, after a save that may read it."""
        if replica in self.own:
            self.before_change()
            del self.own[replica]

    def kept(self, replica: ReplicaId, attempt: Clock) -> Bytes | None:
        """Return what a replica keeps after an attempt, if it has told."""
        newest, own = self.own.get(replica, (attempt, None))
        return own if newest == attempt else None

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        record = self.replicas[replica]
        if replica in self.lent:
            self._take_back(replica, self.lent.pop(replica))
        record.attempt += 1
        if self.sent is None or self.sent[0] != self.version:
            self.sent = self.version, arrays_of(self.owner.state)
        if self._context.keeps_read:
            self._read[replica] = self.owner.state
        record.reply((ServerGrant(record.attempt, batches, self.version), self.sent[1]))
        self.replied(replica)

    def apply(self, action: Apply) -> None:
        self.before_change()
        began = time.monotonic_ns()
        deltas = [(self.undecided.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        destination = self.owner.state.layout.new(self.allocate)
        read = [self._read[a.replica] for a, _ in action.deltas] if self._context.keeps_read else []
        self.owner.apply(
            deltas,
            action.rate,
            alone=action.alone,
            out=destination,
            version=self.version,
            read=read,
            loss=self.owner.mean_loss(action),
        )
        self.version += 1
        ended = time.monotonic_ns()
        self.statistics.applied((ended - began) * 1e-9)
        self.spans.recorder.record("apply", self.version, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            del self.undecided[arrival.replica, arrival.clock]

    def cancel(self, replica: ReplicaId) -> None:
        self.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        self.replicas[replica].reply(END)
        self.replied(replica)

    def _take_back(self, replica: ReplicaId, attempt: Clock) -> None:
        """Read no more of a Δ in a replica's memory: copy it if it is undecided, after a save that may read it."""
        self.before_change()
        delta = self.undecided.get((replica, attempt))
        if delta is not None:
            self.undecided[replica, attempt] = delta.layout.new(self.allocate).copy_(delta)
