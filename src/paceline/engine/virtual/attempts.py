"""Attempts under way in virtual time: their events, each replica's timeline, and spans.

::

    without a network   |- pull -|-- compute --|- delay -|- push -|     one event, the arrival: all is known before
    over a network      granted at 1, computing from 2 to 3, arriving until 4
                        1- pull -2-- compute --|- delay -3- push -4     1, 3 and 4 are events: at 1 and 3 a message is
                                                                        handed to the network, in order of time
    pull_ahead          2-- compute --|- delay -|                       from the end of the attempt before, and of its
                           1- pull -|           3- push -4              pull, on; 3 comes once both are done
"""

from collections.abc import Iterable, Sequence
from typing import final

from paceline.aggregation.base import Apply
from paceline.clock.network import Traffic
from paceline.clock.times import EventQueue
from paceline.core.data_order import BatchRange
from paceline.core.records import WorkerFigures
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.run_context import RunContext
from paceline.engine.step_profile.forecast import ReplicaTiming, virtual_span
from paceline.engine.virtual.durations import AttemptTimes, MeasuredDurations, SampledDurations
from paceline.engine.virtual.pending_delta import PendingDelta, Phase, ReplicaTimeline
from paceline.engine.virtual.saved_state import AttemptsState, ReadStates, attempt_state
from paceline.replica.flat_state import FlatState
from paceline.trace.spans import Span


