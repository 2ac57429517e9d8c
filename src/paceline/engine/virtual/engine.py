"""The virtual engine: one process, real gradients, simulated time.

::

    replica r   |- pull -|-- compute --|- delay -|- push -|                            |- pull -|-- compute --
    server                                          queue |- apply + K · gradient -|

An event is the arrival of a Δ, or the policy's deadline. The server takes arrivals one at a time in the order in which
they came; what the policy decides for one is executed before the next is taken. A deadline comes after what has arrived
by then, and after what has arrived while the server was busy.
"""

from contextlib import closing, nullcontext
from functools import partial

import torch

from paceline.aggregation.base import Apply, Arrival
from paceline.clock.times import EventQueue, Times
from paceline.core.data_order import BatchRange
from paceline.core.delta import Gradient
from paceline.core.errors import InputError
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import WorkerFigures
from paceline.core.registry import register
from paceline.core.typed_json import to_json
from paceline.core.types import ReplicaId, Seconds
from paceline.engine import own_states
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.evaluation import Evaluator
from paceline.engine.loop import InterruptGuard, RunLoop
from paceline.engine.run_context import RunContext, first_state, own_settings
from paceline.engine.run_state import ResumePoint
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.engine.step_profile.forecast import virtual_span
from paceline.engine.virtual.durations import AttemptTimes, durations_of
from paceline.engine.virtual.pending_delta import (
    BatchSources,
    DeltaComputer,
    PendingDelta,
    ReplicaTimeline,
)
from paceline.engine.virtual.saved_state import (
    KEY,
    VirtualState,
    attempt_chunks,
    attempt_state,
    held_attempts,
    restored_attempts,
)
from paceline.engine.virtual.user_loops import UserLoops
from paceline.engine.virtual.vmap_gradients import VmapComputer, stacked_gradient
from paceline.replica.flat_state import FlatLayout, FlatState, write
from paceline.replica.local_sgd import LocalSGD
from paceline.replica.noise_estimator import NoiseEstimator, ObservedDelta
from paceline.support import ENGINE_FEATURES
from paceline.trace.spans import SERVER, Span


@register("virtual")
class VirtualEngine(Engine):
    """Deterministic: the same job gives the same bytes on one machine and build, whatever its load."""

    name = "virtual"
    features = ENGINE_FEATURES[name]

    def refuse(self, job: Job) -> None:
        times = job.times or Times()
        parts = (times.compute, times.transfer, times.apply, times.gradient)
        timeless = all(not isinstance(part, str) and part.mean_s == 0 for part in parts)
        if job.budget.unit == "seconds" and timeless:
            raise InputError(
                f"times={str(job.times)!r}: nothing takes time, so seconds never pass; write compute=0.01, or steps="
            )

    def run(self, job: Job, watch: Watcher) -> Outcome:
        with own_settings():
            torch.set_num_threads(job.strategy.threads or 1)
            torch.default_generator.manual_seed(job.program.seed)  # what samples draw as they are read
            return VirtualRun(job, watch).outcome()


class _TimeUp(Exception):  # noqa: N818 (an end, not an error)
    """Raised at the end of the budget's last second, or when the condition is met."""


