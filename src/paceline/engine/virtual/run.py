"""One run in virtual time.

::

    replica r   |- pull -|-- compute --|- delay -|- push -|                            |- pull -|-- compute --
    server                                          queue |- apply + K · gradient -|

An event is the arrival of a Δ. The server takes arrivals one at a time in the order in which they came; what the
policy decides for one is done before the next is looked at.
"""

import math
from contextlib import nullcontext

from paceline.aggregation.base import Apply, Arrival
from paceline.clock.event_queue import EventQueue
from paceline.clock.times import Times
from paceline.core.delta import Gradient
from paceline.core.records import WorkerFigures
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Watcher
from paceline.engine.coordinator import Coordinator
from paceline.engine.evaluation import Evaluator
from paceline.engine.noise_scale import NoiseAccumulator, NoiseEstimator, Seen
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.run_history import RunHistory
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.engine.sigint import Interruptible
from paceline.engine.step_profile.predict import forecast
from paceline.engine.step_profile.replica_timing import ReplicaTiming, replica_timing
from paceline.engine.virtual.durations import Drawn, Durations, SampledDurations, lane, measure, span
from paceline.engine.virtual.measured_durations import MeasuredDurations
from paceline.engine.virtual.pending_delta import Computer, PendingDelta, ReplicaTimeline, Streams, ordered_batches
from paceline.engine.virtual.user_loops import Loops
from paceline.engine.virtual.vmap_gradients import Stacked, stackable
from paceline.replica.base import Replica
from paceline.replica.flat_state import FlatState, write
from paceline.trace.spans import SERVER, Span


class _TimeUp(Exception):  # noqa: N818 (an end, not an error)
    """The budget's last second has passed, or the condition is met."""


