"""Servers of A on several hosts: who is where, and how many Δs a second links and servers carry, by closed forms.

::

    replica on host h   |- compute -|- push: a slice to each server -|                  |- pull: a slice of each -|
    servers                                                          |- (apply + K) / n -|

    outgoing link of h  pushes of its replicas to other hosts, slices of A of its servers to replicas of other hosts
    incoming link of h  slices of A for its replicas from other hosts, pushes of replicas of other hosts to its servers

Letters: n servers, each with 1/n of A; P replicas, of which N are alike; K the Δs of an update.

All that send over a link at once share it, as TCP does. Replicas that wait for nobody are then a closed queueing
network whose stations share their capacity, and mean value analysis predicts its rates (Reiser and Lavenberg 1980, in
Schweitzer's approximation): what takes d alone takes d (1 + Q) where Q others are under way on average. A push to k
hosts is as slow as the last of them, for whose link it waits d · H_k · Q, H_k = 1 + 1/2 + ... + 1/k, as of k waits with
exponential times (Nelson and Tantawi 1988); a pull too.

The simulation of a network (clock/network.py) sends whole messages one after the other, each of which holds a link at
both ends. Both agree where few messages meet and, with one server, where many do; between that the order of whole
messages makes one server's link busier, and with several servers leaves links idle that a message waits for.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from paceline.aggregation import Aggregation, Buffered, LocalSteps, SmoothSwitch, Synchronous
from paceline.clock.cluster_file import Links
from paceline.clock.times import Delay
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.scaling import next_hosts

# A direction of a host's link, or all servers together, which take part in each update.
Resource: TypeAlias = tuple[Literal["outgoing", "incoming", "servers"], int]

SERVERS: Resource = ("servers", 0)

# Rates have converged once they change relatively by less; and the most rounds until then.
_EQUAL, _MOST_ROUNDS = 1e-9, 10_000


class HostShare(NamedTuple):
    """Replicas and servers of one host."""

    replicas: tuple[ReplicaId, ...]
    servers: tuple[int, ...]


def placement(hosts: int, replicas: int, servers: int) -> tuple[HostShare, ...]:
    """Return who is on which host of a Ray cluster of equal hosts, host 0 being the driver's.

    Each replica goes to the host that has the fewest, the first server to the driver's, the others in turn to the next.

    >>> for share in placement(2, replicas=3, servers=2): print(share)
    HostShare(replicas=(0, 2), servers=(0,))
    HostShare(replicas=(1,), servers=(1,))
    """
    placed, cores = [list[ReplicaId]() for _ in range(hosts)], dict.fromkeys(range(hosts), 1.0)
    for replica in range(replicas):
        [host] = next_hosts(1, dict(enumerate(map(len, placed))), cores)
        placed[host].append(replica)
    return tuple(HostShare(tuple(there), tuple(range(host, servers, hosts))) for host, there in enumerate(placed))


def server_counts(hosts: int) -> Sequence[int]:
    """Return the numbers of servers to consider: 1, 2, 4, ... and one on each host.

    >>> server_counts(1), server_counts(4), server_counts(6)
    ([1], [1, 2, 4], [1, 2, 4, 6])
    """
    return [*(2**k for k in range(hosts.bit_length()) if 2**k < hosts), hosts]


class Phase(NamedTuple):
    """A part of the time from one Δ to the next: a pull, a push or an update."""

    demands: Mapping[Resource, Seconds]
    """Time for which it occupies each resource, all of them at once."""
    latency_s: Seconds = 0.0
    least_s: Seconds = 0.0
    """Of the part that takes no resource: the slices of the own host."""


class ReplicaClass(NamedTuple):
    """Replicas that are alike: on one host, all of them delayed or none."""

    number: int
    alone_s: Seconds
    """Time of a Δ in which no resource is needed."""
    phases: Sequence[Phase]

    @property
    def demands(self) -> Mapping[Resource, Seconds]:
        """Time for which a Δ occupies each resource."""
        total = dict[Resource, Seconds]()
        for phase in self.phases:
            for resource, seconds in phase.demands.items():
                total[resource] = total.get(resource, 0.0) + seconds
        return total


@final
@dataclass(frozen=True)
class ServedReplicas:
    """Replicas of a model on equal hosts, and servers of its A.

    Args:
        hosts: their number.
        replicas: P.
        servers: n.
        size_bytes: of A, and of a Δ.
        links: of a host.
        batch_s: time that a replica computes a batch.
        apply_s: time of an update on one server, without its Δs.
        gradient_s: time that each Δ adds to it.
        delay: of some replicas.

    >>> links = Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e7, latency_s=1e-5, between_latency_s=1e-4)
    >>> served = ServedReplicas(4, 4, 1, 4e6, links, batch_s=0.1)
    >>> round(served.rate, 2), served.busiest(served.rates)[0]
    (11.07, ('incoming', 0))
    """

    hosts: int
    replicas: int
    servers: int
    size_bytes: float
    links: Links
    batch_s: Seconds
    apply_s: Seconds = 0.0
    gradient_s: Seconds = 0.0
    delay: Delay | None = None

    @cached_property
    def placed(self) -> tuple[HostShare, ...]:
        """Who is on which host."""
        return placement(self.hosts, self.replicas, self.servers)

    @cached_property
    def classes(self) -> Sequence[ReplicaClass]:
        """Replicas by host and by whether they are delayed."""
        delay, result = self.delay, list[ReplicaClass]()
        late = delay.slowed(self.replicas, seed=0) if delay else frozenset[ReplicaId]()
        late_s = self.batch_s + (delay.distribution.mean_s if delay else 0.0)
        for host, share in enumerate(self.placed):
            slowed, phases = len(late.intersection(share.replicas)), self._phases(host)
            kinds = (len(share.replicas) - slowed, self.batch_s), (slowed, late_s)
            result += [ReplicaClass(count, alone_s, phases) for count, alone_s in kinds if count]
        return result

    def update_s(self, deltas: float) -> Seconds:
        """Return the time of an update of so many Δs, on n servers at once."""
        return (self.apply_s + deltas * self.gradient_s) / self.servers

    def message_s(self, host: int) -> Seconds:
        """Return the time of all slices of a push, or of a pull, of one replica while nobody else sends."""
        push = self._phases(host)[0]
        return max(push.least_s, push.latency_s + max(push.demands.values(), default=0.0))

    def _phases(self, host: int) -> Sequence[Phase]:
        """Return a push, the update and a pull of a replica on this host."""
        links, slice_bytes = self.links, self.size_bytes / self.servers
        others = (other for other, share in enumerate(self.placed) if other != host and share.servers)
        slices = {other: len(self.placed[other].servers) for other in others}
        far, slice_s = sum(slices.values()), slice_bytes / links.between_bytes_per_s
        inside_s = links.latency_s + slice_bytes / links.inside_bytes_per_s if far < self.servers else 0.0
        latency_s = links.between_latency_s if far else 0.0
        push, pull = dict[Resource, Seconds](), dict[Resource, Seconds]()
        if far:
            push["outgoing", host] = pull["incoming", host] = far * slice_s
        for other, count in slices.items():
            push["incoming", other] = pull["outgoing", other] = count * slice_s
        update = Phase({SERVERS: self.update_s(1)})
        return Phase(push, latency_s, inside_s), update, Phase(pull, latency_s, inside_s)

    # ------------------------------------------------------------------------------------------------------------ rates

    @cached_property
    def rates(self) -> Sequence[float]:
        """The Δs a second of one replica of each class, where replicas wait for nobody."""
        return mean_value_rates(self.classes)

    @property
    def rate(self) -> float:
        """Return the Δs a second of all such replicas."""
        return sum(each.number * rate for each, rate in zip(self.classes, self.rates, strict=True))

    def busiest(self, rates: Sequence[float]) -> tuple[Resource, float]:
        """Return the resource that is busiest at these rates of each class, and the share of the time that it is."""
        totals = dict[Resource, float]()
        for each, rate in zip(self.classes, rates, strict=True):
            for resource, seconds in each.demands.items():
                totals[resource] = totals.get(resource, 0.0) + each.number * rate * seconds
        return max(totals.items(), key=lambda each: each[1])

    def transfer_s(self, policy: Aggregation[Any], deltas: float) -> Seconds:
        """Return the time of a replica's push, the update and its pull.

        Under policies that let replicas begin together, all of an update's Δs are on the links at once, and then as
        many A; under others they meet by chance. Smooth-switch begins as an asynchronous policy and ends as a
        synchronous one, and K grows linearly.

        Args:
            policy: resolved.
            deltas: of an update that all begin together.
        """
        alone_s = max(self.message_s(host) for host, share in enumerate(self.placed) if share.replicas)
        message_s = max(alone_s, self._latency_s + deltas / self.replicas * self._pushes_s())
        at_once = 2 * message_s + self.update_s(deltas)
        # A replica whose delays have no mean has no rate.
        alone = zip(self.classes, self.rates, strict=True)
        by_chance = max((1 / rate - each.alone_s for each, rate in alone if rate), default=0.0)
        if isinstance(policy, SmoothSwitch):
            return (by_chance + at_once) / 2
        return at_once if together(policy) else by_chance

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that the host sends that sends most, for one Δ of each replica."""
        both_ways = (own + others for own, others in self._slices())
        return max(both_ways) * self.size_bytes / self.servers

    def _pushes_s(self) -> Seconds:
        """Return how long the pushes of all replicas occupy the busiest link; their pulls take as long."""
        return max(map(max, self._slices())) * self.size_bytes / self.servers / self.links.between_bytes_per_s

    def _slices(self) -> Sequence[tuple[int, int]]:
        """Return the slices that replicas of each host push to other hosts, and that its servers get from there."""
        counts = [(len(share.replicas), len(share.servers)) for share in self.placed]
        return [(here * (self.servers - own), (self.replicas - here) * own) for here, own in counts]

    @property
    def _latency_s(self) -> Seconds:
        return self.links.between_latency_s if self.hosts > 1 else self.links.latency_s


