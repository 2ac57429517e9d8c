"""Runs a policy on metadata of Δs, counts what happens, and never touches a tensor.

One coordinator decides for the whole model; its decisions go, in order, to its engine's :class:`DecisionExecutor`::

    engine --- arrived / left / joined ------------------> coordinator --- policy ---> Decision
       ^                                                                                  |
       +------ apply / send / discard / cancel / dismiss (DecisionExecutor) <-------------+

A replica whose share of the budget is spent is dismissed when the policy releases it, and the policy sees P shrink.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.aggregation import text_of
from paceline.aggregation.base import Action, Aggregation, Apply, Arrival, Decision, Discard, Release
from paceline.aggregation.state_codec import decode, encode, kind
from paceline.core.errors import InputError, PacelineError
from paceline.core.records import ReplicaPosition
from paceline.core.types import Clock, LeaveReason, ReplicaId, Version
from paceline.engine.budget import StepQuota


class DecisionExecutor(Protocol):
    """Executes a policy's decisions in an engine."""

    def apply(self, action: Apply) -> None:
        """Update A; the coordinator counts the version."""

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        """Send a replica the current A; its next Δ takes this many micro-steps."""

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Drop these Δs."""

    def cancel(self, replica: ReplicaId) -> None:
        """Stop a replica's attempt; answer with :meth:`Coordinator.cancelled` once it has stopped."""

    def dismiss(self, replica: ReplicaId) -> None:
        """End a replica whose share of the budget is spent."""


@dataclass
class Tally:
    """Counts of a run so far."""

    gradients: int = 0
    applied: int = 0
    discarded: int = 0
    cancelled: int = 0
    nonfinite: int = 0
    samples: int = 0
    """Samples in applied Δs."""
    seen_samples: int = 0
    """Samples in all Δs that arrived."""
    micro_steps: int = 0
    """Micro-steps of all attempts that ended, cancelled ones included."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    recent_staleness: int = 0
    recent_applied: int = 0


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a :class:`Coordinator`, for a checkpoint."""

    version: Version
    """Updates of A."""
    tally: Tally
    policy: str
    """Text of the policy."""
    policy_kind: str
    """What a policy must have in common with it to go on with its state."""
    policy_state: Any
    """As :mod:`~paceline.aggregation.state_codec` encodes it."""
    unfinished: Any
    """The rest of a decision that the end of the run has broken off, encoded likewise."""
    leaving: tuple[ReplicaId, ...]
    """Replicas that are done, of which the policy does not know yet."""
    present: tuple[ReplicaId, ...]
    """Replicas that take part."""
    computing: tuple[ReplicaId, ...]
    """Those that computed, in the order in which they were sent A."""
    positions: tuple[ReplicaPosition, ...]
    """Of each replica; what is under way does not count."""
    held: tuple[Arrival, ...]
    """Δs that the policy holds."""

    def __post_init__(self) -> None:
        numbers = {*self.leaving, *self.present, *self.computing}
        if not numbers <= set(range(len(self.positions))) or not set(self.computing) <= set(self.present):
            raise InputError(f"it has replicas {sorted(numbers)} of {len(self.positions)}")


