"""One run on this host: the coordinator and the owner of A in the main process, a process for each replica.

::

    main     wait ... report of replica 1: decide, write the next A, name its place in an order ... wait
    worker   wait ... read A where it lies, compute, write Δ slot, report ......................... wait

Main goes through four phases: start, train, leave, score. The first Ctrl-C ends the first two, or the last where it
comes then; a second one ends all waiting.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace

from paceline.aggregation.base import Arrival
from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import memfd_create
from paceline.comm.shared_pickle import SharedObject, share
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.records import Record, ReplicaExit, WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.control_block import ARRIVED, REPORTS, Completion
from paceline.engine.local.evaluation import EvaluationQueue
from paceline.engine.local.fault_injection import EventScript, FaultInjector
from paceline.engine.local.server import SharedMemoryServer
from paceline.engine.local.worker import metrics_block, open_arena
from paceline.engine.local.worker_processes import ENTRY, WorkerProcesses
from paceline.engine.noise_scale import NoiseAccumulator, NoiseEstimator
from paceline.engine.process_supervisor import EXIT_OK, Event
from paceline.engine.remote_errors import not_finite
from paceline.engine.run_context import RunContext, first_state, threads
from paceline.engine.run_history import RunHistory
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.sigint import Interruptible
from paceline.engine.spmd.rank_context import PREPARATION_S
from paceline.engine.worker_metrics import timeline, told
from paceline.engine.workers_file import WorkersFile
from paceline.replica.flat_state import write
from paceline.trace.recorder import NullRecorder, Recorder, read_packed
from paceline.trace.spans import SERVER, Span

TICK_S: Seconds = 0.2
"""How often the live display is told."""

GLANCE_S: Seconds = 0.01
"""How often main looks for what is no report, a worker's end for instance, while reports keep coming."""


