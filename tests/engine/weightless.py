"""Coordinator and clock with nothing to carry: what policies do to time and staleness, quickly."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.aggregation import Aggregation, parse
from paceline.aggregation.base import Apply, Arrival
from paceline.clock.distributions import parse as distribution
from paceline.clock.times import EventQueue
from paceline.core.data_order import BatchRange, DataOrder, DataPosition
from paceline.engine.batch_dispatcher import BatchDispatcher, Dispatcher, dispatcher_of
from paceline.engine.budget import StepQuota, Unbounded
from paceline.engine.coordinator import Coordinator


class Weightless:
    """Hands that hold nothing: each Δ takes the next draw of its replica's stream.

    Args:
        aggregation: the policy, or its text.
        replicas: P.
        compute: distribution of the time of one Δ; or one for each replica.
        samples: of the k-th Δ (from 0) of a replica.
        order: of the data; None: each replica counts its own batches.
        parks: whether replicas that are done may be called back.
        dispatcher: of batches; None: one of these.
    """

    def __init__(
        self,
        aggregation: str | Aggregation[Any],
        replicas: int,
        compute: str | list[str],
        allowance: StepQuota | None = None,
        samples: Any = lambda replica, k: 1,
        finite: Any = lambda replica, k: True,
        order: DataOrder | None = None,
        parks: bool = False,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.policy = parse(aggregation) if isinstance(aggregation, str) else aggregation
        quota, owners = allowance or Unbounded(1), range(replicas)
        self.dispatcher: Dispatcher = dispatcher or dispatcher_of(self.policy, replicas, quota)
        if order is not None:
            shared = order.replicas < replicas
            start = DataPosition(order, (0,) * order.replicas)
            self.dispatcher = BatchDispatcher(quota, start, () if shared else owners)
        self.coordinator = Coordinator(self.policy, replicas, self.dispatcher, self, parks=parks)
        kinds = [compute] * replicas if isinstance(compute, str) else compute
        self._streams = [distribution(k).stream(np.random.default_rng([1, r])) for r, k in enumerate(kinds)]
        self._samples, self._finite = samples, finite
        self.events: EventQueue[Arrival] = EventQueue()
        self.now_s = 0.0
        self.clocks = [0] * replicas
        self.current: dict[int, int] = {}
        self.arrived: list[Arrival] = []
        self.dead: list[int] = []
        self.granted: list[list[int]] = [[] for _ in range(replicas)]
        """Micro-steps of each Δ."""
        self.batches: dict[tuple[int, int], BatchRange] = {}
        """(replica, clock) -> the batches of that Δ."""
        self.applied: list[Arrival] = []
        self.discarded: list[Arrival] = []
        self.cancelled: list[tuple[int, int]] = []
        self.dismissed: list[int] = []

    def carry(self, updates: float = float("inf"), die: Mapping[int, int] | None = None) -> "Weightless":
        """Until so many updates are made or everybody has gone.

        Args:
            updates: of A.
            die: before the how-manieth event which replica dies, whatever it is at.
        """
        self.coordinator.begin()
        happened = 0
        while self.coordinator.present and self.coordinator.version < updates:
            if (deadline := max(self.coordinator.deadline, self.now_s)) < self.events.next_s:
                self.now_s = deadline
                self.coordinator.tick(self.now_s)
                continue
            if not self.events:
                break
            victim = (die or {}).get(happened)
            happened += 1
            if victim is not None and victim in self.coordinator.present:
                self.current.pop(victim, None)
                self.dead.append(victim)
                self.coordinator.left(victim, "died")
            arrival = self.events.pop()
            self.now_s = self.events.now_s
            if self.current.get(arrival.replica) == arrival.clock:
                del self.current[arrival.replica]
                self.arrived.append(arrival)
                self.coordinator.arrived(arrival)
        return self

    def apply(self, action: Apply) -> None:
        self.applied += [arrival for arrival, _ in action.deltas]

    def send(self, replica: int, batches: BatchRange) -> None:
        self.granted[replica].append(batches.size)
        k = self.clocks[replica]
        self.batches[replica, k + 1] = batches
        self.clocks[replica] = self.current[replica] = k + 1
        time_s = self.now_s + next(self._streams[replica])
        samples, finite = self._samples(replica, k), self._finite(replica, k)
        self.events.push(time_s, Arrival(replica, self.coordinator.version, k + 1, samples, time_s, finite, 1.0))

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        self.discarded += arrivals

    def cancel(self, replica: int) -> None:
        self.cancelled.append((replica, self.current.pop(replica)))
        self.coordinator.cancelled(replica)

    def dismiss(self, replica: int) -> None:
        self.dismissed.append(replica)
