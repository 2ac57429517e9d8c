"""Runs a policy on metadata of Δs, counts what happens, and never touches a tensor.

One coordinator decides for the whole model; its decisions go, in order, to its engine's :class:`DecisionExecutor`::

    engine --- arrived / left / joined / tick -----------> coordinator --- policy ---> Decision
       ^                                                                                  |
       +------ apply / send / discard / cancel / dismiss (DecisionExecutor) <-------------+

A replica whose share of the budget is spent is dismissed when the policy releases it, and the policy sees P shrink.
Where others may die it is parked instead: what a dead replica had begun may still be its to do.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from paceline.aggregation import contract, text_of
from paceline.aggregation.base import Action, Aggregation, Apply, Arrival, Decision, Discard, Portion, Release
from paceline.aggregation.state_codec import decode, encode, kind
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.core.records import ReplicaPosition
from paceline.core.types import Clock, LeaveReason, ReplicaId, Seconds, Version
from paceline.engine.batch_dispatcher import Dispatcher
from paceline.engine.coordinator_state import CoordinatorState, Tally


class DecisionExecutor(Protocol):
    """Executes a policy's decisions in an engine."""

    def apply(self, action: Apply) -> None:
        """Update A; the coordinator counts the version."""

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        """Send a replica the current A; its next Δ takes a micro-step on each of these batches."""

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Drop these Δs."""

    def cancel(self, replica: ReplicaId) -> None:
        """Stop a replica's attempt; answer with :meth:`Coordinator.cancelled` once it has stopped."""

    def dismiss(self, replica: ReplicaId) -> None:
        """End a replica whose share of the budget is spent."""


