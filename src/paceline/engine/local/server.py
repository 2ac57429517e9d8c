"""Holds A, and executes the log of decisions in the run's shared memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.aggregation import text_of
from paceline.aggregation.base import Apply, Arrival
from paceline.checkpoint.base import TensorChunk
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId, Version
from paceline.device import synchronize
from paceline.engine.local.arena import ParameterArena, VersionPool
from paceline.engine.local.control_block import BEING_WRITTEN, END, GO, Completion, Grant
from paceline.engine.local.parallel_update import ParallelUpdate
from paceline.engine.local.worker_processes import WorkerProcesses
from paceline.engine.run_context import RunContext
from paceline.engine.run_state import ResumePoint, delta_chunks
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.replica.base import MicroStepNorms
from paceline.replica.flat_state import FlatState
from paceline.replica.noise_estimator import NoiseEstimator, ObservedDelta
from paceline.trace.recorder import AnyRecorder


@dataclass(frozen=True)
class ServerContext:
    """The parts of a run that its server works with."""

    run: RunContext
    arena: ParameterArena
    owner: ServerOptimizer | None
    """A and its optimizer; None: replicas write A in place."""
    workers: WorkerProcesses
    recorder: AnyRecorder
    """Of updates."""
    estimator: NoiseEstimator | None
    """Measures Δs as they are applied; None: the gradient noise scale is not measured."""
    idle: Callable[[], list[ReplicaId]]
    """Returns the replicas that wait for a grant."""
    lead: Callable[[ReplicaId], int]
    """Returns how many attempts a replica may make before main reads their completions."""
    before_grant: Callable[[ReplicaId, Clock], None]
    """Called before a replica is granted an attempt."""
    before_change: Callable[[], None]
    """Called before A, its optimizer or a Δ that the policy holds changes."""


class SharedMemoryServer:
    """The parameter server: reads completions and executes the coordinator's decisions.

    Args:
        context: of its run.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context, self._arena, self._control = context, context.arena, context.arena.control
        self._workers, policy, replicas = context.workers, context.run.policy, context.run.replicas
        self._slots = context.arena.layout.slots
        owner = context.owner
        self._parallel = None if owner is None else ParallelUpdate(context.arena, context.workers, owner)
        self.statistics = DeltaStatistics(policy, owner)
        self._timed = context.run.job.trace or bool(policy.needs)
        resume = context.run.job.resume
        self.version: Version = 0 if resume is None else resume.run.coordinator.version
        self.versions = VersionPool(context.arena)
        """See :meth:`reads_no_more` for a replica whose worker has exited."""
        self.attempts = [position.attempt for position in context.run.positions]
        """The newest attempt that each replica was granted."""
        self._control.begin_at(self.attempts, self.version)
        self._control.versions[self.versions.current] = self.version
        self._read = list(self.attempts)
        """The newest attempt of each replica whose completion was read."""
        self._seen = list(self._read)
        """The newest that was there when main last looked."""
        self._free_slots = [list(reversed(range(self._slots))) for _ in range(replicas)]
        self._undecided: dict[tuple[ReplicaId, Clock], tuple[int, MicroStepNorms | None]] = {}
        """Slot and micro-step norms of each Δ that was neither applied nor discarded."""
        if resume is not None and context.run.keeps_policy:
            self._restore_held(resume)

    @property
    def state(self) -> FlatState:
        """A."""
        return self._arena.version(self.versions.current)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def held_chunks(self) -> list[TensorChunk]:
        """Return the Δs that the policy holds."""
        held = [(name, self._arena.delta(name[0], slot)) for name, (slot, _) in self._undecided.items()]
        return [chunk for (replica, clock), delta in held for chunk in delta_chunks(delta, replica, clock)]

    def _restore_held(self, resume: ResumePoint) -> None:
        """Read the Δs that the policy held into slots of their replicas."""
        for replica, clock in resume.held:
            slot = self._free_slots[replica].pop()
            self._arena.commit(f"delta {replica} {slot}")
            resume.checkpoint.read_into(delta_chunks(self._arena.delta(replica, slot), replica, clock))
            self._undecided[replica, clock] = slot, None

    def rejoin(self, replica: ReplicaId) -> None:
        """Let the next worker of a replica begin after all attempts under its number, complete or not."""
        attempt = self._read[replica] = self._seen[replica] = self.attempts[replica]
        self._control.completed[replica] = attempt
        self._control.write_grant(replica, Grant(attempt, 0, 0, self.version, 0, 0, 0, 0, 0, 0))
        held = {slot for (each, _), (slot, _) in self._undecided.items() if each == replica}
        self._free_slots[replica] = [slot for slot in reversed(range(self._slots)) if slot not in held]

    def reads_no_more(self, replica: ReplicaId) -> None:
        """Release the version that a replica whose worker has exited reads, unless an update needs it for its Δ."""
        if not (self._context.run.keeps_read and any(each == replica for each, _ in self._undecided)):
            self.versions.release(replica)

    # ----------------------------------------------------------------------------------------------------- completions

    def has_news(self) -> bool:
        """Return whether there are completions that were not there when main last looked."""
        return self._control.completed.tolist() != self._seen

    def pending(self) -> list[tuple[ReplicaId, Completion]]:
        """Return the completions that were not read."""
        self._seen = completed = self._control.completed.tolist()
        if completed == self._read:
            return []
        ranges = enumerate(zip(self._read, completed, strict=True))
        return [(r, self._control.completion(r, a)) for r, (old, new) in ranges for a in range(old + 1, new + 1)]

    def unread(self, replica: ReplicaId) -> bool:
        """Return whether a replica has completions that were not read."""
        return self._control.completed[replica] != self._read[replica]

    def read(self, replica: ReplicaId, completion: Completion, *, keep: bool) -> FlatState | None:
        """Count a completion as read; keep its Δ until it is applied or discarded, or free its slot at once.

        Returns:
            The Δ that is kept; None where Δs have no slots.
        """
        self._read[replica] = completion.attempt
        if not (keep and self._context.run.keeps_read):
            self.versions.release(replica)  # it reads no A until its next grant
        if not self._slots:
            return None
        if not keep:
            self._free_slots[replica].append(completion.slot)
            return None
        measured = self._context.estimator is not None and completion.pieces
        micro = MicroStepNorms(completion.square, completion.pieces) if measured else None
        self._undecided[replica, completion.attempt] = completion.slot, micro
        return self._arena.delta(replica, completion.slot)

    # ------------------------------------------------------------------------------------------------------- decisions

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        self.attempts[replica] = attempt = self.attempts[replica] + 1
        slot = 0
        if self._slots:
            if not self._free_slots[replica]:
                raise PacelineError(
                    f"{text_of(self._context.run.policy)} lets replica {replica} go on with all {self._slots} of its "
                    "Δ slots held; its slots() must say how many Δs of one replica, the one under way included, there "
                    "can be at once"
                )
            slot = self._free_slots[replica].pop()
            if slot:
                self._arena.commit(f"delta {replica} {slot}")
        buffer, lead = self.versions.acquire(replica), self._context.lead(replica)
        self._context.before_grant(replica, attempt)
        stream, first, count = batches
        grant = Grant(attempt, GO, count, self.version, buffer, slot, lead, time.monotonic_ns(), stream, first)
        self._control.write_grant(replica, grant)
        self._workers.wakeups[replica].notify()

    def apply(self, action: Apply) -> None:
        self._context.before_change()
        began = time.monotonic_ns() if self._timed else 0
        if self._context.owner is not None:
            self._update(self._context.owner, action)
        self.version += 1
        if self._timed:
            ended = time.monotonic_ns()
            self.statistics.applied((ended - began) * 1e-9)
            self._context.recorder.record("apply", self.version, began, ended)

    def finish(self) -> bool:
        """End training; return whether A has changed."""
        owner = self._context.owner
        if owner is None or not owner.finish(lambda: self._arena.version(self.versions.free())):
            return False
        self.versions.commit_write(self.versions.free())
        return True

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        self._context.before_change()
        for a in arrivals if self._slots else ():
            slot, _ = self._undecided.pop((a.replica, a.clock))
            self._free_slots[a.replica].append(slot)
            if self._context.run.keeps_read:
                self.versions.release(a.replica)

    def cancel(self, replica: ReplicaId) -> None:
        self._control.cancelled[replica] = self.attempts[replica]
        self._workers.wakeups[replica].notify()

    def dismiss(self, replica: ReplicaId) -> None:
        end = Grant(self.attempts[replica], END, 0, self.version, 0, 0, 0, time.monotonic_ns(), 0, 0)
        self._control.write_grant(replica, end)
        self._workers.wakeups[replica].notify()

    def _update(self, owner: ServerOptimizer, action: Apply) -> None:
        """Write the next A into a buffer without readers."""
        held = [(a, *self._undecided.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        deltas = [(self._arena.delta(a.replica, slot), weight) for a, slot, _, weight in held]
        destination, estimator = self.versions.free(), self._context.estimator
        out, loss = self._arena.version(destination), owner.mean_loss(action)
        # A worker that reads the buffer meanwhile, by a defect, finds another version than it was granted.
        self._control.versions[destination] = BEING_WRITTEN
        idle = self._context.idle() if self._parallel is not None and self._parallel.worth(len(deltas)) else []
        if self._parallel is not None and len(idle) > 1:
            slots = [(a.replica, slot, weight) for a, slot, _, weight in held]
            self._parallel.apply(slots, action.rate, (self.versions.current, destination), idle)
        elif estimator is None:
            keeps_read = self._context.run.keeps_read
            read = [self._arena.version(self.versions.read_by(a.replica)) for a, *_ in held] if keeps_read else []
            owner.apply(deltas, action.rate, alone=action.alone, out=out, version=self.version, read=read, loss=loss)
        else:
            pairs = zip(held, deltas, strict=True)
            seen = [
                ObservedDelta(delta, weight, a.samples, a.version, micro) for (a, _, micro, _), (delta, weight) in pairs
            ]
            observed = estimator.through(seen, len(deltas))
            owner.apply(observed, action.rate, alone=action.alone, out=out, loss=loss)
            estimator.updated()
        synchronize(self._arena.layout.device)  # replicas read it, and overwrite the Δs, without asking the device
        self._control.versions[destination] = self.version + 1
        self.versions.commit_write(destination)
        for a, slot, _, _ in held:
            self._free_slots[a.replica].append(slot)
            if self._context.run.keeps_read:
                self.versions.release(a.replica)
