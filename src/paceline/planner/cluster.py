"""Clusters: devices, hosts, the links between them, and the time of messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Literal, NamedTuple, final

from paceline.clock.cluster_file import Links
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Collective, Provenance


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the cores of one worker."""

    name: str
    flops_per_s: float
    """Peak at the training precision, without sparsity."""
    memory_bytes: float
    memory_bytes_per_s: float
    provenance: Provenance = field(default_factory=dict[str, str], compare=False)
    multiprocessors: int = 1
    """Streaming multiprocessors, each of which computes a tile of a matrix product at a time."""
    kind: Literal["cpu", "cuda"] = "cpu"
    """Value of Paceline's ``device=``: it decides which arrangements are supported."""
    launch_s: Seconds = 0.0
    """Least time of a kernel, from one launch to the next; 0 where times are measured, and so have it."""


class DeviceGroup(NamedTuple):
    """Workers of a collective."""

    size: int
    on_host: int
    """Number of them on one host."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return ceil(self.size / self.on_host)


class Messages(ABC):
    """Model of the time of collectives and messages."""

    @abstractmethod
    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        """Return the time until all workers have their result; 0 where the group is one worker."""


@final
@dataclass(frozen=True)
class Described(Messages):
    """Times computed from links alone: latency of each round and bytes over bandwidth, inside hosts and then between.

    With n workers (n - 1)/n of the bytes are moved once for a reduce_scatter or an all_gather, twice for an all_reduce,
    in log2 n rounds (collective_times.py has the sources). Spread over h hosts with g devices each, the second phase
    has 1/g of the bytes for each device.

    Args:
        links: of each device.
        efficiency: share of the bandwidths that a collective gets.
        unit_hosts: hosts that a torus connects without contention; 0: switches connect all alike. Among h hosts of a
            torus in three dimensions, each has (unit / h)^⅓ of the bandwidth when all send at once: h^⅔ links cross the
            middle of a cube of h hosts.
    """

    links: Links
    efficiency: float = 1.0
    unit_hosts: int = 0

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        if group.size <= 1:
            return 0.0
        links = self.links
        inside = links.latency_s, links.inside_bytes_per_s * self.efficiency
        contention = (self.unit_hosts / max(group.hosts, self.unit_hosts)) ** (1 / 3) if self.unit_hosts else 1.0
        between = links.between_latency_s, links.between_bytes_per_s * self.efficiency * contention
        if collective in ("send", "broadcast"):
            latency_s, bandwidth = inside if group.hosts == 1 else between
            return latency_s + size_bytes / bandwidth
        # Hierarchical: each host reduces by itself, then one shard of each host meets the others.
        on_host = min(group.on_host, group.size)
        result = 0.0
        for workers, size, (latency_s, bandwidth) in (
            (on_host, size_bytes, inside),
            (group.hosts, size_bytes / on_host, between),
        ):
            result += log2(workers) * latency_s + size * (workers - 1) / workers / bandwidth
        return (2 if collective == "all_reduce" else 1) * result


@final
@dataclass(eq=False)
class CachedMessages(Messages):
    """Cache of another model: a search needs the same few times thousands of times.

    Args:
        messages: the model to cache.
    """

    messages: Messages
    _cache: dict[tuple[Collective, float, DeviceGroup], Seconds] = field(default_factory=dict, init=False, repr=False)

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        key = collective, size_bytes, group
        if key not in self._cache:
            self._cache[key] = self.messages.seconds(collective, size_bytes, group)
        return self._cache[key]


@dataclass(frozen=True)
class Cluster:
    """Homogeneous hosts.

    Args:
        hosts: their number.
        devices_per_host: workers of one of them.
        device: of each worker.
        messages: between workers.
        name: of the cluster.
        provenance: of each number.
        spread: relative error of predicted times because of unknown properties of the cluster.
        shares_memory: whether its workers are processes on the processors of one host.
    """

    hosts: int
    devices_per_host: int
    device: Device
    messages: Messages
    name: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    spread: float = 0.0
    shares_memory: bool = False

    @property
    def workers(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def group(self, size: int, stride: int) -> DeviceGroup:
        """Return the group of workers whose ranks differ by the stride, beginning with the first of a host.

        >>> from paceline.clock.cluster_file import Links
        >>> from paceline.planner.cluster import Cluster, Described, Device
        >>> cluster = Cluster(4, 8, Device("", 1.0, 1.0, 1.0), Described(Links(1.0, 1.0)))
        >>> cluster.group(4, 1), cluster.group(4, 4), cluster.group(4, 8)
        (DeviceGroup(size=4, on_host=4), DeviceGroup(size=4, on_host=2), DeviceGroup(size=4, on_host=1))
        """
        return DeviceGroup(size, max(1, min(size, self.devices_per_host // stride)))

    def replicas(self, arrangement: Arrangement, copies: int = 1) -> DeviceGroup:
        """Return the group that has the same part of the model: of each replica so many copies of the stage."""
        # Ranks with the same part are a replica apart, or next to the shards.
        adjacent = arrangement.next_to_shards == "replicas"
        stride = arrangement.shards if adjacent else arrangement.replica_workers
        many = arrangement.replicas * arrangement.context
        on_host = self.group(many, stride).on_host * self.group(copies, arrangement.shards).on_host
        return DeviceGroup(many * copies, on_host)

    def neighbours(self, arrangement: Arrangement) -> DeviceGroup:
        """Return the group of two neighbouring stages; on two hosts, if any neighbours are."""
        inner = arrangement.replicas * arrangement.context if arrangement.next_to_shards == "replicas" else 1
        inside = arrangement.replica_workers * inner <= self.devices_per_host
        return DeviceGroup(2, 2 if inside else 1)
