"""One run on this host: the coordinator and the owner of A in the main process, a process for each replica.

::

    main     wait on bells ... report of replica 1: decide, apply, copy A into read slot 1, ring its bell ... wait
    worker   wait on bell .... pull, compute, write Δ slot, report, ring main's bell ........................ wait
"""

import math
import os
import time
from dataclasses import replace
from statistics import median

from paceline.aggregation.base import Apply, Arrival
from paceline.comm.kernel import memfd_create
from paceline.comm.nursery import Nursery
from paceline.comm.shipping import Parcel, ship
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.records import Departure, WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.chronicle import Chronicle
from paceline.engine.coordinator import Coordinator
from paceline.engine.interrupt import Interruptible
from paceline.engine.local.board import ARRIVED, END, GO, Board, Order
from paceline.engine.local.crew import Crew
from paceline.engine.local.desk import Desk
from paceline.engine.local.roster import Roster
from paceline.engine.local.worker import threads
from paceline.engine.nonfinite import refuse_nonfinite
from paceline.engine.observe import Observer
from paceline.engine.owner import Owner
from paceline.engine.setup import Setup, first_state
from paceline.replica.base import Measured
from paceline.replica.state import State, write
from paceline.trace.recorder import NullRecorder, Recorder, read_packed
from paceline.trace.spans import SERVER, Span

TICK_S: Seconds = 0.2
"""How often the live display is told."""


