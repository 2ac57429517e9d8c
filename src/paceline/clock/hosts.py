"""The hosts of a run in virtual time: their traffic, which of them are away, and who waits for that.

::

    host with replicas   |- present -|  away: their attempts are void; left(replica, "died")  |- joined(replica) -
    host with a server   |- present -|  away: updates wait, and so do its messages            |- the same slice of A -
"""

import math
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, final

from paceline.clock.network import Network, Traffic
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId, Seconds


class HostChange(NamedTuple):
    """A host that goes, or is back."""

    time_s: Seconds
    host: int
    until_s: Seconds | None
    """When it will be back, infinity for never; None: it is back."""


# Time and host of a change that comes before all others.
_NONE = (-1.0, 0)


@final
class HostChanges:
    """Changes of all hosts in order of time, those of one time in the order of their numbers.

    Args:
        network: of the hosts.
        seed: of the run.
        start_s: of the run; absences that have ended by then are left out.
        last: time and host of the last change before a run was resumed.

    >>> from paceline.clock.cluster_file import Links
    >>> from paceline.clock.network import Absence
    >>> network = Network(3, Links(1.0, 1.0), (Absence(2, 1.0, 4.0), Absence(0, 3.0)))
    >>> changes = HostChanges(network, seed=0)
    >>> [(c.time_s, c.host, c.until_s) for c in (changes.pop(), changes.pop(), changes.pop())], changes.next_s
    ([(1.0, 2, 4.0), (3.0, 0, inf), (4.0, 2, None)], inf)
    """

    def __init__(self, network: Network, seed: int, start_s: Seconds = 0.0, last: tuple[Seconds, int] = _NONE) -> None:
        self.last = last
        """Time and host of the change popped last."""
        self._coming = [_changes(network, host, seed, start_s, last) for host in range(network.hosts)]
        self._queue = [change for coming in self._coming if (change := next(coming, None)) is not None]
        heapify(self._queue)

    @property
    def next_s(self) -> Seconds:
        """Return when the next change happens; infinity where there is none."""
        return self._queue[0].time_s if self._queue else math.inf

    def pop(self) -> HostChange:
        """Take the next change."""
        change = heappop(self._queue)
        self.last = change.time_s, change.host
        following = next(self._coming[change.host], None)
        if following is not None:
            heappush(self._queue, following)
        return change


def _changes(
    network: Network, host: int, seed: int, start_s: Seconds, last: tuple[Seconds, int]
) -> Iterator[HostChange]:
    for from_s, until_s in network.absences_of(host, seed):
        for change in (HostChange(from_s, host, until_s), HostChange(until_s, host, None)):
            if until_s > start_s and last < (change.time_s, host) < (math.inf, 0):
                yield change


class NetworkState(NamedTuple):
    """The state of links and hosts."""

    outgoing_s: tuple[Seconds, ...]
    """When each host's link will be free."""
    incoming_s: tuple[Seconds, ...]
    last_change: tuple[Seconds, int]
    """Time and host."""
    served_s: Seconds
    returning: tuple[ReplicaId, ...]
    gone: tuple[ReplicaId, ...]


@final
class Hosts:
    """All hosts of a run; without a network they are one, which never goes.

    Args:
        network: of the run; None: it has none.
        replicas: P.
        servers: n; None: as many as hosts.
        size_bytes: of A, and of a Δ.
        seed: of the run.
        start_s: where the run begins.
    """

    def __init__(
        self,
        network: Network | None,
        replicas: int,
        servers: int | None,
        size_bytes: float,
        seed: int,
        start_s: Seconds = 0.0,
    ) -> None:
        self._network, self._replicas, self._seed = network, replicas, seed
        self.servers = servers or (network.hosts if network is not None else 1)
        """n, of which each has a slice of A."""
        self.traffic = Traffic(network, self.servers, size_bytes) if network is not None else None
        self._changes = HostChanges(network, seed, start_s) if network is not None else None
        self.served_s: Seconds = 0.0
        """When all servers will be there that have gone so far."""
        self.returning: set[ReplicaId] = set()
        """Replicas that have died, and will be back."""
        self.gone: set[ReplicaId] = set()
        """Replicas that have died for good."""

    @property
    def next_s(self) -> Seconds:
        """Return when a host goes or is back next; infinity for never."""
        return self._changes.next_s if self._changes is not None else math.inf

    @property
    def changed_s(self) -> Seconds:
        """Return when a host went or was back last."""
        return self._changes.last[0] if self._changes is not None else -math.inf

    def change(self, present: Collection[ReplicaId]) -> tuple[HostChange, Sequence[ReplicaId]]:
        """Take the next change, at which those of its host's replicas die that are present, or all are back.

        Returns:
            The change, and the replicas of its host.
        """
        assert self._changes is not None
        assert self._network is not None
        assert self.traffic is not None
        change = self._changes.pop()
        replicas, until_s = range(change.host, self._replicas, self._network.hosts), change.until_s
        if until_s is None:
            self.returning.difference_update(replicas)
            return change, replicas
        lost = self.returning if until_s < math.inf else self.gone
        lost.update(replica for replica in replicas if replica in present)
        if until_s < math.inf:
            self.traffic.hold(change.host, until_s)
            if change.host < self.servers:
                self.served_s = max(self.served_s, until_s)
        return change, replicas

    def state(self) -> NetworkState | None:
        """Return the state of links and hosts; None without a network."""
        if self.traffic is None or self._changes is None:
            return None
        links = tuple(self.traffic.outgoing_s), tuple(self.traffic.incoming_s)
        away = tuple(sorted(self.returning)), tuple(sorted(self.gone))
        return NetworkState(*links, self._changes.last, self.served_s, *away)

    def restore(self, state: NetworkState | None) -> None:
        """Go on where a run stopped; None: it had no network."""
        if state is None or self.traffic is None or self._network is None:
            return
        self.traffic.outgoing_s[:], self.traffic.incoming_s[:] = state.outgoing_s, state.incoming_s
        self._changes = HostChanges(self._network, self._seed, last=state.last_change)
        self.served_s, self.returning, self.gone = state.served_s, {*state.returning}, {*state.gone}


def refuse_servers(network: Network | None, servers: int | None) -> None:
    """Raise InputError for several servers without a network, and for one whose host goes for good."""
    if network is None:
        if servers is not None and servers > 1:
            raise InputError(
                f"servers={servers} have a slice of A each, but times= says nothing of the way to them; write "
                "times='compute=0.01 network=cluster.toml', or servers=1"
            )
        return
    for host, from_s, until_s in ((each.host, each.from_s, each.until_s) for each in network.absences):
        if host < (servers or network.hosts) and until_s == math.inf:
            raise InputError(
                f"network={network}: host {host} has a server of A, and goes for good at {from_s:g} s; write until_s = "
                "… under [[absences]], or fewer servers="
            )
