"""What is trained on: devices, hosts, links between them, and what messages take there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Literal, NamedTuple, final

from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Call, Collective, Provenance


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the cores that one worker has."""

    name: str
    flops_per_s: float
    """At the precision that is trained in, without sparsity."""
    memory_bytes: float
    memory_bytes_per_s: float
    provenance: Provenance = field(default_factory=dict[str, str], compare=False)
    multiprocessors: int = 1
    """Which compute a tile of a matrix product each."""
    kind: Literal["cpu", "cuda"] = "cpu"
    """What Paceline's ``device=`` calls it: it says what is carried there."""


@dataclass(frozen=True, slots=True)
class Links:
    """What each device can send and receive at the same time."""

    inside_bytes_per_s: float
    """To others of its host."""
    between_bytes_per_s: float
    """To other hosts, where all devices of a host send at once."""
    latency_s: Seconds = 5e-6
    between_latency_s: Seconds = 1e-5


class DeviceGroup(NamedTuple):
    """Workers that take part in a collective."""

    size: int
    on_host: int
    """How many of them are on one host."""

    @property
    def hosts(self) -> int:
        """That they are spread over."""
        return ceil(self.size / self.on_host)


class Messages(ABC):
    """What messages take: from data sheets or from what was measured."""

    @abstractmethod
    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        """From the first worker's start until all have what they are to have; 0 where the group is one worker."""

    def of(self, call: Call, group: DeviceGroup) -> Seconds:
        """The same of a call."""
        return self.seconds(call.collective, call.size_bytes, group)


@final
@dataclass(frozen=True)
class Described(Messages):
    """From links alone: latency of each round and bytes over bandwidth, inside hosts and then between them.

    With n workers (n - 1)/n of the bytes are moved once for a reduce_scatter or an all_gather, twice for an all_reduce,
    in log2 n rounds (collectives.py says what that rests on). Spread over h hosts with g each, hosts meet with 1/g of
    the bytes for each device.

    Args:
        links: that are there.
        efficiency: of the bandwidths: what a collective gets of them.
    """

    links: Links
    efficiency: float = 1.0

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        if group.size <= 1:
            return 0.0
        if collective in ("send", "broadcast"):
            inside = group.hosts == 1
            return self._once(size_bytes, inside=inside)
        passes = 2 if collective == "all_reduce" else 1
        on_host = min(group.on_host, group.size)
        found = self._ring(size_bytes, on_host, inside=True)
        found += self._ring(size_bytes / on_host, group.hosts, inside=False)
        return passes * found

    def _once(self, size_bytes: float, *, inside: bool) -> Seconds:
        return self._latency_s(inside=inside) + self._bytes_s(size_bytes, inside=inside)

    def _ring(self, size_bytes: float, workers: int, *, inside: bool) -> Seconds:
        moved = size_bytes * (workers - 1) / workers
        return log2(workers) * self._latency_s(inside=inside) + self._bytes_s(moved, inside=inside)

    def _latency_s(self, *, inside: bool) -> Seconds:
        return self.links.latency_s if inside else self.links.between_latency_s

    def _bytes_s(self, size_bytes: float, *, inside: bool) -> Seconds:
        bandwidth = self.links.inside_bytes_per_s if inside else self.links.between_bytes_per_s
        return size_bytes / (bandwidth * self.efficiency)


@final
class Remembered(Messages):
    """Others, each asked once: a search asks for the same few thousands of times.

    Args:
        messages: that are remembered.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._found: dict[tuple[Collective, float, DeviceGroup], Seconds] = {}

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        key = collective, size_bytes, group
        if key not in self._found:
            self._found[key] = self._messages.seconds(collective, size_bytes, group)
        return self._found[key]


@dataclass(frozen=True)
class Cluster:
    """Hosts that are alike.

    Args:
        hosts: how many.
        devices_per_host: workers that one of them has room for.
        device: each of them.
        messages: between them.
        name: what it is called.
        provenance: of each number.
        spread: how far, relatively, a predicted time may lie off because of what is not known of it.
    """

    hosts: int
    devices_per_host: int
    device: Device
    messages: Messages
    name: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    spread: float = 0.0

    @property
    def workers(self) -> int:
        """All that there is room for."""
        return self.hosts * self.devices_per_host

    def group(self, size: int, stride: int) -> DeviceGroup:
        """Workers that lie so many places apart, beginning with the first of a host.

        >>> from paceline.planner.cluster import Cluster, Described, Device, Links
        >>> cluster = Cluster(4, 8, Device("", 1.0, 1.0, 1.0), Described(Links(1.0, 1.0)))
        >>> cluster.group(4, 1), cluster.group(4, 4), cluster.group(4, 8)
        (Group(size=4, on_host=4), Group(size=4, on_host=2), Group(size=4, on_host=1))
        """
        return DeviceGroup(size, max(1, min(size, self.devices_per_host // stride)))

    def shards(self, arrangement: Arrangement) -> DeviceGroup:
        """Those of one stage of one replica."""
        return self.group(arrangement.shards, 1)

    def replicas(self, arrangement: Arrangement, copies: int = 1) -> DeviceGroup:
        """Those that have the same part of the model: of each replica as many as take turns at the stage."""
        inside = arrangement.next_to_shards == "replicas"
        stride = arrangement.shards if inside else arrangement.replica_workers
        many = arrangement.replicas * arrangement.context
        apart, beside = self.group(many, stride), self.group(copies, arrangement.shards)
        return DeviceGroup(many * copies, apart.on_host * beside.on_host)

    def neighbours(self, arrangement: Arrangement) -> DeviceGroup:
        """Two stages, of which the second takes what the first has made; between hosts, if any are."""
        inner = arrangement.replicas * arrangement.context if arrangement.next_to_shards == "replicas" else 1
        inside = arrangement.replica_workers * inner <= self.devices_per_host
        return DeviceGroup(2, 2 if inside else 1)
