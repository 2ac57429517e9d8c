"""The same workload and cluster with a tenth more of one thing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, Collective, LayerCost, Workload
from paceline.plan.cluster import Cluster, Described, Group, Messages

Resource: TypeAlias = Literal["compute", "memory", "inside", "between", "latency"]

RESOURCES: Mapping[Resource, str] = {
    "compute": "10 % more operations a second",
    "memory": "10 % more memory bandwidth",
    "inside": "10 % more bandwidth inside hosts",
    "between": "10 % more bandwidth between hosts",
    "latency": "10 % less latency of messages",
}

MORE = 1.1


def quicker(workload: Workload, cluster: Cluster, resource: Resource) -> tuple[Workload, Cluster] | None:
    """With more of it; None where times were measured as they are, and it can't be told what would change."""
    if resource in ("compute", "memory"):
        return _devices(workload, cluster, resource)
    return workload, replace(cluster, messages=_messages(cluster.messages, resource))


def _devices(workload: Workload, cluster: Cluster, resource: Resource) -> tuple[Workload, Cluster] | None:
    name = "flops_per_s" if resource == "compute" else "memory_bytes_per_s"
    device = replace(cluster.device, **{name: getattr(cluster.device, name) * MORE})
    described: Any = workload
    if getattr(workload, "device", None) == cluster.device:
        return replace(described, device=device), replace(cluster, device=device)
    if resource == "memory":  # of measured layers it is not known what part of them waits for memory
        return workload, replace(cluster, device=device)
    return Sooner(workload), cluster


def _messages(messages: Messages, resource: Resource) -> Messages:
    if not isinstance(messages, Described):
        return Scaled(messages, resource)
    links = messages.links
    match resource:
        case "inside":
            links = replace(links, inside_bytes_per_s=links.inside_bytes_per_s * MORE)
        case "between":
            links = replace(links, between_bytes_per_s=links.between_bytes_per_s * MORE)
        case _:
            latencies = links.latency_s / MORE, links.between_latency_s / MORE
            links = replace(links, latency_s=latencies[0], between_latency_s=latencies[1])
    return replace(messages, links=links)


@final
@dataclass(frozen=True)
class Scaled(Messages):
    """Measured ones; of a group on several hosts all bytes count as between them.

    Args:
        messages: as they were measured.
        resource: of which there is more: ``inside``, ``between`` or ``latency``.
    """

    messages: Messages
    resource: Resource

    def seconds(self, collective: Collective, size_bytes: float, group: Group) -> Seconds:
        found = self.messages.seconds(collective, size_bytes, group)
        if self.resource == "latency":
            return found - self.messages.seconds(collective, 1, group) * (1 - 1 / MORE)
        inside = group.hosts == 1
        if inside != (self.resource == "inside"):
            return found
        return self.messages.seconds(collective, size_bytes / MORE, group)


@final
class Sooner(Workload):
    """Measured layers, each of which takes a tenth less.

    Args:
        workload: as it was measured.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.name, self.global_batch = workload.name, workload.global_batch
        self.numerics, self.sample_words = workload.numerics, workload.sample_words
        self.provenance, self.spread = workload.provenance, workload.spread

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        return [_sooner(layer) for layer in self._workload.layers(arrangement)]

    def refusal(self, arrangement: Arrangement) -> str | None:
        return self._workload.refusal(arrangement)

    def flops(self) -> float | None:
        return self._workload.flops()


def _sooner(layer: LayerCost) -> LayerCost:
    return replace(layer, forward_s=layer.forward_s / MORE, backward_s=layer.backward_s / MORE)