class LocalRun:
    """One run; the hands of its coordinator. Close it, however it ended."""

    def __init__(self, job: Job, nursery: Nursery, watch: Watcher) -> None:
        self._job, self._watch = job, watch
        self._setup = setup = Setup.of(job)
        self._module, state = first_state(job.program, job.running_buffers)
        self._board = Board(state.layout, setup.replicas, setup.slots)
        self._A = self._board.state.copy_(state)
        self._owner = Owner(job.program, setup.policy, self._A) if setup.slots else None
        self._observer = Observer(setup.policy, self._owner)
        self._coordinator = Coordinator(setup.policy, setup.replicas, setup.allowance(), self)
        self._chronicle = Chronicle(setup, self._coordinator, state.digest())
        self._posts = [_Post(setup.slots) for _ in range(setup.replicas)]
        self._reads = [self._board.read_slot(r) for r in range(setup.replicas)] if setup.slots else []
        self._deltas = [[self._board.delta_slot(r, s) for s in range(setup.slots)] for r in range(setup.replicas)]
        self._held: dict[tuple[ReplicaId, int], int] = {}
        self._left: list[Departure] = []
        self._sink = memfd_create("paceline:spans") if job.trace else -1
        self._recorder = Recorder(SERVER, 0, 0, self._sink) if job.trace else NullRecorder()
        self._began: Nanoseconds = 0
        self._ended = False
        self._told_s: Seconds = -1.0
        self._heard_s: Seconds = 0.0
        self._parcel: Parcel = ship(job)
        self._crew = Crew(nursery, setup.replicas, self._board.segment.fd, self._parcel, trace=job.trace)
        self._desk: Desk | None = None
        self._roster: Roster | None = None
        self._nursery = nursery

    # ------------------------------------------------------------------------------------------------------ the whole

    def outcome(self) -> Outcome:
        """Run to the end."""
        with Interruptible(self._crew.bell.ring) as ctrl_c:
            self._start()
            seconds = self._train(ctrl_c)
            self._dismiss_all()
            self._coordinator.finish()
            self._final_moment(seconds)
            self._wait_gone()
            self._score_rest(seconds, ctrl_c)
        return self._result(seconds, interrupted=ctrl_c.noted)

    def close(self) -> None:
        """Leave nothing behind: no process, no memory, no file."""
        self._crew.close()
        if self._desk is not None:
            self._desk.close()
        if self._roster is not None:
            self._roster.close()
        self._parcel.close()
        self._board.segment.close()
        if self._sink >= 0:
            os.close(self._sink)

    def _start(self) -> None:
        self._watch(Progress("starting", 0.0))
        self._crew.start()
        self._desk = Desk(self._job, self._nursery, self._parcel, patient=self._job.budget.until is None)
        self._crew.waiter.add(self._desk.fileno(), ("scored", 0))
        self._roster = Roster(self._job.out, self._crew.pids(), self._desk.child.pid)
        replicas = self._setup.replicas
        self._crew.wait_ready(self._job.timeout_s, lambda n: self._watch(Progress("starting", n / replicas)))

    def _train(self, ctrl_c: Interruptible) -> Seconds:
        """Until the budget is spent, the condition met, or Ctrl-C noted; returns the training time."""
        budget = self._job.budget
        end = budget.amount if budget.unit == "seconds" and budget.amount is not None else math.inf
        self._chronicle.point_reached(0.0)
        self._hand_in(0.0)
        self._began = time.monotonic_ns()
        self._coordinator.begin()
        while not self._coordinator.idle and not self._ended and not ctrl_c.noted:
            now = self._now()
            if now >= end:
                return end
            self._look(now, end)
            due = self._chronicle.points.next if budget.unit == "seconds" else math.inf
            self._hear(self._crew.waiter.wait(max(0.0, min(due, end, now + TICK_S) - now)))
            self._miss_nobody()
        if not self._ended and not ctrl_c.noted and self._left and len(self._left) == self._setup.replicas:
            raise WorkerError(f"every replica died: {'; '.join(f'{d.replica} {d.reason}' for d in self._left)}")
        return min(self._now(), end)

    def _look(self, now: Seconds, end: Seconds) -> None:
        """Take the snapshot that is due, and tell the display how things stand."""
        if self._chronicle.points.next < end * (1 - 1e-9) and self._chronicle.point_reached(now):
            self._hand_in(now)
        if now - self._told_s >= TICK_S:
            self._told_s = now
            self._watch(self._chronicle.progress("training", now))

    # ----------------------------------------------------------------------------------------- what workers tell main

    def _hear(self, tokens: list[tuple[str, int]]) -> None:
        """Reports first: what a worker has sent before it died is good."""
        what = {kind for kind, _ in tokens}
        if "message" in what:
            self._crew.hear()
        if "report" in what:
            self._crew.bell.clear()
        if tokens:
            self._take_reports()
        for kind, replica in tokens:
            if kind == "ended":
                self._lost(replica)
        if "scored" in what:
            self._collect()

    def _take_reports(self) -> None:
        told = [(self._board.report(r), r) for r, post in enumerate(self._posts) if self._board.told(r) > post.heard]
        for report, replica in sorted(told, key=lambda pair: pair[0].at_ns):
            post = self._posts[replica]
            post.heard = report.attempt
            self._heard_s = self._now()
            if replica not in self._coordinator.present:
                continue
            if report.ending == ARRIVED and not self._coordinator.voids(replica):
                self._arrived(replica, report.attempt)
            else:
                post.slots.append(report.slot)
                self._coordinator.cancelled(replica)

    def _arrived(self, replica: ReplicaId, attempt: int) -> None:
        report = self._board.report(replica)
        measured = Measured(report.loss, report.samples, report.finite)
        if self._job.on_nonfinite == "stop":
            refuse_nonfinite(measured, replica, attempt)
        self._chronicle.heard(measured)
        delta = None
        if self._setup.slots:
            self._held[replica, attempt] = report.slot
            delta = self._deltas[replica][report.slot]
        now = self._now()
        arrival = Arrival(
            replica=replica,
            version=report.version,
            clock=attempt,
            samples=report.samples,
            time_s=now,
            finite=report.finite,
            loss=report.loss if report.samples else None,
            observed=self._observer.observe(delta, now),
        )
        self._coordinator.arrived(arrival)

    def _lost(self, replica: ReplicaId) -> None:
        """A worker has ended before it was told to."""
        self._crew.hear()  # why, if it could say
        self._crew.forget(replica)
        how = self._crew.how_ended(replica)
        if how == "exit code 0":
            self._coordinator.left(replica, "done")
        elif replica in self._coordinator.present:
            self._left.append(Departure(replica, how, self._now()))
            self._coordinator.left(replica, "died")

    def _miss_nobody(self) -> None:
        """A hang is a failure: somebody must report within the time that is allowed."""
        silent = self._now() - self._heard_s
        if silent > self._job.timeout_s and not self._coordinator.idle:
            at_work = self._coordinator.computing
            raise WaitTimeoutError(
                f"main waited {self._job.timeout_s:g} s for replicas {sorted(at_work)}, none of which reported "
                f"({', '.join(f'replica {r} is at its step {self._posts[r].attempt}' for r in sorted(at_work))}); "
                "write a larger timeout_s= if a step takes so long"
            )

    # ------------------------------------------------------------------------------------ hands: what main tells them

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        post = self._posts[replica]
        post.attempt += 1
        if self._reads:
            self._reads[replica].copy_(self._A)
            post.slot = self._free_slot(replica)
        self._board.give(replica, Order(GO, post.attempt, micro_steps, self._coordinator.version, post.slot))
        self._crew.ring(replica)

    def _free_slot(self, replica: ReplicaId) -> int:
        slots = self._posts[replica].slots
        if not slots:
            raise PacelineError(
                f"{self._setup.policy} lets replica {replica} go on with all {self._setup.slots} of its Δ slots held; "
                "its slots() must say how many Δs of one replica, the one under way included, there can be at once"
            )
        return slots.pop()

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        if self._owner is not None:
            deltas = [(self._delta(a), weight) for a, weight in action.deltas]
            self._owner.apply(deltas, action.rate)
        ended = time.monotonic_ns()
        self._observer.applied((ended - began) * 1e-9)
        self._recorder.record("apply", self._coordinator.version + 1, began, ended)
        self.discard(tuple(a for a, _ in action.deltas))

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            self._free(arrival.replica, arrival.clock)

    def cancel(self, replica: ReplicaId) -> None:
        self._board.cancel(replica, self._posts[replica].attempt)
        self._crew.ring(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        self._board.give(replica, Order(END, self._posts[replica].attempt + 1, 0, self._coordinator.version, 0))
        self._crew.ring(replica)

    def _delta(self, arrival: Arrival) -> State:
        return self._deltas[arrival.replica][self._held[arrival.replica, arrival.clock]]

    def _free(self, replica: ReplicaId, attempt: int) -> None:
        if self._setup.slots:
            self._posts[replica].slots.append(self._held.pop((replica, attempt)))

    # -------------------------------------------------------------------------------------------------------- scoring

    def _hand_in(self, now: Seconds) -> None:
        assert self._desk is not None
        self._desk.hand_in(self._A, self._chronicle.moment(now))

    def _collect(self) -> None:
        assert self._desk is not None
        for record in self._desk.collect():
            if self._chronicle.record(record):
                self._ended = True
        if not self._desk.alive:
            self._crew.waiter.remove(self._desk.fileno())

    def _final_moment(self, seconds: Seconds) -> None:
        if self._job.budget.unit == "seconds" or self._chronicle.moved_on:
            self._hand_in(seconds)

    def _score_rest(self, seconds: Seconds, ctrl_c: Interruptible) -> None:
        """Wait for the records that are still to come; a scorer that is gone is replaced by main."""
        assert self._desk is not None
        del ctrl_c
        while self._desk.waiting and self._desk.alive:
            self._watch(replace(self._chronicle.progress("scoring", seconds), fraction=None))
            if ("scored", 0) in self._crew.waiter.wait(TICK_S):
                self._collect()
        for record in self._desk.score_rest() if self._desk.waiting else ():
            self._chronicle.record(record)

    # -------------------------------------------------------------------------------------------------------- the end

    def _dismiss_all(self) -> None:
        for replica in range(self._setup.replicas):
            self.dismiss(replica)

    def _wait_gone(self) -> None:
        """Let the workers end by themselves; one that does not is killed and named."""
        late = self._crew.wait_gone(self._job.timeout_s)
        self._crew.hear()
        for replica in late:
            self._left.append(Departure(replica, f"did not end within {self._job.timeout_s:g} s; killed", self._now()))
            self._crew.kill(replica)

    def _result(self, seconds: Seconds, *, interrupted: bool) -> Outcome:
        notes: dict[str, str | int | float] = {"threads_per_worker": threads(self._job)}
        account = self._chronicle.account(seconds, self._figures(), self._left, notes, interrupted=interrupted)
        model = write(self._module, self._A)
        history = sorted(self._chronicle.history, key=lambda record: record.time_s)
        return Outcome(model.state_dict(), model, history, account, self._spans())

    def _figures(self) -> list[WorkerFigures]:
        layout = self._A.layout
        rows = []
        for replica in range(self._setup.replicas):
            seen, times = self._board.figures(replica), self._board.step_times(replica)
            rows.append(
                WorkerFigures(
                    replica=replica,
                    stage=0,
                    shard=0,
                    steps=seen.steps,
                    busy_s=seen.busy_ns * 1e-9,
                    step_time_s=median(times) if times else None,
                    payload_bytes=seen.payload_bytes,
                    peak_memory_bytes=seen.peak_memory_bytes or None,
                    parameter_bytes=layout.parameter_bytes,
                )
            )
        return rows

    def _spans(self) -> list[Span]:
        if not self._job.trace:
            return []
        self._recorder.close()
        spans = [*self._crew.spans(), *read_packed(self._sink)]
        began = self._began
        shifted = (replace(s, start_ns=s.start_ns - began, end_ns=s.end_ns - began) for s in spans)
        return sorted((s for s in shifted if s.end_ns > 0), key=lambda s: (s.start_ns, s.replica))

    def _now(self) -> Seconds:
        return (time.monotonic_ns() - self._began) * 1e-9


class _Post:
    """What main remembers of one worker."""

    def __init__(self, slots: int) -> None:
        self.attempt = self.heard = self.slot = 0
        self.slots = list(range(slots))
