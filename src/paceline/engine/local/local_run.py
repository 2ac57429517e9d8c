"""One run on this host: the coordinator and the parameter server in the main process, a process for each worker.

::

    main     wait ... completion of replica 1: decide, write the next A, grant it the next Δ ... wait
    worker   wait ... read A in shared memory, compute, write Δ, report completion ............. wait

Main goes through four phases: start, train, stop the workers, evaluate. The first Ctrl-C ends the first two, or the
last where it comes then; a second one ends all waiting.
"""

import math
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from paceline.aggregation.base import Arrival
from paceline.checkpoint.base import TensorChunk
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_pickle import share
from paceline.comm.wakeup import OWN_CORE, SHARED_CORES
from paceline.core.errors import CallbackError, WorkerError
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.device import CPU
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.local.arena import ArenaLayout, ParameterArena, arena_device
from paceline.engine.local.control_block import ARRIVED, COMPLETIONS, Completion
from paceline.engine.local.evaluation_process import EvaluationProcess
from paceline.engine.local.fault_injection import EventScript, FaultInjector
from paceline.engine.local.membership import MembershipContext, ReplicaMembership, replicas_at_start
from paceline.engine.local.own_state import OwnStates
from paceline.engine.local.server import ServerContext, SharedMemoryServer
from paceline.engine.local.worker_processes import ENTRY, WorkerProcesses
from paceline.engine.loop import TICK_S, RunLoop
from paceline.engine.process_supervisor import Event
from paceline.engine.run_context import RunContext, first_state, own_cores, threads
from paceline.engine.scaling import scaling_files
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.capturing import preparing
from paceline.engine.worker_metrics import SpanLog, training_spans, worker_figures, workers_file
from paceline.replica.flat_state import FlatState, write
from paceline.replica.noise_estimator import NoiseEstimator
from paceline.replica.optimizer_state import whole_chunks
from paceline.trace.recorder import read_packed
from paceline.trace.spans import SERVER

# Where workers need the core: main sleeps soon, and finds several completions when it wakes.
WITH_WORKERS = SHARED_CORES._replace(polls=8)

