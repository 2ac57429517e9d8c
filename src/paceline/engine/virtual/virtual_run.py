"""One run in virtual time: one process, real gradients, simulated time.

::

    replica r   |- pull -|-- compute --|- delay -|- push -|                            |- pull -|-- compute --
    server                                          queue |- apply + K · gradient -|

An event is the arrival of a Δ, or the policy's deadline. The server takes arrivals one at a time in the order in which
they came; what the policy decides for one is executed before the next is taken. A deadline comes after what has arrived
by then, and after what has arrived while the server was busy. Over a network (``times="network=cluster.toml"``) the
messages of an attempt are events too, and so are hosts that go and come back, which precede all else of their time.
"""

import math
from contextlib import closing, nullcontext

from paceline.aggregation.base import Apply, Arrival
from paceline.clock.hosts import Hosts
from paceline.clock.times import Times
from paceline.core.data_order import BatchRange
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import ReplicaExit
from paceline.core.typed_json import to_json
from paceline.core.types import ReplicaId, Seconds
from paceline.engine import own_states
from paceline.engine.base import Job, Outcome, Watcher
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.evaluation import Evaluator
from paceline.engine.loop import InterruptGuard, RunLoop
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.run_state import ResumePoint
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.engine.step_profile.forecast import virtual_span
from paceline.engine.virtual.attempts import Attempts
from paceline.engine.virtual.durations import durations_of
from paceline.engine.virtual.pending_delta import BatchSources, PendingDelta
from paceline.engine.virtual.saved_state import (
    KEY,
    ReadStates,
    VirtualState,
    attempt_chunks,
    held_attempts,
    restored_attempts,
)
from paceline.engine.virtual.user_loops import UserLoops, refuse_written
from paceline.engine.virtual.vmap_gradients import delta_computer
from paceline.replica.flat_state import FlatLayout, FlatState, write
from paceline.replica.local_sgd import LocalSGD
from paceline.replica.noise_estimator import NoiseEstimator, ObservedDelta
from paceline.trace.spans import SERVER


class _TimeUp(Exception):  # noqa: N818 (an end, not an error)
    """Raised at the end of the budget's last second, or when a record ends training."""