class Coordinator:
    """One run of one policy.

    Args:
        policy: resolved.
        replicas: P at the start; ``positions`` may have places for more.
        dispatcher: gives replicas their batches, within the budget.
        executor: the engine's.
        positions: where each replica begins; None: at 0.
        resumed: state of the run that goes on; None: it begins.
        keeps: whether the policy goes on with its state, and the Δs that it held, which the executor has.
        parks: whether a replica whose share of the budget is spent may be called back.
    """

    def __init__(
        self,
        policy: Aggregation[Any],
        replicas: int,
        dispatcher: Dispatcher,
        executor: DecisionExecutor,
        positions: Sequence[ReplicaPosition] | None = None,
        resumed: CoordinatorState | None = None,
        *,
        keeps: bool = False,
        parks: bool = False,
    ) -> None:
        self._policy, self._dispatcher, self._executor, self._parks = policy, dispatcher, executor, parks
        self._deals = policy.portions is not None
        """Whether the policy says which portion of a batch each replica computes."""
        self._state = policy.start(0 if self._deals else replicas)
        self._held: dict[tuple[ReplicaId, Clock], Arrival] = {}
        self._parked: list[ReplicaId] = []
        """Replicas whose share of the budget is spent, and that were not dismissed."""
        self.departing: set[ReplicaId] = set()
        """Replicas that are to leave instead of going on."""
        self._leaving: deque[ReplicaId] = deque()
        """Replicas that are done, of which the policy does not know yet."""
        self._portions_next: dict[ReplicaId, Portion | None] = {}
        """Of replicas whose attempt was cancelled: the portion with which they go on."""
        self._granted: dict[ReplicaId, int] = {}
        """Micro-steps of the newest Δ of each replica, in the order in which they were granted."""
        self._unfinished: deque[Action] = deque()
        """The action that is being executed, and those of its decision that come after it."""
        self.computing: set[ReplicaId] = set()
        """Replicas at work on a Δ; only the coordinator changes it."""
        self.cancelling: set[ReplicaId] = set()
        """Replicas whose attempt was cancelled: if its Δ still arrives, that counts as its stopping."""
        self._members = range(replicas)
        self.present = set(self._members)
        """Replicas that take part; empty once all have left."""
        self.away: set[ReplicaId] = set()
        """Replicas that are not there where a run goes on: they join later, or never."""
        self.begun = False
        """Whether A was sent: before that there is no state to go on with."""
        self.version: Version = 0
        self.tally = Tally()
        self.positions = list(positions or [ReplicaPosition()] * replicas)
        """How far each replica has come; what is under way does not count."""
        self._places = len(self.positions)
        """Numbers below are those of replicas that there are, or were where the run stopped."""
        self.kept: CoordinatorState | None = None
        """The state with which a policy goes on; None: it has started anew."""
        if resumed is not None:
            self._restore(resumed, keeps=keeps)

    @property
    def threshold(self) -> int:
        """Return K as it stands."""
        return self._policy.waits_for(self._state)

    @property
    def deadline(self) -> Seconds:
        """Return the time of the policy's next :meth:`tick`; infinity: it has no timer."""
        deadline = self._policy.deadline(self._state)
        return math.inf if deadline is None else deadline

    @property
    def waiting(self) -> set[ReplicaId]:
        """Return the replicas that take part and do not compute."""
        return self.present - self.computing

    def deadlock(self) -> PacelineError:
        """Build the error for a run in which no replica computes, so that no Δ can arrive any more."""
        return PacelineError(
            f"{text_of(self._policy)} lets no replica go on: replicas {sorted(self.present)} all wait; its arrived() "
            "or tick() must Release those that wait"
        )

    def begin(self) -> None:
        """Send A to all replicas."""
        self.begun = True
        for replica in (*range(len(self._members), len(self.positions)), *sorted(self.away - self.present)):
            self._dispatcher.abandon(replica)  # what it had begun where the run stopped
        if self.kept is not None:
            self._go_on_with(self.kept)
            return
        for replica in sorted(self.present):
            if self._deals:
                self._decide(self._policy.joined(self._state, replica))
            else:
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
            encode(self._state, self._policy),
            encode(tuple(self._unfinished)),
            tuple(self._leaving),
            tuple(sorted(self.present)),
            tuple(replica for replica in self._granted if replica in self.computing),
            tuple(self.positions),
            tuple(self._held.values()),
        )

    def _restore(self, state: CoordinatorState, *, keeps: bool) -> None:
        """Go on with the counts of another run; a policy that does not keep its state discards the Δs held then."""
        self.version, self.tally = state.version, replace(state.tally, staleness=Counter(state.tally.staleness))
        if not keeps:
            self.tally.discarded += len(state.held)
            return
        self._held = {(a.replica, a.clock): a for a in state.held}
        self._places = max(self._places, len(state.positions))
        self.kept, self._state = state, decode(state.policy_state, self._policy)
        self.present &= set(state.present)
        self._leaving.extend(state.leaving)

    def _go_on_with(self, state: CoordinatorState) -> None:
        """Begin where a run stopped: replicas that computed compute the same again, those that waited wait.

        Then replicas that are no more leave, and new ones join, or those whose share of the budget has grown.
        """
        for replica in state.computing:
            self._go_on(replica)
        self._decide((self._state, decode(state.unfinished, self._policy)))
        self._report_left()
        for replica in state.present:
            if replica not in self._members:
                self._decide(self._policy.left(self._state, replica, "died"))
                self._report_left()
        for replica in sorted({*self._members}.difference(state.present, self.away)):
            if not self._dispatcher.quota.spent(replica):
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
            self._decide(self._policy.arrived(self._state, arrival))
        else:
            tally.nonfinite += 1
            self._execute(Discard((arrival,)))
            self._execute(Release((replica,)))
        self._report_left()

    def tick(self, now: Seconds) -> bool:
        """Have the policy decide if its deadline has come; return whether it has decided anything.

        Raises:
            PacelineError: the next deadline has come, too, or all replicas still wait: ticks would not end.
        """
        if self.deadline > now:
            return False
        answer = self._policy.tick(self._state, now)
        self._decide(answer)
        _, decision = answer
        self._report_left()
        if not (decision or self.computing):
            raise self.deadlock()
        if self.deadline <= now:
            raise PacelineError(
                f"{text_of(self._policy)} was called at its deadline, {now:g} s, and has the next one at "
                f"{self.deadline:g} s; its tick() must return a state whose deadline() is later, or None"
            )
        return bool(decision)

    def cancelled(self, replica: ReplicaId) -> None:
        """Let a replica go on that has stopped its cancelled attempt."""
        self.cancelling.discard(replica)
        self.computing.discard(replica)
        self.tally.cancelled += 1
        self._count(replica)
        self._dispatcher.settled(replica, self.positions[replica].attempt)
        self._go_on(replica, self._portions_next.pop(replica, None))
        self._report_left()

    def left(self, replica: ReplicaId, reason: LeaveReason) -> None:
        """Tell the policy that a replica has left, unless it was not present; others do what a dead one had begun."""
        if replica not in self.present:
            self._parked = [each for each in self._parked if each != replica]
            return
        self.present.remove(replica)
        self.cancelling.discard(replica)
        if reason == "died":
            self._hand_on(replica)
        self.computing.discard(replica)
        self._decide(self._policy.left(self._state, replica, reason))
        self._report_left()
        parked = [r for r in self._parked if not self._dispatcher.quota.spent(r)]
        self._parked = [r for r in self._parked if r not in parked]
        for each in parked:
            self.joined(each)

    def joined(self, replica: ReplicaId) -> None:
        """Tell the policy that a replica is there, new or back, and send it A."""
        self.present.add(replica)
        self._dispatcher.reclaim(replica)
        self._decide(self._policy.joined(self._state, replica))
        if not self._deals:
            self._go_on(replica)
        self._report_left()

    def admit(self, replica: ReplicaId) -> None:
        """Let a new replica join, with as many steps before it as the one that has most of them."""
        self._dispatcher.quota.join(replica, self.present)
        spent = min((self.positions[each].spent for each in self.present), default=self.positions[replica].spent)
        self.positions[replica] = self.positions[replica]._replace(spent=spent)
        self.joined(replica)

    def depart(self, replica: ReplicaId) -> None:
        """Let a replica leave once the policy releases it."""
        self.departing.add(replica)

    def stay(self, replica: ReplicaId) -> None:
        """Let a replica that was to leave, and has not, go on; or one that has left come back."""
        self.departing.discard(replica)

    def retire(self, replica: ReplicaId) -> None:
        """Let a replica leave instead of going on: its share of the budget is spent, or its loop has ended."""
        self.present.remove(replica)
        self.computing.discard(replica)
        self._leaving.append(replica)

    def _hand_on(self, replica: ReplicaId) -> None:
        """Let others take the batches of a replica that has died."""
        if replica in self.computing:
            position = self.positions[replica]
            self._dispatcher.lost(replica, position.attempt + 1)
            self.positions[replica] = position.after(self._granted[replica])  # neither seeds nor names come twice
        self._dispatcher.abandon(replica)

    def finish(self) -> None:
        """End training: discard and count the Δs that are still held; no replica takes part any more."""
        if self._held:
            self._execute(Discard(tuple(self._held.values())))
        self.present.clear()

    # ------------------------------------------------------------------------------------------------------ decisions

    def _decide(self, answer: tuple[Any, Decision]) -> None:
        """Execute a policy's answer to an event."""
        contract.check_answer(self._policy, answer)
        self._state, decision = answer
        if not decision:
            return
        rest, outer = self._unfinished, len(self._unfinished)
        rest.extendleft(reversed(decision))
        while len(rest) > outer:
            try:
                self._execute(rest[0])
            except (TypeError, ValueError, AttributeError):
                contract.check_action(self._policy, rest[0])
                raise
            rest.popleft()

    def _execute(self, action: Action) -> None:
        if isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Discard):
            for name in contract.check_names(self._policy, action.arrivals, self._held):
                del self._held[name]
                self._dispatcher.settled(*name)
            self.tally.discarded += len(action.arrivals)
            self._executor.discard(action.arrivals)
        else:
            if action.portions or self._deals:
                contract.check_portions(self._policy, action)
            portions: Sequence[Portion | None] = action.portions or [None] * len(action.replicas)
            for replica, portion in zip(action.replicas, portions, strict=True):
                if isinstance(action, Release) or replica not in self.computing:
                    self._go_on(replica, portion)
                else:
                    self.cancelling.add(replica)
                    self._portions_next[replica] = portion
                    self._executor.cancel(replica)

    def _apply(self, action: Apply) -> None:
        contract.check_names(self._policy, [arrival for arrival, _ in action.deltas], self._held)
        if not contract.sound(action):
            contract.check_action(self._policy, action)
        self._executor.apply(action)
        for arrival, _ in action.deltas:
            del self._held[arrival.replica, arrival.clock]
            self._dispatcher.settled(arrival.replica, arrival.clock)
            self.tally.count_applied(self.version - arrival.version, arrival.samples)
        self.version += 1

    def _count(self, replica: ReplicaId) -> None:
        """Count an attempt that has ended."""
        micro_steps = self._granted[replica]
        self.tally.micro_steps += micro_steps
        self.positions[replica] = self.positions[replica].after(micro_steps)

    def _go_on(self, replica: ReplicaId, portion: Portion | None = None) -> None:
        """Send a replica A for its next Δ, or dismiss it if its share of the budget is spent."""
        if replica not in self.present:
            contract.check_release(self._policy, replica, self._places)
            return
        if replica in self.computing:
            raise PacelineError(
                f"{text_of(self._policy)} released replica {replica}, which is computing; release those that wait, "
                "cancel others"
            )
        self._granted.pop(replica, None)  # so that the newest grant comes last
        departs = replica in self.departing
        clock = self.positions[replica].attempt + 1
        batches = self._dispatcher.take(replica, clock, portion, nothing=departs)
        self._granted[replica] = batches.size
        if batches.size:
            self.computing.add(replica)
            self._executor.send(replica, batches)
            return
        if self._parks and not departs:
            self._parked.append(replica)
        else:
            self._executor.dismiss(replica)
        self.retire(replica)

    def _report_left(self) -> None:
        """Tell the policy which replicas are done, once the decision that released them is executed whole."""
        while self._leaving and not self._unfinished:
            self._decide(self._policy.left(self._state, self._leaving.popleft(), "done"))
            if not self.present and not self._leaving:
                contract.check_left(self._policy, self._held)