class Coordinator:
    """One run of one policy.

    Args:
        policy: resolved.
        replicas: P at the start.
        quota: each replica's share of the budget.
        executor: the engine's.
        positions: where each replica begins; None: at 0.
        resumed: state of the run that goes on; None: it begins.
        restored: names (replica, clock) of the Δs held then that the executor has.
    """

    def __init__(
        self,
        policy: Aggregation[Any],
        replicas: int,
        quota: StepQuota,
        executor: DecisionExecutor,
        positions: Sequence[ReplicaPosition] | None = None,
        resumed: CoordinatorState | None = None,
        restored: Collection[tuple[ReplicaId, Clock]] = (),
    ) -> None:
        self._policy, self._quota, self._executor = policy, quota, executor
        self._state = policy.start(replicas)
        self._held: dict[tuple[ReplicaId, Clock], Arrival] = {}
        self._leaving: deque[ReplicaId] = deque()
        """Replicas that are done, of which the policy does not know yet."""
        self._granted: dict[ReplicaId, int] = {}
        """Micro-steps of the newest Δ of each replica, in the order in which they were granted."""
        self._unfinished: deque[Action] = deque()
        """The action that is being executed, and those of its decision that come after it."""
        self.computing: set[ReplicaId] = set()
        """Replicas at work on a Δ; only the coordinator changes it."""
        self.cancelling: set[ReplicaId] = set()
        """Replicas whose attempt was cancelled: if its Δ still arrives, that counts as its stopping."""
        self.present = set(range(replicas))
        """Replicas that take part; empty once all have left."""
        self.begun = False
        """Whether A was sent: before that there is no state to go on with."""
        self.version: Version = 0
        self.tally = Tally()
        self.positions = list(positions or [ReplicaPosition()] * replicas)
        """How far each replica has come; what is under way does not count."""
        self.kept: CoordinatorState | None = None
        """The state with which a policy goes on; None: it has started anew."""
        if resumed is not None:
            self._restore(resumed, restored)

    @property
    def threshold(self) -> int:
        """Return K as it stands."""
        return self._policy.waits_for(self._state)

    @property
    def waiting(self) -> list[ReplicaId]:
        """Return the replicas that take part and do not compute."""
        return sorted(self.present - self.computing)

    def deadlock(self) -> PacelineError:
        """Build the error for a run in which no replica computes, so that no Δ can arrive any more."""
        return PacelineError(
            f"{text_of(self._policy)} lets no replica go on: replicas {sorted(self.present)} all wait; its arrived() "
            "must Release those that wait"
        )

    def begin(self) -> None:
        """Send A to all replicas."""
        self.begun = True
        if self.kept is not None:
            self._go_on_with(self.kept)
            return
        if self._held:
            self._execute(Discard(tuple(self._held.values())))
        for replica in sorted(self.present):
            self._go_on(replica)
        self._report_left()

    def state(self) -> CoordinatorState:
        """Return the state as it is, between two events or after the end of the run.

        Raises:
            InputError: JSON can't hold the policy's state.
        """
        return CoordinatorState(
            self.version,
            replace(self.tally, staleness=Counter(self.tally.staleness)),
            text_of(self._policy),
            kind(self._policy),
            encode(self._state),
            encode(tuple(self._unfinished)),
            tuple(self._leaving),
            tuple(sorted(self.present)),
            tuple(replica for replica in self._granted if replica in self.computing),
            tuple(self.positions),
            tuple(self._held.values()),
        )

    def _restore(self, state: CoordinatorState, restored: Collection[tuple[ReplicaId, Clock]]) -> None:
        """Go on with the counts of another run, and with its policy's state if the policy is of the same kind.

        If the executor has not all Δs that were held, the policy starts anew as well. Then they are discarded.
        """
        self.version, self.tally = state.version, replace(state.tally, staleness=Counter(state.tally.staleness))
        self._held = {(a.replica, a.clock): a for a in state.held if (a.replica, a.clock) in restored}
        lost = len(state.held) - len(self._held)
        self.tally.discarded += lost
        if state.policy_kind != kind(self._policy) or lost:
            return
        self.kept, self._state = state, decode(state.policy_state, self._policy)
        self.present &= set(state.present)
        self._leaving.extend(state.leaving)

    def _go_on_with(self, state: CoordinatorState) -> None:
        """Begin where a run stopped: replicas that computed compute the same again, those that waited wait.

        Then replicas that are no more leave, and new ones join, or those whose share of the budget has grown.
        """
        replicas = range(len(self.positions))
        for replica in state.computing:
            self._go_on(replica)
        self._decide(self._state, decode(state.unfinished, self._policy))
        self._report_left()
        for replica in state.present:
            if replica not in replicas:
                self._decide(*self._policy.left(self._state, replica, "died"))
                self._report_left()
        for replica in replicas:
            if replica not in state.present and not self._quota.spent(replica):
                self.joined(replica)

    def arrived(self, arrival: Arrival) -> None:
        """Have the policy decide on a Δ that has arrived; one that is not finite is discarded and counted."""
        tally, replica = self.tally, arrival.replica
        self.computing.discard(replica)
        tally.gradients += 1
        tally.seen_samples += arrival.samples
        self._count(replica)
        self._held[arrival.replica, arrival.clock] = arrival
        if arrival.finite:
            self._decide(*self._policy.arrived(self._state, arrival))
        else:
            tally.nonfinite += 1
            self._execute(Discard((arrival,)))
            self._execute(Release((replica,)))
        if self._leaving:
            self._report_left()

    def cancelled(self, replica: ReplicaId) -> None:
        """Let a replica go on that has stopped its cancelled attempt."""
        self.cancelling.discard(replica)
        self.computing.discard(replica)
        self.tally.cancelled += 1
        self._count(replica)
        self._go_on(replica)
        self._report_left()

    def left(self, replica: ReplicaId, reason: LeaveReason) -> None:
        """Tell the policy that a replica has left, unless it was not present."""
        if replica not in self.present:
            return
        self.present.remove(replica)
        self.cancelling.discard(replica)
        self.computing.discard(replica)
        self._decide(*self._policy.left(self._state, replica, reason))
        self._report_left()

    def joined(self, replica: ReplicaId) -> None:
        """Tell the policy that a replica is back, and send it A."""
        self.present.add(replica)
        self._decide(*self._policy.joined(self._state, replica))
        self._go_on(replica)
        self._report_left()

    def retire(self, replica: ReplicaId) -> None:
        """Let a replica leave instead of going on: its share of the budget is spent, or its loop has ended."""
        self.present.remove(replica)
        self.computing.discard(replica)
        self._leaving.append(replica)

    def finish(self) -> None:
        """End training: discard and count the Δs that are still held; no replica takes part any more."""
        if self._held:
            self._execute(Discard(tuple(self._held.values())))
        self.present.clear()

    def recent_staleness(self) -> float | None:
        """Return the mean staleness of the Δs applied since the last call."""
        tally = self.tally
        mean = tally.recent_staleness / tally.recent_applied if tally.recent_applied else None
        tally.recent_staleness = tally.recent_applied = 0
        return mean

    # ------------------------------------------------------------------------------------------------------ decisions

    def _decide(self, state: Any, decision: Decision) -> None:
        self._state, rest = state, self._unfinished
        outer = len(rest)
        rest.extendleft(reversed(decision))
        while len(rest) > outer:
            self._execute(rest[0])
            rest.popleft()

    def _execute(self, action: Action) -> None:
        if isinstance(action, Apply):
            arrivals = [arrival for arrival, _ in action.deltas]
            self._check_held(arrivals)
            self._executor.apply(action)
            tally = self.tally
            for arrival in arrivals:
                del self._held[arrival.replica, arrival.clock]
                staleness = self.version - arrival.version
                tally.staleness[staleness] += 1
                tally.recent_staleness += staleness
                tally.samples += arrival.samples
            tally.applied += len(arrivals)
            tally.recent_applied += len(arrivals)
            self.version += 1
        elif isinstance(action, Release):
            for replica in action.replicas:
                self._go_on(replica)
        elif isinstance(action, Discard):
            self._check_held(action.arrivals)
            for arrival in action.arrivals:
                del self._held[arrival.replica, arrival.clock]
            self.tally.discarded += len(action.arrivals)
            self._executor.discard(action.arrivals)
        else:
            for replica in action.replicas:
                if replica in self.computing:
                    self.cancelling.add(replica)
                    self._executor.cancel(replica)
                else:
                    self._go_on(replica)

    def _count(self, replica: ReplicaId) -> None:
        """Count an attempt that has ended."""
        micro_steps = self._granted[replica]
        self.tally.micro_steps += micro_steps
        self.positions[replica] = self.positions[replica].after(micro_steps)

    def _check_held(self, arrivals: Sequence[Arrival]) -> None:
        """Raise unless each of these Δs is held, and named once."""
        # The usual case, without building sets.
        if len(arrivals) == 1 and (arrivals[0].replica, arrivals[0].clock) in self._held:
            return
        names = {(a.replica, a.clock) for a in arrivals}
        if len(names) < len(arrivals) or not names <= self._held.keys():
            raise PacelineError(
                f"{text_of(self._policy)} named Δs (replica, clock) {sorted((a.replica, a.clock) for a in arrivals)}, "
                f"but holds {sorted(self._held)}: each Δ must be applied or discarded exactly once"
            )

    def _go_on(self, replica: ReplicaId) -> None:
        """Send a replica A for its next Δ, or dismiss it if its share of the budget is spent."""
        if replica not in self.present:
            return
        if replica in self.computing:
            raise PacelineError(
                f"{text_of(self._policy)} released replica {replica}, which is computing; release those that wait, "
                "cancel others"
            )
        self._granted.pop(replica, None)  # so that the newest grant comes last
        micro_steps = self._granted[replica] = self._quota.grant(replica)
        if micro_steps:
            self.computing.add(replica)
            self._executor.send(replica, micro_steps)
        else:
            self._executor.dismiss(replica)
            self.retire(replica)

    def _report_left(self) -> None:
        """Tell the policy which replicas are done, once the decision that released them is executed whole."""
        while self._leaving and not self._unfinished:
            self._decide(*self._policy.left(self._state, self._leaving.popleft(), "done"))
