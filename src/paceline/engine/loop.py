"""The control loop that all engines share: budget, evaluation points, arrivals, hangs, display, Ctrl-C, history.

Engines differ in where their events come from; what an event means stands here, once::

    local        shared memory, epoll --+
    ray          calls of an actor -----+--> RunLoop --- arrived ---> Coordinator: the policy decides
    distributed  one all-reduce a step -+       |------- evaluate --> the engine's evaluation queue
    virtual      simulated arrivals ----+       |------- watch -----> live display
                                                +------- history ---> records and account
"""

import _thread
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, get_args

from paceline.aggregation.base import Arrival
from paceline.core.errors import NonFiniteError, WaitTimeoutError, WorkerError
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import BudgetUnit, Clock, ReplicaId, Seconds
from paceline.engine.base import RunEvent, Watcher
from paceline.engine.budget import EvalSchedule
from paceline.engine.coordinator import Coordinator, DecisionExecutor
from paceline.engine.run_context import RunContext
from paceline.engine.run_history import RunHistory
from paceline.engine.run_state import RunState

# Longest wait, at the end of a run, until it has been said that it was interrupted.
SAID_S: Seconds = 1.0

# Interval of the live display, and of the checks for hangs.
TICK_S: Seconds = 0.2


def nonfinite_error(loss: float, replica: ReplicaId, clock: Clock) -> NonFiniteError:
    """Build the error that ends a run at a Δ that is not finite, under ``on_nonfinite="stop"``."""
    return NonFiniteError(
        f"the Δ of replica {replica} at its step {clock} is not finite (loss {loss:g}); lower the learning rate, set "
        "clip_norm=, or write on_nonfinite='skip' to discard such Δs and count them"
    )


