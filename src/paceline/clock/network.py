"""Networks in virtual time: hosts with links that queue, servers of A in slices, hosts that go and come back.

Each host has a link to the others, which carries one message at a time in each direction, first in, first out::

    host a, outgoing   |- a to b ----|- a to c ----|
    host b, incoming   |- a to b ----|- c to b ----|      c to b waits for b, and a to c for a
    at b                             . latency .|         a to b has arrived

A message of n bytes begins when the outgoing link of its host and the incoming link of the other are free, occupies
both for n / ``between_bytes_per_s``, and arrives ``between_latency_s`` later. Inside a host it takes ``latency_s`` and
n / ``inside_bytes_per_s``, and waits for nobody: cores copy in memory at the same time. What has been handed to the
network is sent, also where nobody waits for it any more.

The file is that of the planner's clusters (clock/cluster_file.py), with two sections that may be left out::

    [[absences]]                    # one for each; the host goes, and its replicas die
    host = 3                        # from 0
    from_s = 100.0
    until_s = 200.0                 # left out: it stays away

    [failures]                      # of every host, exponential, drawn from the run's seed
    mean_time_between_s = 86400.0   # from a return to the next failure
    mean_time_to_repair_s = 300.0
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from heapq import merge
from pathlib import Path
from typing import final

import numpy as np

from paceline.clock.cluster_file import ClusterKeys, Links, cluster_keys, given_links, refuse_not_positive
from paceline.clock.distributions import Exponential
from paceline.core.errors import InputError, check_int
from paceline.core.toml_sections import checked, section, text_of
from paceline.core.types import ReplicaId, Seconds

_FAILURES = int.from_bytes(b"failures")


@dataclass(frozen=True, slots=True)
class Absence:
    """A time during which a host is away."""

    host: int
    from_s: Seconds
    until_s: Seconds = math.inf


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of each host, as means of exponential distributions."""

    mean_time_between_s: Seconds
    mean_time_to_repair_s: Seconds


@final
@dataclass(frozen=True)
class Network:
    """Hosts and the links between them; replica r is on host r mod ``hosts``, and so is server r.

    Args:
        hosts: their number.
        links: of each host.
        absences: of hosts, with their times.
        failures: of every host; None: none but ``absences``.
        path: of the file that says so; empty: it was built in Python, and has no text form.

    Raises:
        InputError: a number that is not above 0, a host that there is not, or an absence that ends before it begins.

    >>> network = Network(hosts=2, links=Links(10e9, 1e9), absences=(Absence(1, 5.0, 8.0), Absence(1, 7.0, 9.0)))
    >>> network.host_of(3), list(network.absences_of(1, seed=0))
    (1, [(5.0, 9.0)])
    """

    hosts: int
    links: Links
    absences: tuple[Absence, ...] = ()
    failures: Failures | None = None
    path: str = ""

    def __post_init__(self) -> None:
        check_int("hosts", self.hosts, least=1)
        refuse_not_positive("links", asdict(self.links))
        if self.failures is not None:
            refuse_not_positive("failures", asdict(self.failures))
        for host, from_s, until_s in map(_values, self.absences):
            if not 0 <= host < self.hosts:
                raise InputError(
                    f"[[absences]] says host = {host}, but hosts = {self.hosts} are numbered from 0 to "
                    f"{self.hosts - 1}; write one of these."
                )
            if not 0 <= from_s < until_s:
                raise InputError(
                    f"[[absences]] says from_s = {from_s} and until_s = {until_s}; write 0 or more for the first, and "
                    "more than that for the second."
                )

    @classmethod
    def read(cls, path: str) -> "Network":
        """Read the file of a cluster.

        Raises:
            InputError: it can't be read, has no links, or a key is unknown, missing, of another kind or out of range.
        """
        if "".join(path.split()) != path:
            raise InputError(f"network={path!r} must hold no blank; rename the file or link to it.")
        try:
            return cls._of(cluster_keys(text_of(Path(path))), path)
        except InputError as error:
            raise InputError(f"network={path}: {error}") from None

    @classmethod
    def _of(cls, keys: ClusterKeys, path: str) -> "Network":
        links = Links(**given_links(keys, {}))
        absences = keys.absences or ()
        if not isinstance(absences, list | tuple) or not all(isinstance(each, dict) for each in absences):
            raise InputError("absences are sections of their own; write [[absences]] before the lines of each.")
        away = tuple(Absence(**checked(Absence, each, "absences")) for each in absences)
        failures = None
        if keys.failures is not None:
            failures = Failures(**checked(Failures, section({"failures": keys.failures}, "failures"), "failures"))
        return cls(keys.hosts, links, away, failures, path)

    def __str__(self) -> str:
        return self.path or "<Network>"

    @property
    def lasting(self) -> bool:
        """Return whether no host ever goes."""
        return not self.absences and self.failures is None

    def host_of(self, number: int) -> int:
        """Return the host of the replica, or of the server, of a number."""
        return number % self.hosts

    def absences_of(self, host: int, seed: int) -> Iterator[tuple[Seconds, Seconds]]:
        """Yield the times from which and until which a host is away, in order; those that overlap are one."""
        written = sorted((each.from_s, each.until_s) for each in self.absences if each.host == host)
        drawn = _failures(self.failures, np.random.default_rng([seed, _FAILURES, host])) if self.failures else ()
        away: tuple[Seconds, Seconds] | None = None
        for from_s, until_s in merge(written, drawn):
            if away is None or from_s > away[1]:
                if away is not None:
                    yield away
                away = from_s, until_s
            else:
                away = away[0], max(away[1], until_s)
            if away[1] == math.inf:
                break  # what is drawn has no end
        if away is not None:
            yield away


