"""Holds A, and executes the log of decisions in the run's shared memory."""

import os
import time
from collections.abc import Callable

from paceline.aggregation import text_of
from paceline.aggregation.base import Apply, Arrival
from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId, Version
from paceline.engine.local.arena import ParameterArena, VersionPool
from paceline.engine.local.control_block import BEING_WRITTEN, END, GO, Completion, ControlBlock, Grant
from paceline.engine.local.parallel_update import ParallelUpdate
from paceline.engine.local.worker_processes import WorkerProcesses
from paceline.engine.run_context import RunContext
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer, Weighted
from paceline.replica.base import MicroStepNorms
from paceline.replica.flat_state import FlatState
from paceline.replica.noise_estimator import NoiseEstimator, Seen
from paceline.trace.recorder import AnyRecorder


class SharedMemoryServer:
    """The hands of the coordinator.

    Args:
        setup: of the run.
        store: its vectors.
        board: its words.
        owner: of A; None where replicas write it in place.
        workers: the workers.
        waiting: which replicas wait for A.
        ahead: how many attempts a replica may make that nobody has been told of.
        about_to_send: called before a replica is sent A for an attempt.
        recorder: of updates.
        meter: looks at Δs as they are applied; None: nobody has asked.
    """

    def __init__(
        self,
        setup: RunContext,
        store: ParameterArena,
        board: ControlBlock,
        owner: ServerOptimizer | None,
        workers: WorkerProcesses,
        waiting: Callable[[], list[ReplicaId]],
        ahead: Callable[[ReplicaId], int],
        about_to_send: Callable[[ReplicaId, Clock], None],
        recorder: AnyRecorder,
        meter: NoiseEstimator | None = None,
    ) -> None:
        self._policy, self._store, self._board, self._recorder = setup.policy, store, board, recorder
        self._slots = store.plan.slots
        self._workers, self._waiting, self._ahead, self._about_to_send = workers, waiting, ahead, about_to_send
        self._owner, self._meter = owner, meter
        cores = len(os.sched_getaffinity(0))
        self._rounds = ParallelUpdate(store, board, workers, owner, cores) if owner is not None else None
        self.observer = DeltaStatistics(setup.policy, owner)
        self._timed = setup.job.trace or bool(setup.policy.needs)
        self.version: Version = 0
        self._places = VersionPool(store)
        self._attempts = [0] * setup.replicas
        self._heard = [0] * setup.replicas
        self._seen = list(self._heard)
        self._free = [list(reversed(range(self._slots))) for _ in range(setup.replicas)]
        self._held: dict[tuple[ReplicaId, Clock], int] = {}
        self._micro: dict[tuple[ReplicaId, Clock], MicroStepNorms] = {}

    @property
    def state(self) -> FlatState:
        """A."""
        return self._store.version(self._places.current)

    @property
    def optimizer_bytes(self) -> int:
        """Of what the optimizer that moves A remembers: once for all replicas."""
        return 0 if self._owner is None else self._owner.stepper.nbytes

    # ------------------------------------------------------------------------------------------ what workers have told

    def has_news(self) -> bool:
        """Whether there are reports that have not been looked at."""
        return self._board.completed() != self._seen

    def pending(self) -> list[tuple[ReplicaId, Completion]]:
        """The reports that lie on the board."""
        self._seen = told = self._board.completed()
        if told == self._heard:
            return []
        ends = enumerate(zip(self._heard, told, strict=True))
        return [(r, self._board.completion(r, a)) for r, (old, new) in ends for a in range(old + 1, new + 1)]

    def release(self, replica: ReplicaId, report: Completion) -> None:
        """Look at a report no more; the slot it names is free again."""
        self._look_at(replica, report)
        if self._slots:
            self._free[replica].append(report.slot)

    def hold_delta(self, replica: ReplicaId, report: Completion) -> FlatState | None:
        """Take a report and hold its Δ until it is applied or discarded; None where Δs have no slots."""
        self._look_at(replica, report)
        if not self._slots:
            return None
        self._held[replica, report.attempt] = report.slot
        if self._meter is not None and report.pieces:
            self._micro[replica, report.attempt] = MicroStepNorms(report.square, report.pieces)
        return self._store.delta(replica, report.slot)

    def lost(self, replica: ReplicaId) -> None:
        """A replica computes no more."""
        self._places.release(replica)

    def attempt(self, replica: ReplicaId) -> Clock:
        """The newest step that a replica was sent A for."""
        return self._attempts[replica]

    def _look_at(self, replica: ReplicaId, report: Completion) -> None:
        self._heard[replica] = report.attempt
        self._places.release(replica)

    # ----------------------------------------------------------------------------------------------- hands: in the log

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        self._attempts[replica] = attempt = self._attempts[replica] + 1
        slot = self._free_slot(replica) if self._slots else 0
        place, ahead = self._places.acquire(replica), self._ahead(replica)
        self._about_to_send(replica, attempt)
        self._board.write_grant(
            replica, Grant(attempt, GO, micro_steps, self.version, place, slot, ahead, time.monotonic_ns())
        )
        self._workers.notify(replica)

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns() if self._timed else 0
        if self._owner is not None:
            self._update(self._owner, action)
        self.version += 1
        if self._timed:
            ended = time.monotonic_ns()
            self.observer.applied((ended - began) * 1e-9)
            self._recorder.record("apply", self.version, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for a in arrivals if self._slots else ():
            self._free[a.replica].append(self._held.pop((a.replica, a.clock)))
            self._micro.pop((a.replica, a.clock), None)

    def cancel(self, replica: ReplicaId) -> None:
        self._board.cancel(replica, self._attempts[replica])
        self._workers.notify(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        self._board.write_grant(
            replica, Grant(self._attempts[replica], END, 0, self.version, 0, 0, 0, time.monotonic_ns())
        )
        self._workers.notify(replica)

    def _update(self, owner: ServerOptimizer, action: Apply) -> None:
        """Write the next A where nobody reads."""
        names = [(a.replica, self._held.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        deltas = [(self._store.delta(replica, slot), weight) for replica, slot, weight in names]
        here, there, rounds = self._places.current, self._places.free(), self._rounds
        self._board.set_version(there, BEING_WRITTEN)
        if rounds is not None and rounds.worth(len(deltas)) and len(waiting := self._waiting()) > 1:
            rounds.apply(deltas, names, action.rate, (here, there), waiting)
        elif self._meter is None:
            owner.apply(deltas, action.rate, alone=action.alone, out=self._store.version(there))
        else:
            seen = self._meter.through(self._seen_of(action, deltas), len(deltas))
            owner.apply(seen, action.rate, alone=action.alone, out=self._store.version(there))
            self._meter.updated()
        self._board.set_version(there, self.version + 1)
        self._places.commit_write(there)
        for replica, slot, _ in names:
            self._free[replica].append(slot)

    def _seen_of(self, action: Apply, deltas: Weighted) -> list[Seen]:
        """What is known of the Δs of an update."""
        return [
            Seen(delta, weight, a.samples, a.version, self._micro.pop((a.replica, a.clock), None))
            for (a, _), (delta, weight) in zip(action.deltas, deltas, strict=True)
        ]

    def _free_slot(self, replica: ReplicaId) -> int:
        slots = self._free[replica]
        if not slots:
            raise PacelineError(
                f"{text_of(self._policy)} lets replica {replica} go on with all {self._slots} of its Δ slots held; "
                "its slots() must say how many Δs of one replica, the one under way included, there can be at once"
            )
        slot = slots.pop()
        if slot:
            self._store.commit(f"delta {replica} {slot}")
        return slot