def together(policy: Aggregation[Any]) -> bool:
    """Return whether replicas begin their next batches together, after an update: their messages collide.

    >>> from paceline.aggregation import parse
    >>> [together(parse(text)) for text in ("synchronous", "local-steps", "asynchronous", "stale-synchronous")]
    [True, True, False, False]
    """
    match policy:
        case Synchronous() | LocalSteps():
            return True
        case Buffered(hold=hold, cancel=cancel):
            return hold or cancel
    return False


def mean_value_rates(classes: Sequence[ReplicaClass]) -> Sequence[float]:
    """Return the Δs a second of a replica of each class, by Schweitzer's mean value analysis.

    Three replicas that only pull from one link and push to another keep both busy for N / (N + 1) of the time:

    >>> pull, push = Phase({("outgoing", 0): 1.0}), Phase({("incoming", 0): 1.0})
    >>> [round(3 * rate, 6) for rate in mean_value_rates([ReplicaClass(3, 0.0, (push, pull))])]
    [0.75]
    """
    owner, demands, last = _tables(classes)
    phases = [phase for each in classes for phase in each.phases]
    latency_s, least_s = (np.array([getattr(each, name) for each in phases]) for name in ("latency_s", "least_s"))
    numbers, alone_s = (np.array([getattr(each, name) for each in classes]) for name in ("number", "alone_s"))
    others, rates = np.zeros_like(demands), np.zeros(len(classes))  # Q, as who asks finds it
    for _ in range(_MOST_ROUNDS):
        slowest_s = latency_s + (demands * (1 + last * others)).max(axis=1)
        newer = 1 / (alone_s + np.bincount(owner, np.maximum(least_s, slowest_s), len(classes)))
        # Little's law: how many replicas of each class use each resource on average.
        using = np.zeros((len(classes), demands.shape[1]))
        np.add.at(using, owner, newer[owner, None] * demands * (1 + others))
        others = (others + (numbers @ using - using)[owner]) / 2  # halfway, or rates may swing for ever
        converged, rates = bool(np.all(np.abs(newer - rates) <= _EQUAL * newer)), newer
        if converged:
            break
    return [float(rate) for rate in rates]


def _tables(classes: Sequence[ReplicaClass]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the class of each phase, its demands by resource, and H_k where k messages of it are on as many links."""
    resources = sorted({resource for each in classes for phase in each.phases for resource in phase.demands})
    column = {resource: number for number, resource in enumerate(resources)}
    rows = [(number, phase) for number, each in enumerate(classes) for phase in each.phases]
    demands = np.zeros((len(rows), len(resources)))
    last = np.ones_like(demands)
    for row, (_, phase) in enumerate(rows):
        kinds = Counter(kind for kind, _ in phase.demands)
        for resource, seconds in phase.demands.items():
            demands[row, column[resource]] = seconds
            last[row, column[resource]] = sum(1 / k for k in range(1, kinds[resource[0]] + 1))
    return np.array([number for number, _ in rows]), demands, last