def _values(absence: Absence) -> tuple[int, Seconds, Seconds]:
    return absence.host, absence.from_s, absence.until_s


def _failures(failures: Failures, rng: np.random.Generator) -> Iterator[tuple[Seconds, Seconds]]:
    between = Exponential(failures.mean_time_between_s).stream(rng.spawn(1)[0])
    repairs = Exponential(failures.mean_time_to_repair_s).stream(rng.spawn(1)[0])
    now_s = 0.0
    for up_s, down_s in zip(between, repairs, strict=False):
        yield now_s + up_s, now_s + up_s + down_s
        now_s += up_s + down_s


# ------------------------------------------------------------------------------------------------------------ messages


@final
class Traffic:
    """Messages between the replicas of a run and the servers of A; calls are in order of virtual time.

    Args:
        network: that they take.
        servers: n, each of which has 1/n of A.
        size_bytes: of A, and of a Δ.

    >>> links = Links(inside_bytes_per_s=4.0, between_bytes_per_s=2.0, latency_s=0.5, between_latency_s=1.0)
    >>> traffic = Traffic(Network(2, links), servers=1, size_bytes=8)
    >>> traffic.pull(0, 0.0), traffic.pull(1, 0.0), traffic.pull(1, 0.0), traffic.push(1, 2.0)
    (2.5, 5.0, 9.0, 7.0)
    """

    def __init__(self, network: Network, servers: int, size_bytes: float) -> None:
        slice_bytes, links = size_bytes / servers, network.links
        self._host_of, self._servers = network.host_of, [network.host_of(server) for server in range(servers)]
        self._inside_s = links.latency_s + slice_bytes / links.inside_bytes_per_s
        self._between_s, self._latency_s = slice_bytes / links.between_bytes_per_s, links.between_latency_s
        self.outgoing_s, self.incoming_s = [0.0] * network.hosts, [0.0] * network.hosts
        """When each host's link will be free."""

    def pull(self, replica: ReplicaId, at_s: Seconds, *, has: bool = False) -> Seconds:
        """Send a replica A, a slice from each server; return when the last one arrives.

        Args:
            replica: that goes on.
            at_s: when.
            has: whether it has this A, and is sent the word to go on alone.
        """
        host = self._host_of(replica)
        if has:
            return at_s + (0.0 if host == self._servers[0] else self._latency_s)
        return max([self._message(server, host, at_s) for server in self._servers])

    def push(self, replica: ReplicaId, at_s: Seconds) -> Seconds:
        """Send the Δ of a replica, a slice to each server; return when the last one arrives."""
        host = self._host_of(replica)
        return max([self._message(host, server, at_s) for server in self._servers])

    def hold(self, host: int, until_s: Seconds) -> None:
        """Let the next messages to and from a host wait until it is back."""
        for free in (self.outgoing_s, self.incoming_s):
            free[host] = max(free[host], until_s)

    def _message(self, sender: int, receiver: int, at_s: Seconds) -> Seconds:
        if sender == receiver:
            return at_s + self._inside_s
        free_s = max(at_s, self.outgoing_s[sender], self.incoming_s[receiver]) + self._between_s
        self.outgoing_s[sender] = self.incoming_s[receiver] = free_s
        return free_s + self._latency_s
