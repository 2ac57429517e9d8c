"""Pace of a policy with delayed replicas: by equations where there are any, else simulated.

::

    synchronous; K-sync              E[X_{K:P}]
    asynchronous; K-batch-async      K / Σ 1 / E[X_r]       staleness (P - 1) / K
    H local steps, synchronous       E[max of Σ of H X]     where delays are exponential, or always the same
    stale-synchronous                T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c), over drawn X

Letters: P replicas, K the Δs of an update, X the time of one Δ, X_{k:P} the k-th shortest of P of them, s the bound of
stale-synchronous replicas. K-sync cancels all but the first K replicas of an update, K-batch-async uses every K Δs of
any replica; Dutta et al. 2018 (1803.01113). These take milliseconds for any number of replicas.

All other policies are simulated without tensors: the engines' own coordinator runs the policy; its decisions only move
a virtual clock, and over a network hand messages to its links, as in engine/virtual/attempts.py::

    replica r   |-- compute + delay --|                        |-- compute + delay --|
    policy                            | arrived -> Apply ... Release

The k-th draws of a replica are those of the virtual engine for the same seed, so both have the same events.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from math import inf, nan
from operator import add
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from paceline.aggregation import Aggregation, Asynchronous, Buffered, LocalSteps, StaleSynchronous, Synchronous
from paceline.aggregation.base import Apply, Arrival
from paceline.clock.distributions import Constant, Exponential, ShiftedExponential
from paceline.clock.hosts import Hosts
from paceline.clock.times import Delay, EventQueue, Times
from paceline.core.data_order import BatchRange
from paceline.core.delta import Accumulated, Change, Distance
from paceline.core.errors import InputError
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.batch_dispatcher import dispatcher_of
from paceline.engine.budget import Unbounded
from paceline.engine.coordinator import Coordinator
from paceline.planner.order_statistics import erlang, expected_s, identical


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """Mean pace of replicas under a policy."""

    update_s: Seconds
    """Time between two updates of A."""
    batches: float
    """Batches of an update."""
    staleness: float
    """Updates between reading A and applying Δ, mean over applied Δs."""
    fresh: float | None
    """Share of applied Δs that were computed from the A they were applied to; None: not known."""
    discarded: float
    """Share of attempts that are in no update, cancelled ones among them."""
    batch_s: Seconds
    """Of a batch on a replica without delay."""
    updates: int = 0
    """Updates of the simulation; 0: the pace follows from equations."""

    def step_s(self, replicas: int) -> Seconds:
        """Return the time of as many batches as there are replicas, to compare with a synchronous step."""
        return self.update_s * replicas / self.batches


# --------------------------------------------------------------------------------------------------------- by equations


class DelayedReplicas(NamedTuple):
    """Replicas of which some are delayed."""

    replicas: int
    batch_s: Seconds
    delay: Delay | None

    @property
    def slowed(self) -> int:
        """Number of replicas that draw delays."""
        return len(self.delay.slowed(self.replicas, seed=0)) if self.delay else 0


def predicted_pace(policy: Aggregation[Any], group: DelayedReplicas) -> Pace | None:
    """Return the pace of a resolved policy; None: it has to be simulated.

    >>> from paceline.aggregation import parse
    >>> group = DelayedReplicas(4, 0.1, Delay.parse("fraction=0.5 0.3"))
    >>> texts = ("synchronous", "buffered:k=2,cancel=true", "asynchronous", "local-steps:period=8")
    >>> [predicted_pace(parse(text), group).step_s(4).__round__(4) for text in texts]
    [0.4, 0.2, 0.16, 0.4]
    >>> predicted_pace(parse("smooth-switch:every=9"), group) is None
    True
    """
    match policy:
        case Synchronous(backups=0):
            return _k_sync(group.replicas, group)
        case Buffered(k=k, hold=True, cancel=cancel) if cancel or k == group.replicas:
            return _k_sync(k, group)
        case Buffered(k=k, hold=False, cancel=False):
            return _k_batch_async(k, group)
        case Asynchronous():
            return _k_batch_async(1, group)
        case StaleSynchronous(bound=bound):
            return _stale_synchronous(bound, group)
        case LocalSteps(over=Synchronous(backups=0)):
            return _local_steps(micro_steps(policy), group)
    return None


def _k_sync(k: int, group: DelayedReplicas) -> Pace:
    replicas, batch_s, delay = group
    kinds = [identical(replicas - group.slowed, Constant(batch_s))]
    if delay:
        kinds.append(identical(group.slowed, delay.distribution, batch_s))
    update_s = expected_s(k, kinds) if batch_s or delay else 0.0
    return Pace(update_s, k, 0.0, 1.0, 1 - k / replicas, batch_s)


def _k_batch_async(k: int, group: DelayedReplicas) -> Pace:
    """Each replica brings a Δ every E[X_r], and while one is computed P - 1 others arrive on average.

    The share of fresh Δs is known for one replica alone: else it depends on more than means.
    """
    replicas, batch_s, delay = group
    late_s = delay.distribution.mean_s if delay else 0.0
    kinds = [(replicas - group.slowed, batch_s), (group.slowed, batch_s + late_s)]
    batches_per_s = sum(count / mean if mean else inf for count, mean in kinds if count)
    fresh = 1.0 if replicas == 1 and k == 1 else None
    return Pace(k / batches_per_s, k, (replicas - 1) / k, fresh, 0.0, batch_s)


def _local_steps(period: int, group: DelayedReplicas) -> Pace | None:
    """The last of all replicas, each after so many steps; None where the sum of their delays has no known form."""
    replicas, batch_s, delay = group
    kinds = [identical(replicas - group.slowed, Constant(period * batch_s))]
    match delay and delay.distribution:
        case None:
            pass
        case Constant(value):
            kinds.append(identical(group.slowed, Constant(period * (batch_s + value))))
        case Exponential(mean) if mean:
            kinds.append(erlang(group.slowed, batch_s, mean, period))
        case ShiftedExponential(shift, mean) if mean:
            kinds.append(erlang(group.slowed, batch_s + shift, mean, period))
        case _:
            return None
    return Pace(expected_s(replicas, kinds), period * replicas, 0.0, 1.0, 0.0, batch_s)


# ---------------------------------------------------------------------------------------------------- stale-synchronous

# Times to draw for all replicas together, for at least as many clocks as follow.
_ATTEMPTS = 50_000
_CLOCKS, _CLOCKS_PER_BOUND = 64, 40
# Share of the clocks until the fast replicas have run into the bound.
_WARM_UP = 0.5


def stale_synchronous(times_s: NDArray[np.float64], bound: int) -> NDArray[np.float64]:
    """Compute T_i(c) = max(T_i(c - 1), max_j T_j(c - 1 - s)) + X_i(c): no replica begins s + 1 ahead of the slowest.

    s = 0 is synchronous; s without end asynchronous. Source: Ho et al. 2013.

    Args:
        times_s: X, [clock, replica].
        bound: s.

    Returns:
        T, the end of each attempt, [clock, replica].

    >>> two = np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    >>> stale_synchronous(two, 0).tolist(), stale_synchronous(two, 1).tolist()
    ([[1.0, 3.0], [4.0, 6.0], [7.0, 9.0]], [[1.0, 3.0], [2.0, 6.0], [4.0, 9.0]])
    """
    if bound < 0 or times_s.ndim != 2:
        raise InputError(f"bound={bound} for times of shape {times_s.shape}; write a bound of at least 0, [clock, P].")
    end, slowest, begin = np.zeros_like(times_s), np.zeros(len(times_s)), np.zeros(times_s.shape[1])
    for clock in range(len(times_s)):
        if clock > bound:
            begin = np.maximum(begin, slowest[clock - 1 - bound])
        end[clock] = begin + times_s[clock]
        begin, slowest[clock] = end[clock], end[clock].max()
    return end


def _stale_synchronous(bound: int, group: DelayedReplicas) -> Pace:
    replicas, batch_s, delay = group
    clocks = max(_CLOCKS, _CLOCKS_PER_BOUND * bound, _ATTEMPTS // replicas)
    # The same draws as the simulation of these replicas has.
    streams = (attempts(Times(compute=Constant(batch_s)), delay, r, replicas, 0, 1) for r in range(replicas))
    drawn = np.array([list(islice(stream, clocks)) for stream in streams], dtype=np.float64).T
    ends = stale_synchronous(drawn, bound)
    # Updates between reading A and applying Δ: an attempt reads the version of its own last Δ or, where it had to wait,
    # that of the slowest's; ends in their order are the versions.
    version = np.empty(ends.size, dtype=np.int64)
    version[np.argsort(ends, axis=None, kind="stable")] = np.arange(1, ends.size + 1)
    written = version.reshape(ends.shape)
    read = np.zeros_like(written)
    read[1:] = written[:-1]
    slowest = np.argmax(ends, axis=1)
    for clock in range(bound + 1, clocks):
        read[clock] = np.maximum(read[clock], written[clock - 1 - bound, slowest[clock - 1 - bound]])
    began_s, ended_s = float(ends[int(clocks * _WARM_UP)].max()), float(ends[-1].min())
    kept = (ends > began_s) & (ends <= ended_s)
    stale = (written - 1 - read)[kept]
    updates = int(kept.sum())
    update_s = (ended_s - began_s) / updates if updates else nan
    return Pace(update_s, 1.0, float(stale.mean()), float((stale == 0).mean()), 0.0, batch_s, updates)


# ----------------------------------------------------------------------------------------------------------- simulation


@dataclass(eq=False, slots=True)
class SimulatedAttempt:
    """A pending Δ."""

    replica: ReplicaId
    clock: Clock
    version: Version
    cancelled: bool = False
    phase: Literal["granted", "computing", "arriving"] = "arriving"
    work_s: Seconds = 0.0
    """To compute, and of delay, where a network says when that begins."""


_NOTHING = Constant(0.0)


class Simulation:
    """Executor of a coordinator's decisions that only advances a clock.

    Args:
        policy: resolved.
        replicas: P.
        times: none of them measured.
        delay: of some replicas; None: of none.
        seed: of all draws.
        size_bytes: of A, and of a Δ, which a network takes.
        servers: n, where A is divided; None: as many as hosts.
    """

    def __init__(
        self,
        policy: Aggregation[Any],
        replicas: int,
        times: Times,
        delay: Delay | None,
        seed: int,
        size_bytes: float = 0.0,
        servers: int | None = None,
    ) -> None:
        self._hosts = Hosts(times.network, replicas, servers, size_bytes, seed)
        self.micro_steps = micro_steps(policy)
        self._streams = [attempts(times, delay, r, replicas, seed, self.micro_steps) for r in range(replicas)]
        self._apply, self._gradient = times.stream("apply", seed), times.stream("gradient", seed)
        self._server_takes_time = times.apply != _NOTHING or times.gradient != _NOTHING
        self._now: Seconds = 0.0
        self._clocks = [0] * replicas
        self._attempts: list[SimulatedAttempt | None] = [None] * replicas
        self._has: dict[ReplicaId, Version] = {}  # the A that each was sent last over the network
        self._events: EventQueue[SimulatedAttempt] = EventQueue()
        dispatcher = dispatcher_of(policy, replicas, Unbounded(self.micro_steps))
        self.coordinator = Coordinator(policy, replicas, dispatcher, self)
        self.coordinator.begin()

    def turn(self) -> None:
        """Process the next event."""
        deadline = self.coordinator.deadline
        if not self._events and not self._hosts.returning and deadline == math.inf:
            raise self.coordinator.deadlock()
        coming = min(self._events.next_s, self._hosts.next_s)
        # The server may still have been busy with an update when the Δ arrived.
        start = max(coming, self._now)
        if max(deadline, self._now) < start:
            self._now = max(deadline, self._now)
            self.coordinator.tick(self._now)
            return
        if self._hosts.next_s <= self._events.next_s:
            self._change_host()
            return
        attempt = self._events.pop()
        if attempt.cancelled:
            return
        if attempt.phase != "arriving":
            self._send_message(attempt)
            return
        self._now = start
        self._attempts[attempt.replica] = None
        self.coordinator.arrived(Arrival(attempt.replica, attempt.version, attempt.clock, self.micro_steps, start))

    def _send_message(self, attempt: SimulatedAttempt) -> None:
        """Hand A or a Δ to the network, now that it is granted or computed."""
        traffic, now_s = self._hosts.traffic, self._events.now_s
        assert traffic is not None, "phases before the arrival are those of a network"
        if attempt.phase == "granted":
            has = self._has.get(attempt.replica) == attempt.version
            attempt.phase, self._has[attempt.replica] = "computing", attempt.version
            self._events.push(traffic.pull(attempt.replica, now_s, has=has) + attempt.work_s, attempt)
        else:
            attempt.phase = "arriving"
            self._events.push(traffic.push(attempt.replica, now_s), attempt)

    def _change_host(self) -> None:
        """Let the replicas of a host die as it goes, or join once it is back."""
        change, replicas = self._hosts.change(self.coordinator.present)
        self._now = max(self._now, change.time_s)
        for replica in replicas:
            if change.until_s is None:
                self.coordinator.joined(replica)
                continue
            attempt, self._attempts[replica] = self._attempts[replica], None
            if attempt is not None:
                attempt.cancelled = True
            self._has.pop(replica, None)
            self.coordinator.left(replica, "died")

    def counts(self) -> tuple[float, ...]:
        """Return the time so far, and the numbers of updates, of applied Δs, of updates that these were late in all, of
        fresh ones among them, of arrivals, and of cancelled attempts."""
        tally, updates = self.coordinator.tally, self.coordinator.version
        stale = sum(staleness * count for staleness, count in tally.staleness.items())
        return self._now, updates, tally.applied, stale, tally.staleness[0], tally.gradients, tally.cancelled

    def pace_since(self, begin: tuple[float, ...], batch_s: Seconds) -> Pace:
        """Return the means over the events since earlier counts."""
        pairs = zip(begin, self.counts(), strict=True)
        now_s, updates, applied, stale, fresh, arrived, cancelled = (b - a for a, b in pairs)
        batches, discarded = self.micro_steps * applied / updates, 1 - applied / (arrived + cancelled)
        means = now_s / updates, batches, stale / applied, fresh / applied
        # Some that had arrived before these counts may be applied after them.
        return Pace(*means, max(0.0, discarded), batch_s, int(updates))

    # ------------------------------------------------------------------------------ executor of the policy's decisions

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        del batches
        self._clocks[replica] += 1
        attempt = SimulatedAttempt(replica, self._clocks[replica], self.coordinator.version)
        self._attempts[replica] = attempt
        work_s, due_s = next(self._streams[replica]), self._now
        if self._hosts.traffic is None:
            due_s += work_s
        else:
            attempt.phase, attempt.work_s = "granted", work_s
        self._events.push(due_s, attempt)

    def apply(self, action: Apply) -> None:
        self._now = max(self._now, self._hosts.served_s)
        if self._server_takes_time:
            update_s = next(self._apply) + sum(next(self._gradient) for _ in action.deltas)
            self._now += update_s / self._hosts.servers

    def discard(self, arrivals: tuple[Arrival, ...]) -> None: ...

    def cancel(self, replica: ReplicaId) -> None:
        attempt = self._attempts[replica]
        assert attempt is not None, "it computes"
        self._has.pop(replica, None)  # it may not have arrived
        attempt.cancelled = True  # its event stays in the queue, and is ignored
        self.coordinator.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        raise AssertionError(f"replica {replica} may go on for ever")


def micro_steps(policy: Aggregation[Any]) -> int:
    """Return the number of batches of a Δ.

    >>> from paceline.aggregation import LocalSteps, Synchronous
    >>> micro_steps(LocalSteps(period=8)), micro_steps(Synchronous())
    (8, 1)
    """
    match policy.delta:
        case Accumulated(steps) | Change(steps) | Distance(steps):
            return steps
    return 1


def attempts(
    times: Times, delay: Delay | None, replica: ReplicaId, replicas: int, seed: int, micro_steps: int
) -> Iterator[Seconds]:
    """Yield the time from sending A to a replica until its Δ arrives, one attempt after the other, without end."""
    constant = repeat(times.compute.value) if isinstance(times.compute, Constant) else None
    compute = constant or times.stream("compute", seed, replica)
    late = delay.stream(replica, replicas, seed) if delay else None
    if micro_steps == 1 and times.transfer == _NOTHING:  # the usual case, without a generator
        return compute if late is None else map(add, compute, late)
    delays, transfer = late or repeat(0.0), times.stream("transfer", seed, replica)
    return (
        next(transfer) + sum(next(compute) + next(delays) for _ in range(micro_steps)) + next(transfer)
        for _ in repeat(None)
    )
