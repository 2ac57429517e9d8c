"""One run on this host: the coordinator and the parameter server in the main process, a process for each worker.

::

    main     wait ... completion of replica 1: decide, write the next A, grant it the next Δ ... wait
    worker   wait ... read A in shared memory, compute, write Δ, report completion ............. wait

Main goes through four phases: start, train, stop the workers, evaluate. The first Ctrl-C ends the first two, or the
last where it comes then; a second one ends all waiting.
"""

import math
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace

from paceline.aggregation.base import Arrival
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_pickle import share
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import ReplicaExit, WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.local.control_block import ARRIVED, COMPLETIONS, Completion
from paceline.engine.local.evaluation_process import EvaluationProcess
from paceline.engine.local.fault_injection import EventScript, FaultInjector
from paceline.engine.local.server import ServerContext, SharedMemoryServer
from paceline.engine.local.worker_main import open_arena
from paceline.engine.local.worker_processes import ENTRY, WorkerProcesses
from paceline.engine.loop import TICK_S, InterruptGuard, RunLoop
from paceline.engine.process_supervisor import EXIT_OK, Event
from paceline.engine.run_context import RunContext, first_state, threads
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.rank_context import PREPARATION_S
from paceline.engine.worker_metrics import SpanLog, WorkersFile, training_spans, worker_figures
from paceline.replica.flat_state import write
from paceline.replica.noise_estimator import NoiseEstimator
from paceline.trace.spans import SERVER

POLL_S: Seconds = 0.01
"""How often main polls for what is no completion, a worker's end for instance, while completions keep coming."""