class VirtualRun:
    """One run; the hands of its coordinator."""

    def __init__(self, job: Job, watch: Watcher) -> None:
        self._job, self._watch = job, watch
        self._setup = setup = RunContext.of(job)
        self._module, state = first_state(job.program, job.running_buffers)
        self._noise = NoiseAccumulator(setup.reference_batch) if job.noise_scale else None
        self._meter = NoiseEstimator(self._noise) if self._noise else None
        self._owner = ServerOptimizer(job.program, setup.policy, state, self._meter)
        self._observer = DeltaStatistics(setup.policy, self._owner)
        self._streams = Streams(setup.batches)
        self._loops = Loops(job.loop, setup.replicas, self._streams.of) if job.loop else None
        self._computer = self._make_computer()
        self._teamwork, self._durations = self._make_durations()
        self._coordinator = Coordinator(setup.policy, setup.replicas, setup.allowance(), self)
        self._chronicle = RunHistory(setup, self._coordinator, state.digest(), self._noise)
        self._scorer = Evaluator(job.program, job.program.build())
        self._eager = self._must_look()
        self._end = job.budget.amount if job.budget.unit == "seconds" and job.budget.amount else math.inf
        self._now: Seconds = 0.0
        self._events: EventQueue[PendingDelta] = EventQueue()
        self._lanes = [ReplicaTimeline() for _ in range(setup.replicas)]
        self._pushed: dict[tuple[ReplicaId, int], PendingDelta] = {}
        self._snapshot: FlatState | None = None
        self._spans: list[Span] = []

    def outcome(self) -> Outcome:
        """Run to the end."""
        with self._streams, self._loops or nullcontext():
            interrupted = self._carry()
        self._coordinator.finish()
        if not self._chronicle.stands_at(self._now):
            self._score(self._now)
        return self._result(interrupted)

    def _carry(self) -> bool:
        """Make all turns; whether Ctrl-C ended them."""
        with Interruptible(lambda: None) as interrupts:
            try:
                self._begin()
                while not self._coordinator.idle and not interrupts.heard:
                    self._turn()
            except _TimeUp:
                self._now = self._end
            except KeyboardInterrupt:
                return True
            return interrupts.heard > 0

    def _begin(self) -> None:
        if self._job.budget.unit != "seconds" and self._chronicle.point_reached(0.0):
            self._look(0.0)
        self._coordinator.begin()

    def _turn(self) -> None:
        if not self._events:
            raise self._coordinator.deadlock()
        start = max(self._events.next_s, self._now)
        self._score_before(start)
        if start > self._end:
            raise _TimeUp
        attempt = self._events.pop()
        if attempt.void:
            return
        self._now = start
        self._arrive(attempt)
        if self._job.budget.unit != "seconds" and self._chronicle.point_reached(start):
            self._look(self._now)

    def _arrive(self, attempt: PendingDelta) -> None:
        self._lanes[attempt.replica].arrive(attempt)
        self._pushed[attempt.replica, attempt.clock] = attempt
        if self._eager:
            self._compute(attempt)
        self._coordinator.arrived(self._arrival(attempt))

    def _arrival(self, attempt: PendingDelta) -> Arrival:
        measured = attempt.measured if self._eager else None
        return Arrival(
            replica=attempt.replica,
            version=attempt.version,
            clock=attempt.clock,
            samples=measured.samples if measured else self._samples(attempt),
            time_s=self._now,
            finite=measured.finite if measured else True,
            loss=measured.loss if measured and measured.samples else None,
            observed=self._observer.observe(attempt.out, self._now),
        )

    def _samples(self, attempt: PendingDelta) -> int:
        assert self._setup.order is not None, "Δs of a data source are computed as they arrive"
        first = attempt.first_micro_step
        return sum(self._setup.order.size(attempt.replica, first + i) for i in range(attempt.micro_steps))

    # ------------------------------------------------------------------------------------------ hands: what is decided

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        mine = self._lanes[replica]
        if self._snapshot is None:
            self._snapshot = self._owner.state.clone()
        version = self._coordinator.version
        attempt = PendingDelta(replica, mine.clock + 1, version, self._snapshot, mine.micro_clock, micro_steps)
        if self._loops is not None and not self._walk(attempt, self._loops):
            self._coordinator.retire(replica)
            return
        drawn = self._durations.draw(replica, attempt.micro_steps)
        attempt.arrives_s = self._now + drawn.total
        if self._job.trace:
            self._spans += self._drawn_lanes(attempt, mine.arrived_s, drawn)
        mine.begin(attempt, drawn.busy, self._now + drawn.pull, self._end)
        self._computer.begin(attempt)
        self._events.push(attempt.arrives_s, attempt)

    def _drawn_lanes(self, attempt: PendingDelta, waited_from: Seconds | None, drawn: Drawn) -> list[Span]:
        """Of a replica, and of its workers where it is a pipeline."""
        spans = lane(attempt.replica, attempt.clock, waited_from, self._now, drawn)
        if not self._teamwork.actions:
            return spans
        alone, began = drawn.compute / attempt.micro_steps, self._now + drawn.pull
        passes = (
            self._teamwork.lanes(attempt.replica, attempt.clock, began + i * alone, alone / self._teamwork.factor)
            for i in range(attempt.micro_steps)
        )
        return [*(s for s in spans if s.action != "compute"), *(s for each in passes for s in each)]

    def _walk(self, attempt: PendingDelta, loops: Loops) -> bool:
        """Let the user's loop make this attempt's micro-steps; False where it ended before the last of them."""
        for _ in range(attempt.micro_steps):
            batch = loops.next(attempt.replica)
            if batch is None:
                return False
            loops.took(attempt.replica, self._computer.step(attempt, batch))
        return True

    def apply(self, action: Apply) -> None:
        began = self._now
        self._now += self._durations.update(len(action.deltas))
        self._score_before(self._now)
        if self._now > self._end:
            raise _TimeUp
        self._update(action)
        self._snapshot = None
        self._observer.applied(self._now - began)
        if self._job.trace and self._now > began:
            self._spans.append(span(SERVER, "apply", self._coordinator.version + 1, began, self._now))

    def _update(self, action: Apply) -> None:
        seen = (self._used(arrival, weight) for arrival, weight in action.deltas)
        if self._meter is None:
            self._owner.apply(((s.delta, s.weight) for s in seen), action.rate, alone=action.alone)
        else:
            self._owner.apply(self._meter.through(seen, len(action.deltas)), action.rate, alone=action.alone)
            self._meter.updated()

    def _used(self, arrival: Arrival, weight: float) -> Seen:
        attempt = self._pushed.pop((arrival.replica, arrival.clock))
        if not self._eager:
            self._compute(attempt)
        assert attempt.out is not None
        assert attempt.measured is not None
        return Seen(attempt.out, weight, attempt.measured.samples, attempt.version, attempt.measured.micro)

    def _compute(self, attempt: PendingDelta) -> None:
        self._computer.compute(attempt)
        assert attempt.measured is not None
        self._chronicle.heard(attempt.measured.loss, attempt.measured.samples)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            attempt = self._pushed.pop((arrival.replica, arrival.clock), None)
            if attempt is not None:  # an update that Ctrl-C broke off has taken it
                self._computer.forget(attempt)

    def cancel(self, replica: ReplicaId) -> None:
        mine = self._lanes[replica]
        if mine.attempt is not None:
            mine.attempt.void = True
            self._computer.forget(mine.attempt)
            mine.stop(mine.attempt, self._now, self._end)
        self._coordinator.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        if self._loops is not None:
            self._loops.dismiss(replica)

    # --------------------------------------------------------------------------------------------------------- scoring

    def _score_before(self, time_s: Seconds) -> None:
        """Score the points of a budget in seconds that lie before ``time_s``."""
        if self._job.budget.unit != "seconds":
            return
        points = self._chronicle.points
        while points.next < time_s and points.next <= self._end * (1 + 1e-12):
            self._look(min(points.step_over(), self._end))

    def _look(self, time_s: Seconds) -> None:
        """Score A; the run ends here where the condition is met."""
        if self._score(time_s) and self._end > time_s:
            self._end = time_s
            raise _TimeUp

    def _score(self, time_s: Seconds) -> bool:
        record = self._scorer.score(self._owner.state, self._chronicle.moment(time_s))
        met = self._chronicle.record(record)
        self._watch(self._chronicle.progress("training", time_s))
        return met

    # ----------------------------------------------------------------------------------------------- the end, the start

    def _result(self, interrupted: bool) -> Outcome:
        per_step = self._setup.per_step
        workers = [
            WorkerFigures(r, 0, 0, mine.micro_steps // per_step, mine.busy_s, None, None, None, None)
            for r, mine in enumerate(self._lanes)
        ]
        notes: dict[str, str | int | float] = {"gradient_batching": self._computer.rule}
        if self._job.strategy.spread and not (self._job.times or Times()).all_measured:
            notes["time_of_one_process"] = self._teamwork.factor
        if self._teamwork.needs is not None:
            notes["parts_need"] = str(self._teamwork.needs)
        if self._durations.measured_s is not None:
            notes["compute_measured_s"] = self._durations.measured_s
        account = self._chronicle.account(self._now, workers, (), notes, interrupted=interrupted)
        model = write(self._job.program.build(), self._owner.state)
        spans = [s for s in self._spans if s.start_ns < self._now * 1e9]
        return Outcome(model.state_dict(), model, self._chronicle.history, account, spans)

    def _must_look(self) -> bool:
        """Whether Δs are computed as they arrive rather than when an update needs them."""
        job, setup = self._job, self._setup
        asked = "loss" in setup.policy.needs or self._observer.looks_inside or job.on_nonfinite == "skip"
        bound = setup.owns_steps or setup.order is None or self._loops is not None
        return asked or bound or bool(job.program.loader.get("num_workers"))

    def _make_computer(self) -> Computer:
        job, setup = self._job, self._setup
        layout, stop, order = self._owner.state.layout, job.on_nonfinite == "stop", setup.order

        def make(replica: ReplicaId) -> Replica:
            return setup.replica(replica, self._module, layout)

        if order is None or job.program.loader.get("num_workers"):
            return Computer(make, self._streams.at, stop=stop)
        batch_at = ordered_batches(job.program, order)
        plain = isinstance(setup.delta, Gradient) and self._loops is None
        if plain and stackable(self._module, job.program, layout, order):
            return Stacked(job.program, self._module, layout, order, make, batch_at, stop=stop)
        return Computer(make, batch_at, stop=stop)

    def _make_durations(self) -> tuple[ReplicaTiming, Durations]:
        job, times = self._job, self._job.times or Times()
        if times.all_measured:
            seen = forecast(job)
            return seen.teamwork, MeasuredDurations(self._setup, seen)
        measured = times.compute == "measured"
        shared = replica_timing(job, measured=measured)
        measured_s = measure(self._setup, job.program.build(), self._owner.state) if measured else None
        return shared, SampledDurations(self._setup, times, measured_s, shared.factor)