class VirtualRun:
    """One run; executes its coordinator's decisions."""

    def __init__(self, job: Job, watch: Watcher) -> None:
        self._job, self._watch = job, watch
        saved = VirtualState.of(RunContext(job))
        self._context = context = RunContext(job, has_held=saved is not None)
        self._module, state = first_state(job.program, job.running_buffers, context.device(0))
        noise = NoiseAccumulator(context.reference_batch) if job.noise_scale else None
        self._estimator = NoiseEstimator(noise, late=context.reads_late) if noise else None
        self._optimizer = ServerOptimizer(
            job.program,
            context.policy,
            state,
            self._estimator,
            own_steps=lambda: context.own_steps,
            one_replica=context.one_replica,
        )
        self._observer = DeltaStatistics(context.policy, self._optimizer)
        digest = state.digest()
        if job.resume is not None:
            self._optimizer.restore(job.resume)
        self._sources = BatchSources(context.batches)
        own = lambda replica: self._sources.of(replica).stream(replica, context.first_batch(replica))  # noqa: E731
        self._computer = delta_computer(context, self._module, state.layout, self._sources)
        self._user_loops = UserLoops(job.loop, context, self._computer.replica, own, watch.event) if job.loop else None
        self._timing, self._durations = durations_of(context)
        self._now: Seconds = job.resume.run.seconds if job.resume is not None else 0.0
        network, servers = (job.times or Times()).network, job.strategy.servers
        self._hosts = Hosts(network, context.replicas, servers, state.layout.nbytes, job.program.seed, self._now)
        self._attempts = Attempts(context, self._durations, self._hosts.traffic, self._timing)
        self._resumed: set[ReplicaId] = set()
        """Replicas that are at work on an attempt that began before the run was resumed."""
        self._snapshot: FlatState | None = None
        """Copy of A as it is, shared by all attempts that read this version."""
        self._last_s: Seconds | None = None
        """Time of the last event, once the budget's time is over."""
        self._consistent = True
        """False once an event was broken off."""
        self._restore(saved)
        may_die = network is not None and not network.lasting
        self._loop = RunLoop(context, self, digest, self._evaluate, watch, noise, parks=may_die)
        self._loop.history.read_late, self._computer.add_loss = self._read_late, self._loop.history.add_loss
        if saved is not None:  # the timelines go on
            self._loop.history.earlier = 0.0, ()
        for timeline in self._attempts.timelines:
            timeline.count_busy_time(self._loop.end_s)
        self._checkpointer = Checkpointer(context, self._loop, self._take_snapshot)
        self._coordinator = self._loop.coordinator
        self._coordinator.away |= self._hosts.returning | self._hosts.gone
        self._evaluator = Evaluator(job.program, job.program.build(), state.device)
        # Δs are computed as they arrive, rather than when an update needs them, where a decision depends on them, or
        # their data or state come in the order of arrivals.
        depends = "loss" in context.needs or self._observer.looks_inside or job.on_nonfinite == "skip"
        ordered = context.local_sgd or context.order is None or self._user_loops is not None
        self._eager = depends or ordered or bool(job.program.loader.get("num_workers"))

    def outcome(self) -> Outcome:
        """Run to the end."""
        with closing(self._checkpointer), closing(self._sources), self._user_loops or nullcontext():
            signal = self._train()
            if self._consistent:
                self._checkpointer.finish(self._now)
        self._coordinator.finish()
        moved = not self._loop.ends_here and self._optimizer.finish(self._optimizer.state.layout.new)
        if moved or not self._loop.history.is_current(self._now):
            self._record(self._now)
        return self._result(signal)

    def _train(self) -> str | None:
        """Handle all arrivals; return the name of the signal that ended the run, if one did."""
        loop, hosts = self._loop, self._hosts
        with InterruptGuard(lambda: None, self._watch.heard) as interrupts:
            try:
                if loop.condition_met:
                    raise _TimeUp
                if not loop.timed:
                    loop.evaluate_if_due(self._now)
                self._coordinator.begin()
                for replica in sorted(self._coordinator.away & self._coordinator.present):
                    self._let_die(replica, hosts.changed_s)  # time was up as its host went
                while (self._coordinator.present or hosts.returning) and not interrupts.count and not loop.ended():
                    self._next_event()
            except _TimeUp:
                self._last_s, self._now = self._now, loop.end_s
            except KeyboardInterrupt:
                self._consistent = False
                return interrupts.first or "SIGINT"
            return interrupts.first

    def _next_event(self) -> None:
        attempts, hosts, deadline = self._attempts, self._hosts, self._coordinator.deadline
        if not attempts and not hosts.returning and deadline == math.inf:
            raise self._coordinator.deadlock()
        coming = min(attempts.next_s, hosts.next_s)
        start = max(min(coming, deadline), self._now)
        self._loop.evaluate_before(start)
        if start > self._loop.end_s:
            raise _TimeUp
        if max(deadline, self._now) < max(coming, self._now):
            self._now = start
            self._coordinator.tick(start)
        elif hosts.next_s <= attempts.next_s:
            self._now = start
            self._change_host()
        else:
            attempt = attempts.next(self._loop.end_s)
            if attempt is None:
                return
            self._now = start
            self._loop.arrived(self._arrival(attempt))
        self._loop.handled(self._now)
        self._checkpointer.save_if_due(self._now)

    def _arrival(self, attempt: PendingDelta) -> Arrival:
        """Return what the policy sees of a Δ that has arrived now."""
        if self._eager:
            self._computer.compute(attempt)
        measured = attempt.measured if self._eager else None
        if measured is not None:
            samples = measured.samples
        else:
            order, batches = self._context.order, attempt.batches
            assert order is not None, "Δs of a data source are computed as they arrive"
            samples = sum(order.size(batches.stream, k) for k in batches.numbers)
        return Arrival(
            replica=attempt.replica,
            version=attempt.version,
            clock=attempt.clock,
            samples=samples,
            time_s=self._now,
            finite=measured.finite if measured else True,
            loss=measured.loss if measured and samples and not measured.late else None,
            observed=self._observer.observe(attempt.out, self._now),
        )

    def _change_host(self) -> None:
        """Let the replicas of a host die as it goes, and join once it is back."""
        present = self._coordinator.present
        (time_s, host, until_s), replicas = self._hosts.change(present)
        if until_s is None:
            for replica in replicas:
                self._coordinator.joined(replica)
            return
        for replica in filter(present.__contains__, replicas):
            self._loop.exited(ReplicaExit(replica, f"host {host} went away", time_s))
        for replica in replicas:
            self._let_die(replica, time_s)

    def _let_die(self, replica: ReplicaId, time_s: Seconds) -> None:
        self._stop(replica, time_s)
        self._attempts.timelines[replica].arrived_s = None  # to be away is not to wait
        self._computer.replicas.pop(replica, None)  # with the parameters and the optimizer of its own
        self._coordinator.left(replica, "died")

    # --------------------------------------------------------------------------------- execution of decisions, in order

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        if replica in self._resumed:
            self._resumed.remove(replica)
            return
        sent = self._shared_state()
        sent.version = self._coordinator.version
        attempt = self._attempts.new(replica, sent, batches)
        if self._user_loops is not None:
            # The user's loop makes this attempt's micro-steps now; one that ends before the last of them retires.
            for _ in batches.numbers:
                batch = self._user_loops.next(replica, attempt)
                if self._context.own_steps:  # else it has no model
                    refuse_written(replica, attempt.pull(), self._optimizer.state)
                if batch is None:
                    self._coordinator.retire(replica)
                    return
                self._user_loops.losses[replica] = self._computer.step(attempt, batch)
        self._attempts.begin(attempt, self._now, self._loop.end_s)
        self._computer.begin(attempt)

    def _shared_state(self) -> FlatState:
        if self._snapshot is None:
            self._snapshot = self._optimizer.state.clone()
        return self._snapshot

    def apply(self, action: Apply) -> None:
        began = max(self._now, self._hosts.served_s)
        ends = began + self._durations.update(len(action.deltas)) / self._hosts.servers
        self._loop.evaluate_before(ends)
        if ends > self._loop.end_s:
            raise _TimeUp
        self._now = ends
        # Generators: each Δ is computed when it is added to the sum, and let go before the next one.
        seen = (self._take(arrival, weight) for arrival, weight in action.deltas)
        if self._estimator is None:
            deltas, read = ((s.delta, s.weight) for s in seen), self._attempts.kept(action)
            version, loss = self._coordinator.version, self._optimizer.mean_loss(action)
            self._optimizer.apply(deltas, action.rate, alone=action.alone, version=version, read=read, loss=loss)
        else:
            observed = self._estimator.through(seen, len(action.deltas))
            self._optimizer.apply(observed, action.rate, alone=action.alone, loss=self._optimizer.mean_loss(action))
            self._estimator.updated()
        self._snapshot = None
        self._observer.applied(self._now - began)
        if self._job.trace and self._now > began:
            self._attempts.spans.append(virtual_span(SERVER, "apply", self._coordinator.version + 1, began, self._now))

    def _take(self, arrival: Arrival, weight: float) -> ObservedDelta:
        attempt = self._attempts.take(arrival.replica, arrival.clock)
        assert attempt is not None, "it is held"
        out, measured = self._computer.compute(attempt), attempt.measured
        assert measured is not None, "it is computed"
        if not self._eager and not measured.late:
            self._loop.history.add_loss(measured.loss, measured.samples)
        return ObservedDelta(out, weight, measured.samples, attempt.version, measured.micro)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            attempt = self._attempts.take(arrival.replica, arrival.clock)
            if attempt is not None:  # None: taken by an update that Ctrl-C broke off
                self._computer.forget(attempt)

    def cancel(self, replica: ReplicaId) -> None:
        self._stop(replica, self._now)
        self._coordinator.cancelled(replica)

    def _stop(self, replica: ReplicaId, time_s: Seconds) -> None:
        attempt = self._attempts.stop(replica, time_s, self._loop.end_s)
        if attempt is not None:
            self._computer.forget(attempt)

    def dismiss(self, replica: ReplicaId) -> None:
        if self._user_loops is not None:
            self._user_loops.dismiss(replica)

    # ------------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, time_s: Seconds) -> None:
        """Evaluate A; training ends here if the record is a reason to."""
        self._record(time_s)
        if self._loop.end_s > time_s and self._loop.ended():
            self._loop.end_s = time_s
            raise _TimeUp

    def _record(self, time_s: Seconds) -> None:
        history = self._loop.history
        self._loop.keep([self._evaluator.score(self._optimizer.state, history.snapshot(time_s))])
        self._watch(history.progress("training", time_s))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _read_late(self) -> None:
        """Read what of the newest Δ, and of the newest update, is read late."""
        self._computer.read_late()
        if self._estimator is not None:
            self._estimator.settle()

    def _take_snapshot(self) -> Snapshot:
        """Return all that the run has, between two events."""
        attempts, optimizer, version = self._attempts, self._optimizer, self._coordinator.version
        own = {r: each for r, each in self._computer.replicas.items() if isinstance(each, LocalSGD)}
        saved = {r: json for r, each in own.items() if (json := each.state_json()) is not None}
        state = VirtualState(
            self._now if self._last_s is None else self._last_s,
            attempts.state(self._loop.end_s),
            self._observer.state_json(),
            self._estimator.state_json() if self._estimator else None,
            self._hosts.state(),
        )
        read = attempt_chunks(attempts.under_way, attempts.ahead.values(), version)
        chunks = [*optimizer.chunks(), *read, *self._observer.chunks()]
        if self._estimator is not None:
            chunks += self._estimator.chunks(FlatLayout(optimizer.state.layout.parameters, ()))
        chunks += [chunk for r in saved for chunk in own_states.replica_chunks(r, own[r])]
        engine = {KEY: to_json(state), own_states.KEY: to_json(saved)}
        return Snapshot(chunks, optimizer.flat_optimizer.state_json(), engine)

    def _restore(self, state: VirtualState | None) -> None:
        """Go on where a run stopped; without a ``state`` all replicas begin with the A of the checkpoint."""
        resume, like = self._job.resume, self._optimizer.state
        if resume is None:
            return
        counts = resume.run.coordinator
        self._durations.skip_updates(counts.version, counts.tally.applied)
        if state is None:
            for replica, position in enumerate(self._context.positions):
                self._durations.skip(replica, position.attempt, position.clock)
            for attempt in held_attempts(resume, like) if self._context.keeps_policy else ():
                self._attempts.hold(attempt)
        else:
            self._restore_exactly(state, resume)
        for replica in own_states.saved_states(self._context):
            own = self._computer.replica(replica)
            assert isinstance(own, LocalSGD), "the policy is the same"
            own_states.restore_replica(self._context, replica, own, like.layout)

    def _restore_exactly(self, state: VirtualState, resume: ResumePoint) -> None:
        """Go on with all that was under way."""
        like = self._optimizer.state
        self._now = state.now_s
        read = ReadStates(resume, like, self._shared_state, keep=self._context.keeps_read)
        attempts = list(restored_attempts(state.attempts.attempts, resume, like, read))
        self._attempts.restore(state.attempts, attempts, read)
        for attempt, _ in attempts:
            if attempt.measured is None:
                self._computer.begin(attempt)
        self._resumed.update(state.attempts.queue)
        self._hosts.restore(state.network)
        self._observer.restore(state.observer, resume.checkpoint)
        if self._estimator is not None and state.noise is not None:
            self._estimator.restore(state.noise, resume.checkpoint, like)

    # ----------------------------------------------------------------------------------------------- the end, the start

    def _result(self, signal: str | None) -> Outcome:
        timing, workers = self._timing, self._attempts.figures(self._context.per_step)
        notes: dict[str, str | int | float] = {"gradient_batching": self._computer.rule, **self._checkpointer.notes()}
        if self._job.strategy.spread and not (self._job.times or Times()).all_measured:
            notes["time_of_one_process"] = timing.factor
        if timing.needs is not None:
            notes["part_dependencies"] = str(timing.needs)
        if self._durations.measured_s is not None:
            notes["compute_measured_s"] = self._durations.measured_s
        history, exits = self._loop.history, self._loop.exits
        account = history.account(self._now, workers, exits, notes, interrupted=signal is not None, signal=signal)
        model = write(self._job.program.build(), self._optimizer.state)
        spans = [s for s in self._attempts.spans if s.start_ns < self._now * 1e9]
        return Outcome(model.state_dict(), model, history.records, account, spans)
