"""Holds A, and executes the log of decisions in the run's shared memory."""

import time
from collections.abc import Callable

from paceline.aggregation import text_of
from paceline.aggregation.base import Apply, Arrival
from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId, Version
from paceline.engine.local.board import END, GO, Board, Order, Report
from paceline.engine.observe import Observer
from paceline.engine.owner import Owner
from paceline.engine.setup import Setup
from paceline.replica.state import State
from paceline.trace.recorder import AnyRecorder


class Server:
    """The hands of the coordinator.

    Args:
        setup: of the run.
        board: its shared memory, with A_0 in it.
        ring: wakes a worker.
        about_to_send: called before a replica is sent A for an attempt.
        recorder: of updates.
    """

    def __init__(
        self,
        setup: Setup,
        board: Board,
        ring: Callable[[ReplicaId], None],
        about_to_send: Callable[[ReplicaId, Clock], None],
        recorder: AnyRecorder,
    ) -> None:
        self._setup, self._board, self._recorder = setup, board, recorder
        self._slots = setup.slots
        self._ring, self._about_to_send = ring, about_to_send
        self.state: State = board.state
        self.version: Version = 0
        self._owner = Owner(setup.job.program, setup.policy, self.state) if self._slots else None
        self.observer = Observer(setup.policy, self._owner)
        replicas, slots = range(setup.replicas), range(self._slots)
        self._reads = [board.read_slot(r) for r in replicas] if slots else []
        self._deltas = [[board.delta_slot(r, s) for s in slots] for r in replicas]
        self._posts = [_Post(self._slots) for _ in replicas]
        self._held: dict[tuple[ReplicaId, Clock], int] = {}

    # ------------------------------------------------------------------------------------------ what workers have told

    def untaken(self) -> list[tuple[ReplicaId, Report]]:
        """The reports that lie on the board."""
        told, report = self._board.told, self._board.report
        return [(r, report(r)) for r, post in enumerate(self._posts) if told(r) > post.heard]

    def take(self, replica: ReplicaId, report: Report) -> None:
        """Look at a report no more; the slot it names is free again."""
        self._posts[replica].heard = report.attempt
        if self._slots:
            self._posts[replica].slots.append(report.slot)

    def keep(self, replica: ReplicaId, report: Report) -> State | None:
        """Take a report and hold its Δ until it is applied or discarded; None where Δs have no slots."""
        self._posts[replica].heard = report.attempt
        if not self._slots:
            return None
        self._held[replica, report.attempt] = report.slot
        return self._deltas[replica][report.slot]

    def attempt(self, replica: ReplicaId) -> Clock:
        """The newest step that a replica was sent A for."""
        return self._posts[replica].attempt

    # ----------------------------------------------------------------------------------------------- hands: in the log

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        post = self._posts[replica]
        post.attempt += 1
        slot = 0
        if self._reads:
            self._reads[replica].copy_(self.state)
            slot = self._free_slot(replica)
        self._about_to_send(replica, post.attempt)
        self._board.give(replica, Order(GO, post.attempt, micro_steps, self.version, slot))
        self._ring(replica)

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        if self._owner is not None:
            self._owner.apply(
                [(self._delta(a), weight) for a, weight in action.deltas], action.rate, alone=action.alone
            )
        ended = time.monotonic_ns()
        self.version += 1
        self.observer.applied((ended - began) * 1e-9)
        self._recorder.record("apply", self.version, began, ended)
        self.discard(tuple(a for a, _ in action.deltas))

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for a in arrivals if self._slots else ():
            self._posts[a.replica].slots.append(self._held.pop((a.replica, a.clock)))

    def cancel(self, replica: ReplicaId) -> None:
        self._board.cancel(replica, self._posts[replica].attempt)
        self._ring(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        self._board.give(replica, Order(END, self._posts[replica].attempt + 1, 0, self.version, 0))
        self._ring(replica)

    def _delta(self, arrival: Arrival) -> State:
        return self._deltas[arrival.replica][self._held[arrival.replica, arrival.clock]]

    def _free_slot(self, replica: ReplicaId) -> int:
        slots = self._posts[replica].slots
        if not slots:
            raise PacelineError(
                f"{text_of(self._setup.policy)} lets replica {replica} go on with all {self._slots} of its Δ "
                "slots held; its slots() must say how many Δs of one replica, the one under way included, there can be "
                "at once"
            )
        return slots.pop()


class _Post:
    """What is remembered of one worker: its newest attempt, the newest that was taken, its free Δ slots."""

    def __init__(self, slots: int) -> None:
        self.attempt = self.heard = 0
        self.slots = list(range(slots))