# How often main polls for what is no completion, a worker's end for instance, while completions keep coming.
POLL_S: Seconds = 0.01


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
        place = arena_device(job.strategy.device)
        self._module, state = first_state(job.program, job.running_buffers, str(place))
        self._shared_job = share(job)
        closing.callback(self._shared_job.close)
        noise = NoiseAccumulator(context.reference_batch) if job.noise_scale else None
        estimator = NoiseEstimator(noise, late=place != CPU) if noise else None
        self._optimizer = optimizer = (
            ServerOptimizer(job.program, context.policy, state, estimator, one_replica=context.one_replica)
            if context.delta_slots
            else None
        )
        vectors = optimizer.flat_optimizer.state_count if optimizer else 0
        self._arena = ParameterArena(ArenaLayout.of(context, state.layout, vectors))
        closing.callback(self._arena.close)
        self._own_states = OwnStates.of(self._arena)
        digest = state.digest()
        self._place(state)
        self._spans = SpanLog(job.trace, SERVER)
        closing.callback(self._spans.close)
        self._workers = workers = WorkerProcesses(fork_server, self._arena, self._shared_job, job, watch, entry)
        closing.callback(workers.close)
        self._interrupts = workers.interrupts
        self._faults = FaultInjector(script, workers.signal)
        # Attempts that a replica may be ahead: where it waits for no decision, and passes no evaluation point by.
        between = math.inf if job.budget.unit == "seconds" else job.budget.evaluate_every / 2
        self._max_lead = 0 if context.delta_slots or script != EventScript() else int(min(COMPLETIONS - 1, between))
        server_context = ServerContext(
            run=context,
            arena=self._arena,
            owner=optimizer,
            workers=workers,
            recorder=self._spans.recorder,
            estimator=estimator,
            idle=lambda: sorted(self._coordinator.waiting),
            lead=lambda r: min(self._max_lead, self._loop.dispatcher.quota.guaranteed(r)) if self._max_lead else 0,
            before_grant=self._faults.inject,
            before_change=self._settle,
        )
        self._server = SharedMemoryServer(server_context)
        self._first_replicas = replicas_at_start(job.strategy)
        parks = job.on_death != "stop" and context.delta_slots > 0
        self._loop = RunLoop(
            context, self._server, digest, self._evaluate, watch, noise, replicas=self._first_replicas, parks=parks
        )
        if estimator is not None:
            self._loop.history.read_late = estimator.settle
        self._coordinator = self._loop.coordinator
        self._checkpointer = Checkpointer(context, self._loop, self._snapshot)
        closing.callback(self._checkpointer.close)
        self._began: Nanoseconds = time.monotonic_ns()
        self._polled_s: Seconds = 0.0
        self._own_core = own_cores(job.strategy)
        parts = MembershipContext(
            job, context, self._arena, self._server, workers, self._loop, self._take, self._now, self._paused_until
        )
        self._membership = ReplicaMembership(parts)

    def _place(self, state: FlatState) -> None:
        """Have A in the arena, as it is at first or where the run goes on."""
        resume, optimizer = self._job.resume, self._optimizer
        if resume is not None and optimizer is not None:
            optimizer.restore(resume)
        elif resume is not None:  # replicas write A in place, with optimizers of their own
            resume.checkpoint.read_into(whole_chunks(state))
        first = self._arena.version(0).copy_(state)
        if optimizer is not None:
            optimizer.state = first
            optimizer.flat_optimizer.point_at(first)

    def outcome(self) -> Outcome:
        """Run to the end."""
        with self._interrupts:
            self._start()
            try:
                seconds = self._train()
            except (WorkerError, CallbackError):  # A itself is good
                self._checkpointer.finish(self._now())
                raise
            self._checkpointer.finish(seconds)
            self._stop_workers()
            self._finish_evaluation(seconds)
        return self._result(seconds)

    # ------------------------------------------------------------------------------------------------------- the phases

    def _start(self) -> None:
        job, workers = self._job, self._workers
        if job.strategy.spread:
            work = preparing(job.strategy)
        else:
            count, cores = self._first_replicas, len(os.sched_getaffinity(0))
            work = f"starting {count} worker{'s' * (count > 1)} on {cores} core{'s' * (cores > 1)}"
        self._watch(Progress("starting", 0.0, work=work))
        workers.start(self._first_replicas)
        self._evaluation = EvaluationProcess(
            job,
            self._fork_server,
            self._shared_job,
            self._server.state.layout,
            idle_only=not job.live,  # else the end of the run waits for records
        )
        self._closing.callback(self._evaluation.close)
        workers.wait_ready(lambda ready: self._watch(Progress("starting", ready, work=work)))
        workers.poller.add(self._evaluation.link.fileno(), ("scored", 0))
        others = {"coordinator": {"pid": os.getpid()}, "scorer": {"pid": self._evaluation.child.pid}}
        mesh, processes = job.strategy.mesh, workers.supervisor.processes
        pids = {mesh.coordinate(worker): {"pid": process.pid} for worker, process in processes.items()}
        self._closing.enter_context(workers_file(job.out, others, pids))
        self._closing.enter_context(scaling_files(job.out))

    def _train(self) -> Seconds:
        """Train until the budget is spent, the condition met, or Ctrl-C pressed; return the training time."""
        loop, coordinator, interrupts = self._loop, self._coordinator, self._interrupts
        loop.evaluate_if_due(loop.start_s)
        self._began = time.monotonic_ns() - int(loop.start_s * 1e9)
        if not interrupts.count:
            coordinator.begin()
            self._membership.decided()
        while coordinator.present and not loop.ended() and not interrupts.count:
            if loop.expire(self._now()):
                self._membership.decided()
            wait_s = loop.tick(self._now())
            if wait_s is None:
                return loop.end_s
            self._handle(self._wait(wait_s))
            self._checkpointer.save_if_due(self._now())
            if coordinator.present:
                self._membership.look()
            if coordinator.present and not self._membership.starting:
                loop.check_hang(
                    self._now(),
                    "main",
                    excused_until=self._paused_until,
                    attempt=lambda r: self._server.attempts[r],
                    busy=lambda: bool(self._server.pending()),  # main itself may have been suspended
                )
        if self._membership.all_died:
            raise loop.all_died()
        return min(self._now(), loop.end_s)

    def _stop_workers(self) -> None:
        """Let the workers end by themselves; kill those that do not in time, and record which."""
        self._coordinator.finish()
        for replica in range(self._context.replicas):
            self._server.dismiss(replica)
        deadline = self._now() + self._job.timeout_s
        while self._workers.living and not self._interrupts.insisted and (left := deadline - self._now()) > 0:
            self._handle(self._workers.poller.wait(left))
        if not self._interrupts.insisted:
            self._loop.ended_late(sorted(self._workers.living), self._now())
        self._workers.supervisor.kill(self._workers.supervisor.processes)

    def _finish_evaluation(self, seconds: Seconds) -> None:
        """Wait for the records that are still to come; if the evaluator died or hangs, main evaluates the rest."""
        evaluation, interrupts = self._evaluation, self._interrupts
        self._loop.evaluate_final(seconds, moved=not self._loop.ends_here and self._server.finish())
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
        if self._own_core:  # snapshots are evaluated on what cores are idle
            wakeup.polling = SHARED_CORES if self._evaluation.queue.snapshots else OWN_CORE
        else:
            wakeup.polling = WITH_WORKERS
        if wakeup.spin(server.has_news) and self._now() - self._polled_s < POLL_S:
            return events
        self._polled_s = self._now()

        poller = self._workers.poller
        if server.has_news():
            return poller.wait(0.0)
        wakeup.sleep(server.has_news, lambda seconds: events.extend(poller.wait(seconds)), timeout_s)
        return events

    def _handle(self, events: list[Event]) -> None:
        """Handle events, completions first: what a worker has reported before it died is valid."""
        kinds = {kind for kind, _ in events}
        if "message" in kinds:
            self._workers.read_messages()
            self._membership.ready()
        if "report" in kinds:
            self._workers.eventfd.clear()
        for replica, completion in self._faults.due(self._server.pending, self._coordinator):
            self._take(replica, completion)
        for worker in [worker for kind, worker in events if kind == "ended"]:
            ended = self._workers.handle_exit(worker)
            if ended is not None:  # None: main has ended it, or others of its replica still run
                self._membership.ended(*ended)
        if "scored" in kinds:
            self._loop.keep(self._evaluation.collect())
            if not self._evaluation.alive:
                self._workers.poller.remove(self._evaluation.link.fileno())

    def _paused_until(self, replica: ReplicaId) -> Seconds:
        """Return the training time at which the last delay of a replica that was asked for ends."""
        return (self._arena.control.paused_until_ns[replica] - self._began) * 1e-9

    def _take(self, replica: ReplicaId, done: Completion) -> None:
        """Have the policy decide on a Δ, or let a replica whose attempt was cancelled go on."""
        coordinator, now = self._coordinator, self._now()
        present = replica in coordinator.present
        arrives = present and done.ending == ARRIVED and replica not in coordinator.cancelling
        delta = self._server.read(replica, done, keep=arrives)
        if not present:
            return
        self._membership.pace.arrived(replica, now)
        if arrives:
            observed = self._server.statistics.observe(delta, now)
            loss = done.loss if done.samples else None
            # Where A is written in place, a step may be taken before another whose result it has read.
            version = min(done.version, coordinator.version)
            self._loop.arrived(Arrival(replica, version, done.attempt, done.samples, now, done.finite, loss, observed))
        else:
            coordinator.cancelled(replica)
        self._loop.handled(self._now())  # an update may have taken time
        self._membership.decided()
        self._faults.inject(replica, done.attempt, "taken")

    def _evaluate(self, now: Seconds) -> None:
        self._evaluation.hand_in(self._server.state, self._loop.history.snapshot(now))
        if self._job.live and not self._evaluation.alive:
            self._loop.keep(self._evaluation.evaluate_rest())  # the run waits for it

    def _settle(self) -> None:
        self._checkpointer.settle()

    def _snapshot(self) -> Snapshot:
        """Return A, its optimizer, the Δs that the policy holds, and what replicas keep."""
        optimizer, held = self._optimizer, self._server.held_chunks()
        own, engine = list[TensorChunk](), dict[str, Any]()
        if self._own_states is not None:
            attempts = [position.attempt for position in self._coordinator.positions]
            own, engine = self._own_states.snapshot(
                attempts, self._workers.living.__contains__, lambda replica: self._workers.wakeups[replica].notify()
            )
        if optimizer is None:
            return Snapshot([*whole_chunks(self._server.state), *own], {}, engine)
        # What replicas keep changes with their next grants.
        chunks, saved = [*optimizer.chunks(), *held, *own], optimizer.flat_optimizer.state_json()
        return Snapshot(chunks, saved, engine, settles=not own)

    # ---------------------------------------------------------------------------------------------------------- results

    def _result(self, seconds: Seconds) -> Outcome:
        job, metrics, state, history = self._job, self._arena.control.metrics, self._server.state, self._loop.history
        # A worker with an optimizer of its own does not report its size.
        own_bytes = 0 if self._context.delta_slots and not self._context.local_sgd else None
        workers: list[WorkerFigures] = []
        for worker in sorted(self._workers.spawned):
            measured, times = metrics.figures(worker), metrics.step_times(worker)
            nbytes = metrics.parameter_bytes[worker] if job.strategy.spread else state.layout.parameter_bytes
            since_s = seconds - self._loop.start_s
            row = worker_figures(job.strategy.mesh.coordinate(worker), measured, times, nbytes, since_s)
            workers.append(replace(row, optimizer_bytes=own_bytes))
        server_bytes = self._optimizer.flat_optimizer.nbytes if self._optimizer else 0
        notes: dict[str, str | int | float] = {"threads": threads(job.strategy), "server_optimizer_bytes": server_bytes}
        notes |= self._checkpointer.notes() | self._membership.pace.notes()
        first, exits = self._interrupts.first, self._loop.exits
        account = history.account(seconds, workers, exits, notes, interrupted=first is not None, signal=first)
        model = write(self._module, state)
        records = sorted(history.records, key=lambda record: record.time_s)
        recorded = [span for fd in self._workers.traces for span in read_packed(fd)]
        spans = training_spans([*recorded, *self._spans.read()], self._began)
        return Outcome(model.state_dict(), model, records, account, spans)

    def _now(self) -> Seconds:
        return (time.monotonic_ns() - self._began) * 1e-9