class LocalRun:
    """One run.

    Args:
        job: what is run.
        fork_server: makes its processes.
        watch: told how it stands.
        script: what is to happen in it.
        closing: what has to be let go of, however it ends; for the caller to close.
        entry: of the worker processes.
    """

    def __init__(
        self,
        job: Job,
        fork_server: ForkServer,
        watch: Watcher,
        script: EventScript,
        closing: ExitStack,
        entry: str = ENTRY,
    ) -> None:
        self._job, self._fork_server, self._watch, self._closing = job, fork_server, watch, closing
        self._setup = setup = RunContext.of(job)
        self._module, state = first_state(job.program, job.running_buffers)
        self._parcel: SharedObject = share(job)
        closing.callback(self._parcel.close)
        noise = NoiseAccumulator(setup.reference_batch) if job.noise_scale else None
        meter = NoiseEstimator(noise) if noise else None
        owner = ServerOptimizer(job.program, setup.policy, state, meter) if setup.slots else None
        self._store, self._board = open_arena(setup, state.layout, owner.stepper.state_count if owner else 0)
        closing.callback(self._store.close)
        digest = state.digest()
        if owner is not None:
            owner.move_to(self._store.version(0))
        else:
            self._store.version(0).copy_(state)
        self._sink = self._new_sink()
        self._recorder = Recorder(SERVER, 0, 0, self._sink) if job.trace else NullRecorder()
        self._workers = WorkerProcesses(
            fork_server,
            self._store,
            self._board,
            self._parcel,
            job.strategy.mesh,
            self._meeting(),
            trace=job.trace,
            timeout_s=job.timeout_s,
            entry=entry,
        )
        closing.callback(self._workers.close)
        self._director = FaultInjector(script, self._workers.signal)
        self._allowance = setup.allowance()
        self._server = SharedMemoryServer(
            setup,
            self._store,
            self._board,
            owner,
            self._workers,
            waiting=lambda: self._coordinator.waiting,
            ahead=self._lead(scripted=script != EventScript()),
            about_to_send=self._director.before_grant,
            recorder=self._recorder,
            meter=meter,
        )
        self._coordinator = Coordinator(setup.policy, setup.replicas, self._allowance, self._server)
        self._chronicle = RunHistory(setup, self._coordinator, digest, noise)
        self._left: list[ReplicaExit] = []
        self._began: Nanoseconds = time.monotonic_ns()
        self._timed = job.budget.unit == "seconds"
        self._condition_met = False
        self._told_s: Seconds = -1.0
        self._heard_s: Seconds = 0.0
        self._glanced_s: Seconds = 0.0

    def outcome(self) -> Outcome:
        """Run to the end."""
        with Interruptible(self._workers.eventfd.set) as ctrl_c:
            self._workers.insisted = lambda: ctrl_c.insisted
            self._start(ctrl_c)
            seconds = self._train(ctrl_c)
            self._leave(ctrl_c)
            self._score(seconds, ctrl_c)
        return self._result(seconds, interrupted=ctrl_c.heard > 0)

    # ------------------------------------------------------------------------------------------------------ the phases

    def _start(self, ctrl_c: Interruptible) -> None:
        self._watch(Progress("starting", 0.0))
        self._workers.start(lambda: ctrl_c.heard > 0)
        patient = self._job.budget.until is None
        self._desk = EvaluationQueue(
            self._job, self._fork_server, self._parcel, self._server.state.layout, patient=patient
        )
        self._closing.callback(self._desk.close)
        workers, prepares = self._setup.job.strategy.workers, self._job.strategy.spread
        self._workers.wait_ready(
            self._job.timeout_s + (PREPARATION_S if prepares else 0.0),
            lambda ready: self._watch(Progress("starting", ready / workers)),
            lambda: ctrl_c.heard > 0,
        )
        self._workers.poller.add(self._desk.fileno(), ("scored", 0))
        self._write_roster()

    def _write_roster(self) -> None:
        others = {"coordinator": {"pid": os.getpid()}, "scorer": {"pid": self._desk.child.pid}}
        roster = WorkersFile(
            self._job.out, others, {place: {"pid": pid} for place, pid in self._workers.pids().items()}
        )
        self._closing.callback(roster.close)

    def _train(self, ctrl_c: Interruptible) -> Seconds:
        """Until the budget is spent, the condition met, or Ctrl-C noted; returns the training time."""
        budget, timed = self._job.budget, self._timed
        end = budget.amount if timed and budget.amount is not None else math.inf
        self._look(0.0)
        self._began = time.monotonic_ns()
        if not ctrl_c.heard:
            self._coordinator.begin()
        while not self._coordinator.idle and not self._condition_met and not ctrl_c.heard:
            now = self._now()
            if now >= end:
                return end
            if self._chronicle.points.next < end * (1 - 1e-9):
                self._look(now)
            self._tell(now)
            due = self._chronicle.points.next if timed else math.inf
            self._hear(self._wait(max(0.0, min(due, end, now + TICK_S) - now)))
            self._miss_nobody()
        if self._left and len(self._left) == self._setup.replicas:
            raise WorkerError(f"every replica died: {'; '.join(f'{d.replica} {d.reason}' for d in self._left)}")
        return min(self._now(), end)

    def _leave(self, ctrl_c: Interruptible) -> None:
        """Let the workers end by themselves; one that does not in time is named, and killed."""
        self._coordinator.finish()
        for replica in range(self._setup.replicas):
            self._server.dismiss(replica)
        allowed_s = self._job.timeout_s
        deadline = self._now() + allowed_s
        while self._workers.living and not ctrl_c.insisted and (left := deadline - self._now()) > 0:
            self._hear(self._workers.poller.wait(left))
        for replica in () if ctrl_c.insisted else sorted(self._workers.living):
            self._left.append(ReplicaExit(replica, f"did not end within {allowed_s:g} s; killed", self._now()))
        self._workers.kill_all()

    def _score(self, seconds: Seconds, ctrl_c: Interruptible) -> None:
        """Wait for the records that are still to come; main makes those of a scorer that has gone or says nothing."""
        if self._timed or self._chronicle.moved_on:
            self._hand_in(seconds)
        enough = min(ctrl_c.heard, 1) + 1
        silent_since = time.monotonic()
        while self._desk.waiting and self._desk.alive and ctrl_c.heard < enough:
            self._watch(replace(self._chronicle.progress("scoring", seconds), fraction=None))
            tokens = self._workers.poller.wait(TICK_S)
            self._hear(tokens)
            if ("scored", 0) in tokens:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > self._job.timeout_s:
                self._desk.give_up()
        if ctrl_c.heard < enough:
            self._keep(self._desk.score_rest())

    # ----------------------------------------------------------------------------------------- what workers tell main

    def _wait(self, timeout_s: Seconds) -> list[Event]:
        """Wait for news; whatever is no report is looked for once a while, however many of these there are."""
        wakeup, tokens = self._workers.wakeup, list[Event]()
        if wakeup.spin(self._server.has_news) and self._now() - self._glanced_s < GLANCE_S:
            return tokens
        self._glanced_s = self._now()

        def block(seconds: Seconds) -> None:
            tokens.extend(self._workers.poller.wait(seconds))

        if self._server.has_news():
            block(0.0)
        else:
            wakeup.sleep(self._server.has_news, block, timeout_s)
        return tokens

    def _hear(self, tokens: list[Event]) -> None:
        """Reports first: what a worker has sent before it died is good."""
        what = {kind for kind, _ in tokens}
        if "message" in what:
            self._workers.read_messages()
        if "report" in what:
            self._workers.eventfd.clear()
        for replica, report in self._director.due(self._server.pending, self._coordinator):
            self._take(replica, report)
        for kind, worker in tokens:
            if kind == "ended":
                self._lost(worker)
        if "scored" in what:
            self._collect()

    def _take(self, replica: ReplicaId, report: Completion) -> None:
        if replica not in self._coordinator.present:
            self._server.release(replica, report)
            return
        now = self._now()
        if report.ending == ARRIVED and not self._coordinator.voids(replica):
            self._arrived(replica, report, now)
        else:
            self._server.release(replica, report)
            self._coordinator.cancelled(replica)
        self._heard_s = self._now()  # an update may have been waited for
        if not self._timed:
            self._look(self._heard_s)
        self._director.after_decision(replica, report.attempt)

    def _arrived(self, replica: ReplicaId, report: Completion, now: Seconds) -> None:
        if not report.finite and self._job.on_nonfinite == "stop":
            raise not_finite(report.loss, replica, report.attempt)
        self._chronicle.heard(report.loss, report.samples)
        observed = self._server.observer.observe(self._server.hold_delta(replica, report), now)
        loss = report.loss if report.samples else None
        # Where A is written in place, a step may be taken before another whose result it has read.
        version = min(report.version, self._coordinator.version)
        arrival = Arrival(replica, version, report.attempt, report.samples, now, report.finite, loss, observed)
        self._coordinator.arrived(arrival)

    def _lost(self, worker: int) -> None:
        """A worker has ended; if nobody told it to, its replica leaves."""
        gone = self._workers.handle_exit(worker)
        if gone is None:
            return
        replica, how = gone
        self._server.lost(replica)
        if replica not in self._coordinator.present:
            return
        if how == EXIT_OK:
            self._coordinator.left(replica, "done")
        else:
            self._left.append(ReplicaExit(replica, how, self._now()))
            self._coordinator.left(replica, "died")

    def _miss_nobody(self) -> None:
        """A hang is a failure: somebody must be at work, and report within the time that is allowed."""
        if self._coordinator.idle:
            return
        at_work = sorted(self._coordinator.computing)
        if not at_work:
            raise self._coordinator.deadlock()
        excused_s = (max(self._board.paused_until(r) for r in at_work) - self._began) * 1e-9
        silent = self._now() - max(self._heard_s, excused_s) > self._job.timeout_s
        if silent and not self._server.pending():  # main itself may have been suspended
            waiting = [f"replica {r}" for r in sorted(self._coordinator.present - set(at_work))]
            late = ", ".join(f"replica {r} at its step {self._server.attempt(r)}" for r in at_work)
            raise WaitTimeoutError(
                f"{', '.join(['main', *waiting])} waited {self._job.timeout_s:g} s for {late}, and heard nothing; "
                "write a larger timeout_s= if a step takes so long"
            )

    def _lead(self, *, scripted: bool) -> Callable[[ReplicaId], int]:
        """How many attempts a replica may be ahead: where it waits for nobody, and no evaluation point is passed by."""
        budget = self._job.budget
        between = math.inf if budget.unit == "seconds" else budget.evaluate_every / 2
        most = 0 if self._setup.slots or scripted else int(min(REPORTS - 1, between))
        return lambda replica: min(most, self._allowance.surely(replica)) if most else 0

    # -------------------------------------------------------------------------------------------- how the run stands

    def _look(self, now: Seconds) -> None:
        """Take the snapshot that is due."""
        if self._chronicle.point_reached(now):
            self._hand_in(now)

    def _tell(self, now: Seconds) -> None:
        """Tell the display how things stand, once a while."""
        if now - self._told_s >= TICK_S:
            self._told_s = now
            self._watch(self._chronicle.progress("training", now))

    def _hand_in(self, now: Seconds) -> None:
        self._desk.hand_in(self._server.state, self._chronicle.moment(now))
        if self._job.budget.until is not None and not self._desk.alive:
            self._keep(self._desk.score_rest())  # the run waits for it

    def _collect(self) -> None:
        self._keep(self._desk.collect())
        if not self._desk.alive:
            self._workers.poller.remove(self._desk.fileno())

    def _keep(self, records: Iterable[Record]) -> None:
        for record in records:
            self._condition_met |= self._chronicle.record(record)

    def _result(self, seconds: Seconds, *, interrupted: bool) -> Outcome:
        notes: dict[str, str | int | float] = {
            "threads": threads(self._job),
            "server_optimizer_bytes": self._server.optimizer_bytes,
        }
        account = self._chronicle.account(seconds, self._figures(seconds), self._left, notes, interrupted=interrupted)
        model = write(self._module, self._server.state)
        history = sorted(self._chronicle.history, key=lambda record: record.time_s)
        return Outcome(model.state_dict(), model, history, account, self._spans())

    def _figures(self, seconds: Seconds) -> list[WorkerFigures]:
        """Of all workers; those of the first one of each replica are on the board."""
        mesh, board, sheet = self._job.strategy.mesh, self._board, metrics_block(self._setup, self._store)
        size, found = self._server.state.layout.parameter_bytes, list[WorkerFigures]()
        own_bytes = 0 if self._setup.slots and not self._setup.owns_steps else None  # who has an optimizer says nothing
        for worker in range(mesh.workers):
            place = mesh.place(worker)
            leads = worker == mesh.replica_ranks(place.replica).start
            seen = board.figures(place.replica) if leads else sheet.figures(worker)
            times = board.step_times(place.replica) if leads else sheet.step_times(worker)
            held = sheet.parameter_bytes_of(worker) if self._job.strategy.spread else size
            found.append(replace(told(place, seen, times, held, seconds), optimizer_bytes=own_bytes))
        return found

    def _meeting(self) -> str | None:
        """The folder in which the workers of a replica meet; None where each replica is one."""
        if not self._job.strategy.spread:
            return None
        return self._closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))

    def _spans(self) -> list[Span]:
        if not self._job.trace:
            return []
        self._recorder.close()
        return timeline([*self._workers.spans(), *read_packed(self._sink)], self._began)

    def _new_sink(self) -> int:
        if not self._job.trace:
            return -1
        sink = memfd_create("paceline:spans")
        self._closing.callback(os.close, sink)
        return sink

    def _now(self) -> Seconds:
        return (time.monotonic_ns() - self._began) * 1e-9