class RunLoop:
    """The rules of one run's control loop; the engine reports events and the time at which they happened.

    Args:
        context: of the run.
        executor: executes the policy's decisions.
        initial_digest: digest of A_0.
        evaluate: takes a snapshot of A at a training time and has it evaluated.
        watch: receives progress and events of the run; None: another process does.
        noise: accumulates the gradient noise scale; None: it is not measured.
        replicas: that take part at first; None: all.
        parks: whether replicas that have spent their budget may be called back, for others may die.
    """

    def __init__(
        self,
        context: RunContext,
        executor: DecisionExecutor,
        initial_digest: str,
        evaluate: Callable[[Seconds], None],
        watch: Watcher | None = None,
        noise: NoiseAccumulator | None = None,
        *,
        replicas: int | None = None,
        parks: bool = False,
    ) -> None:
        self._job, self._evaluate, self.watch = context.job, evaluate, watch
        self.dispatcher = context.dispatcher()
        run = context.job.resume.run if context.job.resume is not None else None
        saved = run.coordinator if run is not None else None
        self.coordinator = Coordinator(
            context.policy,
            replicas or context.replicas,
            self.dispatcher,
            executor,
            context.positions,
            saved,
            keeps=context.keeps_policy,
            parks=parks,
        )
        self.history = RunHistory(context, self.coordinator, initial_digest, noise)
        budget = context.job.budget
        self.timed = budget.unit == "seconds"
        self.end_s: Seconds = budget.amount if self.timed and budget.amount is not None else math.inf
        self.condition_met = False
        """True once a record has met the condition ``until=`` that ends the run."""
        self.start_s: Seconds = run.seconds if run is not None else 0.0
        """Training time before the run was resumed."""
        self.exits: list[ReplicaExit] = list(run.exits) if run is not None else []
        self.remarks: tuple[str, ...] = ()
        """Sentences about replicas, for the display."""
        self.last_event_s: Seconds = self.start_s
        self._context, passed = context, 0
        if run is not None:
            *interval, passed = run.evaluations
            if interval != [budget.unit, budget.evaluate_every]:
                passed = int(self.history.spent(self.start_s) / budget.evaluate_every) + 1
            self.condition_met = any(budget.until is not None and budget.until.met(r) for r in self.history.records)
        self._schedule = EvalSchedule(budget, passed)
        self._displayed_s: Seconds = -math.inf
        if context.job.checkpoint is not None:
            self.coordinator.state()  # a policy whose state can't be saved is refused now

    def state(self, now: Seconds, engine: Mapping[str, Any] | None = None) -> RunState:
        """Return what of the run is no tensor; only between two events, or after the last.

        Args:
            now: training time.
            engine: what only the engine understands.

        Raises:
            InputError: JSON can't hold the policy's state.
        """
        units: tuple[BudgetUnit, ...] = get_args(BudgetUnit)
        return RunState(
            seconds=now,
            spent={unit: self.history.spent(now, unit) for unit in units},
            per_step=self._context.per_step,
            coordinator=self.coordinator.state(),
            data=self.dispatcher.position,
            history=self.history.state(),
            evaluations=(self._job.budget.unit, self._job.budget.evaluate_every, self._schedule.passed),
            exits=tuple(self.exits),
            engine=engine or {},
        )

    # -------------------------------------------------------------------------------------------- budget and evaluation

    def tick(self, now: Seconds) -> Seconds | None:
        """Evaluate and display what is due; return how long to wait for events, or None at the end of the budget."""
        if now >= self.end_s:
            return None
        self.evaluate_if_due(now)
        self.display(now)
        # A budget in steps or epochs is evaluated as Δs arrive, so the next point is no time to wake at.
        next_point = self._schedule.next if self.timed else math.inf
        return max(0.0, min(next_point, self.end_s, now + TICK_S, self.coordinator.deadline) - now)

    def expire(self, now: Seconds) -> bool:
        """Have the policy decide if its deadline has come within the budget; return whether it has decided anything."""
        decided = now < self.end_s and self.coordinator.tick(now)
        if decided:
            self.handled(now)
        return decided

    def evaluate_if_due(self, now: Seconds) -> None:
        """Have A evaluated if an evaluation point was reached; the point at the end comes after training."""
        if self._schedule.next < self.end_s * (1 - 1e-9) and self._schedule.reached(self.history.spent(now)):
            self._evaluate(now)

    def evaluate_before(self, time_s: Seconds) -> None:
        """Evaluate at each point of a budget in seconds before ``time_s``, where time jumps from event to event."""
        while self.timed and self._schedule.next < time_s and self._schedule.next <= self.end_s * (1 + 1e-12):
            self._evaluate(min(self._schedule.step_over(), self.end_s))

    def evaluate_final(self, now: Seconds, *, moved: bool = False) -> None:
        """Have the last A evaluated, unless it already is and has not ``moved`` since."""
        if moved or self.timed or self.history.last != (self.coordinator.version, self.coordinator.tally.gradients):
            self._evaluate(now)

    @property
    def ends_here(self) -> bool:
        """Return whether A as it is has met the run's condition: it is to stay."""
        records = self.history.records
        return self.condition_met and bool(records) and records[-1].updates == self.coordinator.version

    def ended(self) -> bool:
        """Return whether training ends before its budget is spent: its condition is met, or somebody asks for it."""
        history = self.history
        asks = self._job.callbacks or self._job.loop is not None
        if asks and self.watch is not None and history.stopped is None:
            history.stopped = self.watch.stopped
        return self.condition_met or history.stopped is not None

    def keep(self, records: Iterable[Record]) -> None:
        """Add records to the history; the run is over once one meets its condition."""
        until = self._job.budget.until
        for record in records:
            self.history.keep(record)
            self.condition_met |= until is not None and until.met(record)
            self.tell(record)

    def tell(self, event: RunEvent) -> None:
        """Have callbacks take an event."""
        if self.watch is not None:
            self.watch.event(event)

    def exited(self, exit: ReplicaExit) -> None:
        """Note that a replica has died or left."""
        self.exits.append(exit)
        self.tell(exit)

    def display(self, now: Seconds) -> None:
        """Show the progress of training, at most once every TICK_S."""
        if self.watch is not None and now - self._displayed_s >= TICK_S:
            self._displayed_s = now
            self.watch(replace(self.history.progress("training", now), remarks=self.remarks))

    # --------------------------------------------------------------------------------------------------------- arrivals

    def arrived(self, arrival: Arrival) -> None:
        """Have the policy decide on a Δ; one that is not finite ends the run unless ``on_nonfinite="skip"``."""
        if not arrival.finite and self._job.on_nonfinite == "stop":
            loss = math.nan if arrival.loss is None else arrival.loss
            raise nonfinite_error(loss, arrival.replica, arrival.clock)
        if arrival.loss is not None:
            self.history.add_loss(arrival.loss, arrival.samples)
        self.coordinator.arrived(arrival)

    def handled(self, now: Seconds) -> None:
        """Note that an event was handled; steps and epochs are counted by events, so evaluate here if due."""
        self.last_event_s = now  # after the decision: an update may have taken time
        if not self.timed:
            self.evaluate_if_due(now)

    # ----------------------------------------------------------------------------------------------- failures and hangs

    def check_hang(
        self,
        now: Seconds,
        waiter: str,
        excused_until: Callable[[ReplicaId], Seconds],
        attempt: Callable[[ReplicaId], Clock],
        busy: Callable[[], bool],
    ) -> None:
        """Raise if no replica computes and no timer is set, or if none has reported within the timeout.

        Args:
            now: training time.
            waiter: name of the process that waits.
            excused_until: training time up to which a replica has announced to be silent.
            attempt: number of the step that a replica is at.
            busy: returns whether the silence is this process's own: reports are there that it has not read.
        """
        timeout_s = self._job.timeout_s
        if self.coordinator.computing and now - self.last_event_s <= timeout_s:  # nearly always
            return
        computing = sorted(self.coordinator.computing)
        if not computing:
            if self.coordinator.deadline < math.inf:
                return
            raise self.coordinator.deadlock()
        if now - max(map(excused_until, computing)) > timeout_s and not busy():
            waiting = ", ".join([waiter, *(f"replica {r}" for r in sorted(self.coordinator.waiting))])
            late = ", ".join(f"replica {r} at its step {attempt(r)}" for r in computing)
            raise WaitTimeoutError(
                f"{waiting} waited {timeout_s:g} s for {late}, and received nothing; write a larger timeout_s= if a "
                "step takes so long"
            )

    def all_died(self) -> WorkerError:
        """Build the error for a run in which no replica is left."""
        return WorkerError(f"every replica died: {'; '.join(f'{e.replica} {e.reason}' for e in self.exits)}")

    def ended_late(self, replicas: Iterable[ReplicaId], now: Seconds) -> None:
        """Record replicas that did not end in time after training, and are killed."""
        reason = f"did not end within {self._job.timeout_s:g} s; killed"
        for replica in replicas:
            self.exited(ReplicaExit(replica, reason, now))


