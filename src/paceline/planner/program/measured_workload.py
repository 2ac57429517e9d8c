"""A program as it was measured on this host, as a workload, and this host as a cluster.

::

    seconds of a unit     (fixed + each · b) · the share of the largest of its shards; on other devices scaled, and no
                          less than the launches of its kernels
    bytes saved           the same, with the shard's share of saved bytes
"""

from collections.abc import Sequence
from copy import copy
from math import isqrt
from typing import final

from paceline.clock.cluster_file import Links
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Call, LayerCost, Workload
from paceline.planner.cluster import Cluster, Described, Device, DeviceGroup, Messages
from paceline.planner.collective_times import GroupCollective, Knot, LatencyCurve, Measured
from paceline.planner.program.profile import PipelinePart, Profile
from paceline.schedule.base import SHORT_PASS_S

# Spread of times that were measured on other devices: half to twice as much, since operators differ in their
# bottleneck.
ELSEWHERE = 1.0


@final
class MeasuredWorkload(Workload):
    """A profile as a workload of arrangements of so many workers.

    Args:
        profile: of the program.
        workers: number that run at the same time: on one host they share memory and caches.
        global_batch: samples of a step.
        scale: of times, on other devices than the measured ones.
        launch_s: least time of a kernel there.
    """

    def __init__(
        self, profile: Profile, workers: int, global_batch: int, scale: float = 1.0, launch_s: Seconds = 0.0
    ) -> None:
        self.profile, self.workers, self.global_batch = profile, workers, global_batch
        self.scale, self.launch_s = scale, launch_s
        self.name, self.numerics, self.provenance = profile.program, profile.numerics, profile.provenance
        self.flops = profile.flops
        self._busy = busy = profile.at_work(workers)
        self._forwards: dict[float, Seconds] = {}
        """Of the whole model, by the samples of a micro-batch."""
        self.spread = max(1.0 - busy.low, busy.high - 1.0) if scale == 1.0 else ELSEWHERE

    def faster(self, factor: float) -> "MeasuredWorkload":
        """Return it on devices with so many times the operations a second; launches take as long as before."""
        changed = copy(self)
        changed.scale = self.scale / factor
        return changed

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        parts: Sequence[PipelinePart] = [PipelinePart(parameters=unit.parameters) for unit in self.profile.units]
        once: tuple[Call, ...] = ()
        if arrangement.shards > 1:
            division, m = self.profile.division(arrangement.shards), arrangement.micro_batches
            # collectives of a whole step, as a part of each micro-batch
            parts, once = division.parts, tuple(Call(s.collective, round(s.size.fixed / m)) for s in division.once)
        layers = [self._layer(n, part, arrangement.micro_batch, () if n else once) for n, part in enumerate(parts)]
        if arrangement.recompute == "none":
            return layers
        # √n segments of the n layers of a stage balance kept inputs and recomputed activations (1604.06174)
        segments = arrangement.stages * max(1, isqrt(len(layers) // arrangement.stages))
        again = sum(layer.saved_bytes for layer in layers) // segments
        return [
            LayerCost(
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
                backward_bytes=layer.backward_bytes,
            )
            for layer in layers
        ]

    def _layer(self, place: int, part: PipelinePart, b: float, at_end: tuple[Call, ...]) -> LayerCost:
        unit, busy = self.profile.units[place], self._busy
        received = self.profile.units[place - 1].output.of(b) if place else 0.0
        gradients = (unit.output.of(b) + received) * part.passed + self.numerics.gradient * part.parameters
        return LayerCost(
            unit.name,
            # A unit is one operator or several, and backward of weights and of inputs are two.
            max(busy.forward[place].of(b) * part.work * self.scale, self.launch_s),
            max(busy.backward[place].of(b) * part.work * self.scale, (1 + bool(unit.parameters)) * self.launch_s),
            part.parameters,
            round(unit.saved.of(b) * part.kept),
            round(unit.output.of(b)),
            0,
            tuple(Call(sent.collective, round(sent.size.of(b))) for sent in part.forward),
            (*(Call(sent.collective, round(sent.size.of(b))) for sent in part.backward), *at_end),
            unit.tied,
            backward_bytes=round(gradients),
        )

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
        if arrangement.schedule == "zero-bubble" and not self.launch_s:
            forward_s = self._forward_s(arrangement.micro_batch) / arrangement.stages
            if forward_s <= SHORT_PASS_S:
                return f"forward passes of {1e3 * forward_s:.2g} ms, where backward in halves gains nothing"
        return None

    def _forward_s(self, micro_batch: float) -> Seconds:
        """Return the seconds of a forward pass of the whole model."""
        if micro_batch not in self._forwards:
            self._forwards[micro_batch] = sum(unit.of(micro_batch) for unit in self._busy.forward)
        return self.scale * self._forwards[micro_batch]


def cluster_of(profile: Profile, workers: int) -> Cluster:
    """Return this host as a cluster shared by so many workers, with the message times measured among its processes.

    There are no other hosts: where a search asks for their link as a bound, it gets the rate of memory.
    """
    moved, threads = 2 * profile.numerics.total * profile.parameters, profile.at_work(workers).threads
    device = Device(
        f"{threads} thread{'s' if threads > 1 else ''} of {profile.machine.processor}",
        profile.flops_per_s,
        profile.machine.memory_bytes / workers,
        moved / max(profile.update_s, 1e-9),
        profile.provenance,
    )
    knots: dict[GroupCollective, list[Knot]] = {}
    for point in profile.points:
        group = DeviceGroup(point.workers, point.workers)
        knots.setdefault(GroupCollective(point.collective, group), []).append(Knot(point.size_bytes, point.seconds))
    messages: Messages = Described(Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e9))  # a single process has none
    if knots:
        fastest = max(point.size_bytes / point.seconds for point in profile.points)
        curves = {key: LatencyCurve(tuple(sorted(each))) for key, each in knots.items()}
        messages = Measured(curves, Described(Links(fastest, fastest, 0.0, 0.0)))
    return Cluster(1, workers, device, messages, "this host", profile.provenance, shares_memory=True)


def elsewhere(profile: Profile, cluster: Cluster, global_batch: int) -> MeasuredWorkload:
    """Return the program on other devices: times of this host, by the ratio of floating-point operations per second.

    An operator takes no less than its launches, which no ratio makes faster.
    """
    scale, launch_s = profile.flops_per_s / cluster.device.flops_per_s, cluster.device.launch_s
    workload = MeasuredWorkload(profile, cluster.workers, global_batch, scale, launch_s)
    source = f"{profile.provenance.get('compute', '')}; scaled by {scale:.3g}, the ratio of operations per second"
    workload.provenance = {**profile.provenance, "compute": source}
    return workload