class LocalRun:
    """One run.

    Args:
        job: what is run.
        fork_server: starts its processes.
        watch: receives progress.
        script: faults to inject.
        closing: what has to be released, however the run ends; for the caller to close.
        entry: entry point of the worker processes.
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
        self._context = context = RunContext(job)
        self._module, state = first_state(job.program, job.running_buffers)
        self._shared_job = share(job)
        closing.callback(self._shared_job.close)
        noise = NoiseAccumulator(context.reference_batch) if job.noise_scale else None
        estimator = NoiseEstimator(noise) if noise else None
        optimizer = ServerOptimizer(job.program, context.policy, state, estimator) if context.delta_slots else None
        remembers = optimizer.flat_optimizer.state_count if optimizer else 0
        self._arena, self._control_block = open_arena(context, state.layout, remembers)
        closing.callback(self._arena.close)
        digest = state.digest()
        if optimizer is not None:
            optimizer.move_to(self._arena.version(0))
        else:
            self._arena.version(0).copy_(state)
        self._spans = SpanLog(job.trace, SERVER)
        closing.callback(self._spans.close)
        rendezvous = None
        if job.strategy.spread:  # a folder in which the workers of a replica meet
            rendezvous = closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        self._workers = workers = WorkerProcesses(
            fork_server,
            self._arena,
            self._control_block,
            self._shared_job,
            job.strategy.mesh,
            rendezvous,
            trace=job.trace,
            timeout_s=job.timeout_s,
            entry=entry,
        )
        closing.callback(workers.close)
        self._faults = FaultInjector(script, workers.signal)
        # Attempts that a replica may be ahead: where it waits for no decision, and passes no evaluation point by.
        between = math.inf if job.budget.unit == "seconds" else job.budget.evaluate_every / 2
        self._max_lead = 0 if context.delta_slots or script != EventScript() else int(min(COMPLETIONS - 1, between))
        server_context = ServerContext(
            run=context,
            arena=self._arena,
            control=self._control_block,
            owner=optimizer,
            workers=workers,
            recorder=self._spans.recorder,
            estimator=estimator,
            idle=lambda: self._coordinator.waiting,
            lead=lambda r: min(self._max_lead, self._loop.quota.guaranteed(r)) if self._max_lead else 0,
            before_grant=self._faults.inject,
        )
        self._server = SharedMemoryServer(server_context)
        self._loop = RunLoop(context, self._server, digest, self._evaluate, watch, noise)
        self._coordinator = self._loop.coordinator
        self._began: Nanoseconds = time.monotonic_ns()
        self._polled_s: Seconds = 0.0

    def outcome(self) -> Outcome:
        """Run to the end."""
        with InterruptGuard(self._workers.eventfd.set) as interrupts:
            self._workers.insisted = lambda: interrupts.insisted
            self._start(interrupts)
            seconds = self._train(interrupts)
            self._stop_workers(interrupts)
            self._finish_evaluation(seconds, interrupts)
        return self._result(seconds, interrupted=interrupts.count > 0)

    # ------------------------------------------------------------------------------------------------------- the phases

    def _start(self, interrupts: InterruptGuard) -> None:
        job, workers = self._job, self._workers
        self._watch(Progress("starting", 0.0))
        workers.start(lambda: interrupts.count > 0)
        self._evaluation = EvaluationProcess(
            job,
            self._fork_server,
            self._shared_job,
            self._server.state.layout,
            idle_only=job.budget.until is None,  # else the end of the run waits for records
        )
        self._closing.callback(self._evaluation.close)
        workers.wait_ready(
            job.timeout_s + (PREPARATION_S if job.strategy.spread else 0.0),
            lambda ready: self._watch(Progress("starting", ready / job.strategy.workers)),
            lambda: interrupts.count > 0,
        )
        workers.poller.add(self._evaluation.fileno(), ("scored", 0))
        others = {"coordinator": {"pid": os.getpid()}, "scorer": {"pid": self._evaluation.child.pid}}
        pids = {place: {"pid": pid} for place, pid in workers.pids().items()}
        self._closing.callback(WorkersFile(job.out, others, pids).close)

    def _train(self, interrupts: InterruptGuard) -> Seconds:
        """Train until the budget is spent, the condition met, or Ctrl-C pressed; return the training time."""
        loop, coordinator = self._loop, self._coordinator
        loop.evaluate_if_due(0.0)
        self._began = time.monotonic_ns()
        if not interrupts.count:
            coordinator.begin()
        while not coordinator.idle and not loop.condition_met and not interrupts.count:
            wait_s = loop.tick(self._now())
            if wait_s is None:
                return loop.end_s
            self._handle(self._wait(wait_s))
            if not coordinator.idle:
                loop.check_hang(
                    self._now(),
                    "main",
                    excused_until=lambda r: (self._control_block.paused_until_ns[r] - self._began) * 1e-9,
                    attempt=lambda r: self._server.attempts[r],
                    busy=lambda: bool(self._server.pending()),  # main itself may have been suspended
                )
        if len(loop.exits) == self._context.replicas:
            raise loop.all_died()
        return min(self._now(), loop.end_s)

    def _stop_workers(self, interrupts: InterruptGuard) -> None:
        """Let the workers end by themselves; kill those that do not in time, and record which."""
        self._coordinator.finish()
        for replica in range(self._context.replicas):
            self._server.dismiss(replica)
        deadline = self._now() + self._job.timeout_s
        while self._workers.living and not interrupts.insisted and (left := deadline - self._now()) > 0:
            self._handle(self._workers.poller.wait(left))
        if not interrupts.insisted:
            self._loop.ended_late(sorted(self._workers.living), self._now())
        self._workers.kill_all()

    def _finish_evaluation(self, seconds: Seconds, interrupts: InterruptGuard) -> None:
        """Wait for the records that are still to come; if the evaluator died or hangs, main evaluates the rest."""
        evaluation = self._evaluation
        self._loop.evaluate_final(seconds)
        enough = min(interrupts.count, 1) + 1
        silent_since = time.monotonic()
        while evaluation.queue.snapshots and evaluation.alive and interrupts.count < enough:
            self._watch(replace(self._loop.history.progress("scoring", seconds), fraction=None))
            events = self._workers.poller.wait(TICK_S)
            self._handle(events)
            if ("scored", 0) in events:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > self._job.timeout_s:
                evaluation.kill()
        if interrupts.count < enough:
            self._loop.keep(evaluation.evaluate_rest())

    # ----------------------------------------------------------------------------------------------------------- events

    def _wait(self, timeout_s: Seconds) -> list[Event]:
        """Wait for events; those that are no completion are polled once a while, however many completions come."""
        wakeup, server, events = self._workers.wakeup, self._server, list[Event]()
        if wakeup.spin(server.has_news) and self._now() - self._polled_s < POLL_S:
            return events
        self._polled_s = self._now()

        def block(seconds: Seconds) -> None:
            events.extend(self._workers.poller.wait(seconds))

        if server.has_news():
            block(0.0)
        else:
            wakeup.sleep(server.has_news, block, timeout_s)
        return events

    def _handle(self, events: list[Event]) -> None:
        """Handle events, completions first: what a worker has reported before it died is valid."""
        kinds = {kind for kind, _ in events}
        if "message" in kinds:
            self._workers.read_messages()
        if "report" in kinds:
            self._workers.eventfd.clear()
        for replica, completion in self._faults.due(self._server.pending, self._coordinator):
            self._take(replica, completion)
        for kind, worker in events:
            if kind == "ended":
                self._worker_ended(worker)
        if "scored" in kinds:
            self._loop.keep(self._evaluation.collect())
            if not self._evaluation.alive:
                self._workers.poller.remove(self._evaluation.fileno())

    def _take(self, replica: ReplicaId, done: Completion) -> None:
        """Have the policy decide on a Δ, or let a replica whose attempt was cancelled go on."""
        server, coordinator = self._server, self._coordinator
        if replica not in coordinator.present:
            server.release(replica, done)
            return
        now = self._now()
        if done.ending == ARRIVED and not coordinator.voids(replica):
            observed = server.statistics.observe(server.hold_delta(replica, done), now)
            loss = done.loss if done.samples else None
            # Where A is written in place, a step may be taken before another whose result it has read.
            version = min(done.version, coordinator.version)
            self._loop.arrived(Arrival(replica, version, done.attempt, done.samples, now, done.finite, loss, observed))
        else:
            server.release(replica, done)
            coordinator.cancelled(replica)
        self._loop.handled(self._now())  # an update may have taken time
        self._faults.inject(replica, done.attempt, "taken")

    def _worker_ended(self, worker: int) -> None:
        """Handle the end of a process: unless main has ended it, its replica leaves."""
        gone = self._workers.handle_exit(worker)
        if gone is None:
            return
        replica, status = gone
        self._server.lost(replica)
        if replica not in self._coordinator.present:
            return
        if status == EXIT_OK:
            self._coordinator.left(replica, "done")
        else:
            self._loop.exits.append(ReplicaExit(replica, status, self._now()))
            self._coordinator.left(replica, "died")

    def _evaluate(self, now: Seconds) -> None:
        self._evaluation.hand_in(self._server.state, self._loop.history.snapshot(now))
        if self._job.budget.until is not None and not self._evaluation.alive:
            self._loop.keep(self._evaluation.evaluate_rest())  # the run waits for it

    # ---------------------------------------------------------------------------------------------------------- results

    def _result(self, seconds: Seconds, *, interrupted: bool) -> Outcome:
        loop, server = self._loop, self._server
        notes: dict[str, str | int | float] = {
            "threads": threads(self._job),
            "server_optimizer_bytes": server.optimizer_bytes,
        }
        account = loop.history.account(seconds, self._figures(seconds), loop.exits, notes, interrupted=interrupted)
        model = write(self._module, server.state)
        records = sorted(loop.history.records, key=lambda record: record.time_s)
        spans = training_spans([*self._workers.spans(), *self._spans.read()], self._began)
        return Outcome(model.state_dict(), model, records, account, spans)

    def _figures(self, seconds: Seconds) -> list[WorkerFigures]:
        mesh, metrics = self._job.strategy.mesh, self._control_block.metrics
        size, figures = self._server.state.layout.parameter_bytes, list[WorkerFigures]()
        # A worker with an optimizer of its own does not report its size.
        own_bytes = 0 if self._context.delta_slots and not self._context.local_sgd else None
        for worker in range(mesh.workers):
            measured, times = metrics.figures(worker), metrics.step_times(worker)
            parameter_bytes = metrics.parameter_bytes[worker] if self._job.strategy.spread else size
            row = worker_figures(mesh.coordinate(worker), measured, times, parameter_bytes, seconds)
            figures.append(replace(row, optimizer_bytes=own_bytes))
        return figures

    def _now(self) -> Seconds:
        return (time.monotonic_ns() - self._began) * 1e-9