class VirtualRun:
    """One run; executes its coordinator's decisions."""

    def __init__(self, job: Job, watch: Watcher) -> None:
        self._job, self._watch = job, watch
        saved = VirtualState.of(RunContext(job))
        self._context = context = RunContext(job, has_held=saved is not None)
        self._module, state = first_state(job.program, job.running_buffers)
        noise = NoiseAccumulator(context.reference_batch) if job.noise_scale else None
        self._estimator = NoiseEstimator(noise) if noise else None
        self._optimizer = ServerOptimizer(job.program, context.policy, state, self._estimator)
        self._observer = DeltaStatistics(context.policy, self._optimizer)
        digest, positions = state.digest(), context.positions
        if job.resume is not None:
            self._optimizer.restore(job.resume)
        self._sources = BatchSources(context.batches)
        own = lambda replica: self._sources.of(replica).stream(replica, context.first_batch(replica))  # noqa: E731
        self._user_loops = UserLoops(job.loop, context.replicas, own) if job.loop else None
        self._computer = self._delta_computer()
        self._timing, self._durations = durations_of(context)
        self._now: Seconds = 0.0
        self._events: EventQueue[PendingDelta] = EventQueue()
        self._timelines = [ReplicaTimeline(position) for position in positions]
        self._arrived: dict[tuple[ReplicaId, int], PendingDelta] = {}
        self._under_way: dict[PendingDelta, None] = {}
        """Attempts that were neither applied nor dropped, in the order in which they began."""
        self._resumed: set[ReplicaId] = set()
        """Replicas that are at work on an attempt that began before the run was resumed."""
        self._snapshot: FlatState | None = None
        """Copy of A as it is, shared by all attempts that read this version."""
        self._spans: list[Span] = []
        self._last_s: Seconds | None = None
        """Time of the last event, once the budget's time is over."""
        self._consistent = True
        """False once an event was broken off."""
        self._restore(saved)
        self._loop = RunLoop(context, self, digest, self._evaluate, noise=noise)
        if saved is not None:  # the timelines go on
            self._loop.history.earlier = 0.0, ()
        for timeline in self._timelines:
            timeline.count_busy_time(self._loop.end_s)
        self._checkpointer = Checkpointer(context, self._loop, self._take_snapshot)
        self._coordinator = self._loop.coordinator
        self._evaluator = Evaluator(job.program, job.program.build())
        # Δs are computed as they arrive, rather than when an update needs them, where a decision depends on them, or
        # their data or state come in the order of arrivals.
        depends = "loss" in context.policy.needs or self._observer.looks_inside or job.on_nonfinite == "skip"
        ordered = context.local_sgd or context.order is None or self._user_loops is not None
        self._eager = depends or ordered or bool(job.program.loader.get("num_workers"))

    def outcome(self) -> Outcome:
        """Run to the end."""
        with closing(self._checkpointer), closing(self._sources), self._user_loops or nullcontext():
            signal = self._train()
            if self._consistent:
                self._checkpointer.finish(self._now)
        self._coordinator.finish()
        if not self._loop.history.is_current(self._now):
            self._record(self._now)
        return self._result(signal)

    def _train(self) -> str | None:
        """Handle all arrivals; return the name of the signal that ended the run, if one did."""
        with InterruptGuard(lambda: None) as interrupts:
            try:
                if self._loop.condition_met:
                    raise _TimeUp
                if not self._loop.timed:
                    self._loop.evaluate_if_due(self._now)
                self._coordinator.begin()
                while self._coordinator.present and not interrupts.count:
                    self._next_event()
            except _TimeUp:
                self._last_s, self._now = self._now, self._loop.end_s
            except KeyboardInterrupt:
                self._consistent = False
                return interrupts.first or "SIGINT"
            return interrupts.first

    def _next_event(self) -> None:
        deadline, start = (max(s, self._now) for s in (self._coordinator.deadline, self._events.next_s))
        expires = deadline < start
        if expires:
            start = deadline
        elif not self._events:
            raise self._coordinator.deadlock()
        self._loop.evaluate_before(start)
        if start > self._loop.end_s:
            raise _TimeUp
        if expires:
            self._now = start
            self._coordinator.tick(start)
            self._handled()
            return
        attempt = self._events.pop()
        if attempt.void:
            return
        self._now = start
        self._timelines[attempt.replica].arrive(attempt)
        self._arrived[attempt.replica, attempt.clock] = attempt
        if self._eager:
            self._computer.compute(attempt)
        measured = attempt.measured if self._eager else None
        if measured is not None:
            samples = measured.samples
        else:
            order, batches = self._context.order, attempt.batches
            assert order is not None, "Δs of a data source are computed as they arrive"
            samples = sum(order.size(batches.stream, k) for k in batches.numbers)
        arrival = Arrival(
            replica=attempt.replica,
            version=attempt.version,
            clock=attempt.clock,
            samples=samples,
            time_s=start,
            finite=measured.finite if measured else True,
            loss=measured.loss if measured and samples else None,
            observed=self._observer.observe(attempt.out, start),
        )
        self._loop.arrived(arrival)
        self._handled()

    def _handled(self) -> None:
        self._loop.handled(self._now)
        self._checkpointer.save_if_due(self._now)

    # --------------------------------------------------------------------------------- execution of decisions, in order

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        if replica in self._resumed:
            self._resumed.remove(replica)
            return
        timeline = self._timelines[replica]
        version, first = self._coordinator.version, timeline.micro_clock
        read = self._shared_state()
        read.version = version
        attempt = PendingDelta(replica, timeline.clock + 1, version, read, first, batches)
        if self._user_loops is not None:
            # The user's loop makes this attempt's micro-steps now; one that ends before the last of them retires.
            for _ in batches.numbers:
                batch = self._user_loops.next(replica)
                if batch is None:
                    self._coordinator.retire(replica)
                    return
                self._user_loops.losses[replica] = self._computer.step(attempt, batch)
        times = self._durations.attempt(replica, batches.size)
        attempt.arrives_s = self._now + (times.pull + times.compute + times.delay + times.push)
        if self._job.trace:
            self._trace(attempt, timeline.arrived_s, times)
        timeline.begin(attempt, times.compute + times.delay, self._now + times.pull, self._loop.end_s)
        self._computer.begin(attempt)
        self._under_way[attempt] = None
        self._events.push(attempt.arrives_s, attempt)

    def _shared_state(self) -> FlatState:
        if self._snapshot is None:
            self._snapshot = self._optimizer.state.clone()
        return self._snapshot

    def _trace(self, attempt: PendingDelta, waited_from: Seconds | None, times: AttemptTimes) -> None:
        """Record the spans of a replica, and of its workers where it is a pipeline."""
        spans = times.spans(attempt.replica, attempt.clock, waited_from, self._now)
        if not self._timing.actions:
            self._spans += spans
            return
        self._spans += [span for span in spans if span.action != "compute"]
        alone, began = times.compute / attempt.micro_steps, self._now + times.pull
        for i in range(attempt.micro_steps):
            at = began + i * alone
            self._spans += self._timing.spans(attempt.replica, attempt.clock, at, alone / self._timing.factor)

    def apply(self, action: Apply) -> None:
        began = self._now
        ends = began + self._durations.update(len(action.deltas))
        self._loop.evaluate_before(ends)
        if ends > self._loop.end_s:
            raise _TimeUp
        self._now = ends
        # Generators: each Δ is computed when it is added to the sum, and let go before the next one.
        seen = (self._take(arrival, weight) for arrival, weight in action.deltas)
        if self._estimator is None:
            deltas = ((s.delta, s.weight) for s in seen)
            self._optimizer.apply(deltas, action.rate, alone=action.alone, version=self._coordinator.version)
        else:
            observed = self._estimator.through(seen, len(action.deltas))
            self._optimizer.apply(observed, action.rate, alone=action.alone)
            self._estimator.updated()
        self._snapshot = None
        self._observer.applied(self._now - began)
        if self._job.trace and self._now > began:
            self._spans.append(virtual_span(SERVER, "apply", self._coordinator.version + 1, began, self._now))

    def _take(self, arrival: Arrival, weight: float) -> ObservedDelta:
        attempt = self._arrived.pop((arrival.replica, arrival.clock))
        del self._under_way[attempt]
        if not self._eager:
            self._computer.compute(attempt)
        assert attempt.out is not None
        measured = attempt.measured
        assert measured is not None
        if not self._eager:
            self._loop.history.add_loss(measured.loss, measured.samples)
        return ObservedDelta(attempt.out, weight, measured.samples, attempt.version, measured.micro)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            attempt = self._arrived.pop((arrival.replica, arrival.clock), None)
            if attempt is not None:  # None: taken by an update that Ctrl-C broke off
                self._computer.forget(attempt)
                del self._under_way[attempt]

    def cancel(self, replica: ReplicaId) -> None:
        timeline = self._timelines[replica]
        if timeline.attempt is not None:
            timeline.attempt.void = True
            del self._under_way[timeline.attempt]
            self._computer.forget(timeline.attempt)
            timeline.stop(timeline.attempt, self._now, self._loop.end_s)
        self._coordinator.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        if self._user_loops is not None:
            self._user_loops.dismiss(replica)

    # ------------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, time_s: Seconds) -> None:
        """Evaluate A; the run ends here if the condition is met."""
        self._record(time_s)
        if self._loop.condition_met and self._loop.end_s > time_s:
            self._loop.end_s = time_s
            raise _TimeUp

    def _record(self, time_s: Seconds) -> None:
        history = self._loop.history
        self._loop.keep([self._evaluator.score(self._optimizer.state, history.snapshot(time_s))])
        self._watch(history.progress("training", time_s))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _take_snapshot(self) -> Snapshot:
        """Return all that the run has, between two events."""
        attempts, optimizer, version = [*self._under_way], self._optimizer, self._coordinator.version
        own = {r: each for r, each in self._computer.replicas.items() if isinstance(each, LocalSGD)}
        saved = {r: json for r, each in own.items() if (json := each.state_json()) is not None}
        state = VirtualState(
            self._now if self._last_s is None else self._last_s,
            tuple(attempt_state(each, arrived=(each.replica, each.clock) in self._arrived) for each in attempts),
            tuple(timeline.state(self._loop.end_s) for timeline in self._timelines),
            self._observer.state_json(),
            self._estimator.state_json() if self._estimator else None,
        )
        chunks = [*optimizer.chunks(), *attempt_chunks(attempts, version), *self._observer.chunks()]
        if self._estimator is not None:
            chunks += self._estimator.chunks(FlatLayout(optimizer.state.layout.parameters, ()))
        chunks += [chunk for r in saved for chunk in own_states.replica_chunks(r, own[r])]
        engine = {KEY: to_json(state), own_states.KEY: to_json(saved)}
        return Snapshot(chunks, optimizer.flat_optimizer.state_json(), engine)

    def _restore(self, state: VirtualState | None) -> None:
        """Go on where a run stopped; without a ``state`` all replicas begin with the A of the checkpoint."""
        resume, layout = self._job.resume, self._optimizer.state.layout
        if resume is None:
            return
        counts = resume.run.coordinator
        self._durations.skip_updates(counts.version, counts.tally.applied)
        if state is None:
            self._now = resume.run.seconds
            for replica, position in enumerate(self._context.positions):
                self._durations.skip(replica, position.attempt, position.clock)
            for attempt in held_attempts(resume, layout) if self._context.keeps_policy else ():
                self._arrived[attempt.replica, attempt.clock] = attempt
                self._under_way[attempt] = None
        else:
            self._restore_exactly(state, resume)
        for replica in own_states.saved_states(self._context):
            own = self._computer.replica(replica)
            assert isinstance(own, LocalSGD), "the policy is the same"
            own_states.restore_replica(self._context, replica, own, layout)

    def _restore_exactly(self, state: VirtualState, resume: ResumePoint) -> None:
        """Go on with all that was under way."""
        layout = self._optimizer.state.layout
        self._now = state.now_s
        for replica, (timeline, saved) in enumerate(zip(self._timelines, state.timelines, strict=True)):
            timeline.restore(saved)
            self._durations.skip(replica, saved.clock, saved.micro_clock)
        for attempt, arrived in restored_attempts(state.attempts, resume, layout, self._shared_state):
            self._under_way[attempt] = None
            if attempt.measured is None:
                self._computer.begin(attempt)
            if arrived:
                self._arrived[attempt.replica, attempt.clock] = attempt
            else:
                self._events.push(attempt.arrives_s, attempt)
                self._timelines[attempt.replica].attempt = attempt
                self._resumed.add(attempt.replica)
        self._observer.restore(state.observer, resume.checkpoint)
        if self._estimator is not None and state.noise is not None:
            self._estimator.restore(state.noise, resume.checkpoint, FlatLayout(layout.parameters, ()))

    # ----------------------------------------------------------------------------------------------- the end, the start

    def _result(self, signal: str | None) -> Outcome:
        per_step, timing = self._context.per_step, self._timing
        workers = [
            WorkerFigures(r, 0, 0, timeline.micro_steps // per_step, timeline.busy_s, None, None, None, None)
            for r, timeline in enumerate(self._timelines)
        ]
        notes: dict[str, str | int | float] = {"gradient_batching": self._computer.rule, **self._checkpointer.notes()}
        if self._job.strategy.spread and not (self._job.times or Times()).all_measured:
            notes["time_of_one_process"] = timing.factor
        if timing.needs is not None:
            notes["parts_need"] = str(timing.needs)
        if self._durations.measured_s is not None:
            notes["compute_measured_s"] = self._durations.measured_s
        history = self._loop.history
        account = history.account(self._now, workers, (), notes, interrupted=signal is not None, signal=signal)
        model = write(self._job.program.build(), self._optimizer.state)
        spans = [s for s in self._spans if s.start_ns < self._now * 1e9]
        return Outcome(model.state_dict(), model, history.records, account, spans)

    def _delta_computer(self) -> DeltaComputer:
        job, context = self._job, self._context
        layout, stop, order = self._optimizer.state.layout, job.on_nonfinite == "stop", context.order
        build = partial(context.replica, module=self._module, layout=layout)
        if order is None or job.program.loader.get("num_workers"):
            return DeltaComputer(build, self._sources.at, stop=stop)
        batch_at = context.batches().at
        if isinstance(context.delta, Gradient) and self._user_loops is None:
            gradient = stacked_gradient(self._module, job.program, layout, order)
            if gradient is not None:
                return VmapComputer(gradient, order, build, batch_at, stop=stop)
        return DeltaComputer(build, batch_at, stop=stop)