@final
class Attempts:
    """Attempts of all replicas, from their grant to the end of their Δ.

    Args:
        context: of the run.
        durations: of the parts of an attempt.
        traffic: messages over a network; None: durations say how long they take.
        timing: of a replica of several workers.
    """

    def __init__(
        self,
        context: RunContext,
        durations: SampledDurations | MeasuredDurations,
        traffic: Traffic | None,
        timing: ReplicaTiming,
    ) -> None:
        self._durations, self._traffic, self._timing = durations, traffic, timing
        self._trace, self._pull_ahead = context.job.trace, context.job.strategy.pull_ahead
        self._keeps_read = context.keeps_read
        self.timelines = [ReplicaTimeline(position) for position in context.positions]
        self._events: EventQueue[PendingDelta] = EventQueue()
        self.arrived: dict[tuple[ReplicaId, Clock], PendingDelta] = {}
        """Those whose Δ has arrived, and was neither applied nor discarded."""
        self.under_way: dict[PendingDelta, None] = {}
        """Those, and the ones that have not arrived, in the order in which they began."""
        self.ahead: dict[ReplicaId, FlatState] = {}
        """The A that the next attempt of each replica reads which pulls ahead."""
        self._has: dict[ReplicaId, Version] = {}
        """The A that each replica was sent last over the network."""
        self.spans: list[Span] = []

    @property
    def next_s(self) -> Seconds:
        """Return when the next event happens; infinity where there is none."""
        return self._events.next_s

    def __bool__(self) -> bool:
        """Return whether there is an event to come."""
        return bool(len(self._events))

    def new(self, replica: ReplicaId, sent: FlatState, batches: BatchRange) -> PendingDelta:
        """Return a replica's next attempt; it reads the A that is sent, or with pull_ahead the one before."""
        timeline, read = self.timelines[replica], sent
        if self._pull_ahead:
            read = self.ahead.get(replica, sent)
            self.ahead[replica] = sent
        numbers = replica, timeline.clock + 1, read.version
        return PendingDelta(*numbers, read, timeline.micro_clock, batches, self._keeps_read)

    def begin(self, attempt: PendingDelta, now_s: Seconds, end_s: Seconds) -> None:
        """Let a replica begin an attempt in a run that lasts until ``end_s``."""
        times = self._durations.attempt(attempt.replica, attempt.micro_steps)
        timeline = self.timelines[attempt.replica]
        timeline.begin(attempt)
        self.under_way[attempt] = None
        if self._traffic is not None:
            attempt.work_s = times.compute, times.delay
            self._schedule(attempt, "granted", now_s)
            return
        ahead = timeline.ahead_s is not None
        done_s = self._work(attempt, times, now_s, now_s + times.pull, end_s)
        self._schedule(attempt, "arriving", done_s + times.push if ahead else now_s + sum(times))

    def next(self, end_s: Seconds) -> PendingDelta | None:
        """Take the next event; return the attempt whose Δ has arrived, or None if none has."""
        attempt = self._events.pop()
        if attempt.void:
            return None
        if attempt.phase == "arriving":
            self.timelines[attempt.replica].arrive(attempt)
            self.arrived[attempt.replica, attempt.clock] = attempt
            return attempt
        replica, now_s, traffic = attempt.replica, attempt.due_s, self._traffic
        assert traffic is not None, "phases before the arrival are those of a network"
        if attempt.phase == "granted":
            has = self._has.get(replica) == attempt.version and not self._pull_ahead
            from_s = traffic.pull(replica, now_s, has=has)
            self._has[replica] = attempt.version
            compute_s, delay_s = attempt.work_s
            times = AttemptTimes(from_s - now_s, compute_s, delay_s, 0.0)
            self._schedule(attempt, "computing", self._work(attempt, times, now_s, from_s, end_s))
        else:
            self._schedule(attempt, "arriving", traffic.push(replica, now_s))
            if self._trace:
                self.spans.append(virtual_span(replica, "push", attempt.clock, now_s, attempt.due_s))
        return None

    def stop(self, replica: ReplicaId, now_s: Seconds, end_s: Seconds) -> PendingDelta | None:
        """End the attempt of a replica, whose Δ will not arrive, and return it; None: it is at none."""
        timeline = self.timelines[replica]
        attempt = timeline.attempt
        self.ahead.pop(replica, None)
        self._has.pop(replica, None)
        timeline.ahead_s = None  # also where it is at none: it may come back much later
        if attempt is not None:
            attempt.void = True
            del self.under_way[attempt]
            timeline.stop(attempt, now_s, end_s)
        return attempt

    def kept(self, action: Apply) -> list[FlatState]:
        """Return the A that each Δ of an update was computed of; none where that is not kept."""
        if not self._keeps_read:
            return []
        attempts = [self.arrived[a.replica, a.clock] for a, _ in action.deltas]
        return [each.read for each in attempts if each.read is not None]

    def take(self, replica: ReplicaId, clock: Clock) -> PendingDelta | None:
        """Return an attempt whose Δ is to be applied or discarded; None: it was taken before."""
        attempt = self.arrived.pop((replica, clock), None)
        if attempt is not None:
            del self.under_way[attempt]
        return attempt

    def figures(self, per_step: int) -> list[WorkerFigures]:
        """Return the steps, of so many micro-steps, and the busy time of each replica."""
        return [
            WorkerFigures(replica, 0, 0, each.micro_steps // per_step, each.busy_s, None, None, None, None)
            for replica, each in enumerate(self.timelines)
        ]

    def state(self, end_s: Seconds) -> AttemptsState:
        """Return the state between two events of a run that lasts until ``end_s``."""
        begun = (attempt_state(each, arrived=(each.replica, each.clock) in self.arrived) for each in self.under_way)
        queue = (attempt.replica for attempt in self._events if not attempt.void)
        ahead = ((replica, state.version) for replica, state in self.ahead.items())
        timelines = (each.state(end_s) for each in self.timelines)
        return AttemptsState(tuple(begun), tuple(queue), tuple(timelines), tuple(ahead), tuple(self._has.items()))

    def restore(self, state: AttemptsState, attempts: Iterable[tuple[PendingDelta, bool]], read: ReadStates) -> None:
        """Go on where a run stopped, with its attempts, and whether each has arrived; ``read``: what they had read."""
        self.ahead = {replica: read.of(version) for replica, version in state.ahead}
        self._has = dict(state.has)
        for replica, (timeline, saved) in enumerate(zip(self.timelines, state.timelines, strict=True)):
            timeline.restore(saved)
            self._durations.skip(replica, saved.clock, saved.micro_clock)
        for attempt, arrived in attempts:
            if arrived:
                self.hold(attempt)
            else:
                self.under_way[attempt] = None
                self.timelines[attempt.replica].attempt = attempt
        for replica in state.queue:
            waiting = self.timelines[replica].attempt
            assert waiting is not None, "it is at one"
            self._events.push(waiting.due_s, waiting)

    def hold(self, attempt: PendingDelta) -> None:
        """Add an attempt whose Δ had arrived before the run was resumed."""
        self.under_way[attempt] = None
        self.arrived[attempt.replica, attempt.clock] = attempt

    def _schedule(self, attempt: PendingDelta, phase: Phase, due_s: Seconds) -> None:
        attempt.phase, attempt.due_s = phase, due_s
        self._events.push(due_s, attempt)

    def _work(
        self, attempt: PendingDelta, times: AttemptTimes, now_s: Seconds, from_s: Seconds, end_s: Seconds
    ) -> Seconds:
        """Record an attempt that was granted at ``now_s`` and has its A at ``from_s``; return when its Δ is there."""
        timeline = self.timelines[attempt.replica]
        ahead_s, busy_s = timeline.ahead_s, times.compute + times.delay
        began_s = from_s if ahead_s is None else ahead_s
        done_s = max(began_s + busy_s, from_s)
        if self._trace:
            if ahead_s is None:
                spans = times.spans(attempt.replica, attempt.clock, timeline.arrived_s, now_s)
            else:  # what the replica pulls meanwhile, and only then waits for
                spans = times._replace(pull=0.0, push=0.0).spans(attempt.replica, attempt.clock, None, began_s)
                if done_s > began_s + busy_s:
                    spans.append(virtual_span(attempt.replica, "wait", attempt.clock, began_s + busy_s, done_s))
                if times.push:
                    spans.append(virtual_span(attempt.replica, "push", attempt.clock, done_s, done_s + times.push))
            self._record(attempt, spans, began_s, times.compute)
        timeline.work_for(busy_s, began_s, end_s)
        if self._pull_ahead:
            timeline.ahead_s = done_s
        return done_s

    def _record(self, attempt: PendingDelta, spans: Sequence[Span], began: Seconds, compute_s: Seconds) -> None:
        """Record the spans of a replica, and of its workers where it is a pipeline, which compute from ``began`` on."""
        if not self._timing.actions:
            self.spans += spans
            return
        self.spans += [span for span in spans if span.action != "compute"]
        alone = compute_s / attempt.micro_steps
        for i in range(attempt.micro_steps):
            begins = began + i * alone
            self.spans += self._timing.spans(attempt.replica, attempt.clock, begins, alone / self._timing.factor)
