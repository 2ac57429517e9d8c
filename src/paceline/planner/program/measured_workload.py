"""A program as it was measured on this host, as a workload, and this host as a cluster.

::

    seconds of a unit     (fixed + each · b) · the share of the largest of its shards
    bytes saved           the same, with the shard's share of saved bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import final

from paceline.planner.base import Arrangement, Call, LayerCost, Numerics, Provenance, Recomputed, Workload
from paceline.planner.cluster import Cluster, Described, Device, DeviceGroup, Links, Messages
from paceline.planner.collective_times import GroupCollective, Knot, LatencyCurve, Measured
from paceline.planner.program.profile import Busy, PipelinePart, Profile, Sent

ELSEWHERE = 1.0
"""Spread of times that were measured on other devices: half to twice as much, since operators differ in their
bottleneck."""


@final
@dataclass
class MeasuredWorkload(Workload):
    """A profile as a workload of arrangements of so many workers.

    Args:
        profile: of the program.
        workers: number that run at the same time: on one host they share memory and caches.
        global_batch: samples of a step.
        scale: of times, on other devices than the measured ones.
    """

    profile: Profile
    workers: int
    global_batch: int
    scale: float = 1.0
    name: str = field(init=False)
    numerics: Numerics = field(init=False)
    sample_words: int = field(default=1, init=False)
    provenance: Provenance = field(init=False)
    spread: float = field(init=False)

    def __post_init__(self) -> None:
        profile = self.profile
        self.name, self.numerics, self.provenance = profile.program, profile.numerics, profile.provenance
        self.spread = self._busy.spread if self.scale == 1.0 else ELSEWHERE

    @property
    def _busy(self) -> Busy:
        return self.profile.at_work(self.workers)

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        if arrangement.shards == 1:
            parts: Sequence[PipelinePart] = [PipelinePart(parameters=unit.parameters) for unit in self.profile.units]
        else:
            parts = self.profile.division(arrangement.shards).parts
        layers = [self._layer(place, part, arrangement) for place, part in enumerate(parts)]
        # √n segments of the n layers of a stage balance kept inputs and recomputed activations
        segments = arrangement.stages * max(1, isqrt(len(layers) // arrangement.stages))
        again = sum(layer.saved_bytes for layer in layers) // segments
        return [recomputed(layer, arrangement.recompute, again) for layer in layers]

    def refusal(self, arrangement: Arrangement) -> str | None:
        profile, workers, parts = self.profile, arrangement.workers, arrangement.stages * arrangement.chunks
        if workers > self.workers:
            return f"{workers} workers, but there are {self.workers}"
        if parts > 1 and profile.uncut:
            return f"the model can't be cut: {profile.uncut}"
        if parts > 1 and parts > len(profile.units):
            return f"{parts} parts, but the model has {len(profile.units)} that can be cut apart"
        if arrangement.shards > 1 and (reason := profile.uncut or profile.division(arrangement.shards).refused):
            return f"the model can't be divided: {reason}"
        if arrangement.micro_batch < 1:
            return f"micro-batches of {arrangement.micro_batch:g} samples"
        return None

    def flops(self) -> float | None:
        return self.profile.flops

    def _layer(self, place: int, part: PipelinePart, arrangement: Arrangement) -> LayerCost:
        unit, busy, b = self.profile.units[place], self._busy, arrangement.micro_batch
        return LayerCost(
            unit.name,
            busy.forward[place].of(b) * part.work * self.scale,
            busy.backward[place].of(b) * part.work * self.scale,
            part.parameters,
            round(unit.saved.of(b) * part.kept),
            round(unit.output.of(b)),
            0,
            calls(part.forward, b),
            (*calls(part.backward, b), *self._at_the_end(place, arrangement)),
            unit.tied,
        )

    def _at_the_end(self, place: int, arrangement: Arrangement) -> tuple[Call, ...]:
        """Return the shards' collectives of a whole step, as a part of each micro-batch."""
        if place or arrangement.shards == 1:
            return ()
        once = self.profile.division(arrangement.shards).once
        return tuple(Call(each.collective, round(each.size.fixed / arrangement.micro_batches)) for each in once)


def calls(sent: Sequence[Sent], samples: float) -> tuple[Call, ...]:
    """Return the collectives of a micro-batch of so many samples."""
    return tuple(Call(each.collective, round(each.size.of(samples))) for each in sent)


def recomputed(layer: LayerCost, mode: Recomputed, again: int) -> LayerCost:
    """Return the layer with recomputed activations, ``again`` bytes of them at one time: those of one of √n segments
    (1604.06174)."""
    if mode == "none":
        return layer
    return LayerCost(
        layer.name,
        layer.forward_s,
        layer.forward_s + layer.backward_s,
        layer.parameters,
        0,
        layer.output_bytes,
        again,
        layer.forward_calls,
        (*layer.forward_calls, *layer.backward_calls),
        layer.tied,
    )


def cluster_of(profile: Profile, workers: int) -> Cluster:
    """Return this host as a cluster shared by so many workers."""
    moved = 2 * profile.numerics.total * profile.parameters
    threads = profile.at_work(workers).threads
    device = Device(
        f"{threads} thread{'s' if threads > 1 else ''} of {profile.machine.processor}",
        profile.flops_per_s,
        profile.machine.memory_bytes / workers,
        moved / max(profile.update_s, 1e-9),
        profile.provenance,
    )
    return Cluster(1, workers, device, messages_of(profile), "this host", profile.provenance)


def elsewhere(profile: Profile, cluster: Cluster, global_batch: int) -> MeasuredWorkload:
    """Return the program on other devices: times of this host, by the ratio of floating-point operations per second."""
    scale = profile.flops_per_s / cluster.device.flops_per_s
    workload = MeasuredWorkload(profile, cluster.workers, global_batch, scale)
    source = f"{profile.provenance.get('compute', '')}; scaled by {scale:.3g}, the ratio of operations per second"
    workload.provenance = {**profile.provenance, "compute": source}
    return workload


def messages_of(profile: Profile) -> Messages:
    """Return the message times measured among processes of this host; a single process has none.

    There are no other hosts: where a search asks for their link as a bound, it gets the rate of memory.
    """
    knots: dict[GroupCollective, list[Knot]] = {}
    for point in profile.points:
        group = DeviceGroup(point.workers, point.workers)
        knots.setdefault(GroupCollective(point.collective, group), []).append(Knot(point.size_bytes, point.seconds))
    if not knots:
        return Described(Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e9))
    fastest = max(point.size_bytes / point.seconds for point in profile.points)
    otherwise = Described(Links(fastest, fastest, 0.0, 0.0))
    return Measured({key: LatencyCurve(tuple(sorted(each))) for key, each in knots.items()}, otherwise)
