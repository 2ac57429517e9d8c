"""A workload and a cluster of round numbers, whose costs are told by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement, Call, LayerCost, Numerics, Workload
from paceline.planner.cluster import Cluster, Described, Device


@dataclass(frozen=True)
class Plain(Workload):
    """Layers that take so many milliseconds a sample and as many more for backward as forward, and a fixed part."""

    milliseconds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    parameters: int = 1000
    saved_bytes: int = 100
    output_bytes: int = 10
    fixed_ms: float = 0.0
    global_batch: int = 8
    most_shards: int = 4
    alike: bool = False
    """Whether layers that take the same time are one object, as those of a described model are."""
    numerics: Numerics = field(default_factory=lambda: Numerics(4, 4, 8))
    name: str = "plain"
    spread: float = 0.1
    flops: float | None = 1e9
    provenance: Mapping[str, str] = field(default_factory=lambda: {"times": "made up"})

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        if self.alike:
            made = {each: self._layer(f"{each} ms", each, arrangement) for each in set(self.milliseconds)}
            return [made[each] for each in self.milliseconds]
        return [self._layer(f"{place}", each, arrangement) for place, each in enumerate(self.milliseconds)]

    def _layer(self, name: str, milliseconds: float, arrangement: Arrangement) -> LayerCost:
        b, t, full = arrangement.micro_batch, arrangement.shards, arrangement.recompute == "full"
        forward_s = (self.fixed_ms + milliseconds * b / t) / 1e3
        calls = (Call("all_reduce", int(self.output_bytes * b)),) if t > 1 else ()
        return LayerCost(
            name,
            forward_s,
            forward_s * (3 if full else 2),
            self.parameters // t,
            int((self.output_bytes if full else self.saved_bytes / t) * b),
            int(self.output_bytes * b),
            int(self.saved_bytes * b / t) if full else 0,
            calls,
            calls * (2 if full else 1),
        )

    def refusal(self, arrangement: Arrangement) -> str | None:
        return "too many shards" if arrangement.shards > self.most_shards else None


def cluster(
    hosts: int = 1, per_host: int = 4, memory_bytes: float = 1e6, bytes_per_s: float = 1e6, latency_s: float = 1e-5
) -> Cluster:
    """Between hosts four times slower than inside."""
    device = Device("plain", 1e12, memory_bytes, 1e9, {"memory_bytes": "made up"})
    links = Links(bytes_per_s, bytes_per_s / 4, latency_s, 2 * latency_s)
    return Cluster(hosts, per_host, device, Described(links), spread=0.0)