# Signals that count as a Ctrl-C.
ENDING = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Context manager: the first two Ctrl-C are counted instead of raised, so that a run ends between two events.

    SIGTERM, with which schedulers end a job, counts as a Ctrl-C.

    The first one asks to end training, the second one to wait for nothing, a third one is raised. Outside the main
    thread, where Python delivers no signals, it counts those that :func:`signals_for_threads` hands on.

    Args:
        wake: called at each Ctrl-C, so that a wait ends.
        heard: called with the name of the first signal, at once and in another thread.
        signals: signals that count as a Ctrl-C.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        heard: Callable[[str], None] = lambda _: None,
        signals: Sequence[signal.Signals] = ENDING,
    ) -> None:
        self.count = 0
        self.first: str | None = None
        """Name of the first signal."""
        self._wake, self._heard, self._signals = wake, heard, signals
        self._said = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def insisted(self) -> bool:
        """Return whether there was a second Ctrl-C: nothing is to be waited for."""
        return self.count > 1

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self.note) for number in self._signals}
        else:
            _of_threads.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _of_threads:
            _of_threads.remove(self)
        restore(self._previous)
        if self.count:
            self._said.wait(SAID_S)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Count a signal."""
        del frame
        self.first = self.first or signal.Signals(number).name
        self.count += 1
        if self.count == 1:
            # This thread may have been interrupted while it writes to stderr, or draws. Not by threading.Thread, for it
            # may as well have been while it starts one, which holds a lock.
            _thread.start_new_thread(self._say, (self.first,))
        if self.count > 2:
            raise KeyboardInterrupt
        self._wake()

    def _say(self, first: str) -> None:
        try:
            self._heard(first)
        finally:
            self._said.set()


# Guards of runs in other threads than the main one.
_of_threads: list[InterruptGuard] = []


@contextmanager
def signals_for_threads() -> Iterator[None]:
    """Context manager of the main thread: the first Ctrl-C ends the runs of other threads, a second one is raised.

    Where there is no such run, the first one is raised.
    """

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        guards = [guard for guard in _of_threads if not guard.insisted]
        for guard in guards:
            guard.note(number)
        if not any(guard.count == 1 for guard in guards):
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread take signals
        return
    previous = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield
    finally:
        restore(previous)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Put handlers of signals back; None: one that Python did not install, and can't put back."""
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
