"""A program as it was measured on this host, as a workload, and this host as a cluster.

::

    seconds of a unit     (fixed + each · b) · the share of the largest of its shards
    bytes that it keeps   the same, of what it saves
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
"""Spread of times that were measured on other devices: by half or twice as much, for operators differ in what binds
them."""


@final
@dataclass
class MeasuredWorkload(Workload):
    """What a profile says of arrangements of so many workers.

    Args:
        profile: of the program.
        workers: who are at work at the same time: on one host they share memory and caches.
        global_batch: samples of a step.
        scale: of times, where it is to run on other devices than it was measured on.
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
        parts = self._parts(arrangement.shards)
        made = [self._layer(place, part, arrangement) for place, part in enumerate(parts)]
        pieces = arrangement.stages * max(1, isqrt(len(made) // arrangement.stages))
        again = sum(layer.saved_bytes for layer in made) // pieces
        return [recomputed(layer, arrangement.recompute, again) for layer in made]

    def refusal(self, arrangement: Arrangement) -> str | None:
        for refused in (self._too_many, self._uncut, self._undivided, self._short):
            why = refused(arrangement)
            if why:
                return why
        return None

    def flops(self) -> float | None:
        return self.profile.flops

    def _parts(self, shards: int) -> Sequence[PipelinePart]:
        if shards == 1:
            return [PipelinePart(parameters=unit.parameters) for unit in self.profile.units]
        return self.profile.division(shards).parts

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
        """What shards sum once a step, as a part of each micro-batch."""
        if place or arrangement.shards == 1:
            return ()
        once = self.profile.division(arrangement.shards).once
        return tuple(Call(each.collective, round(each.size.fixed / arrangement.micro_batches)) for each in once)

    def _too_many(self, arrangement: Arrangement) -> str:
        most = self.workers
        return f"{arrangement.workers} workers, but there are {most}" if arrangement.workers > most else ""

    def _uncut(self, arrangement: Arrangement) -> str:
        parts, units = arrangement.stages * arrangement.chunks, len(self.profile.units)
        if parts == 1:
            return ""
        if self.profile.uncut:
            return f"the model can't be cut: {self.profile.uncut}"
        return f"{parts} parts, but the model has {units} that can be cut apart" if parts > units else ""

    def _undivided(self, arrangement: Arrangement) -> str:
        if arrangement.shards == 1:
            return ""
        if self.profile.uncut:
            return f"the model can't be divided: {self.profile.uncut}"
        refused = self.profile.division(arrangement.shards).refused
        return f"the model can't be divided: {refused}" if refused else ""

    def _short(self, arrangement: Arrangement) -> str:
        return f"micro-batches of {arrangement.micro_batch:g} samples" if arrangement.micro_batch < 1 else ""


def calls(sent: Sequence[Sent], samples: float) -> tuple[Call, ...]:
    """Of a micro-batch of so many."""
    return tuple(Call(each.collective, round(each.size.of(samples))) for each in sent)


def recomputed(layer: LayerCost, how: Recomputed, again: int) -> LayerCost:
    """The same where activations are made again, ``again`` bytes of them at one time: those of one of √n pieces."""
    if how == "none":
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
    """This host, as far as so many workers have it."""
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
    """The program on other devices: what it takes here, by the ratio of floating-point operations per second."""
    scale = profile.flops_per_s / cluster.device.flops_per_s
    made = MeasuredWorkload(profile, cluster.workers, global_batch, scale)
    told = f"{profile.provenance.get('compute', '')}; scaled by {scale:.3g}, the ratio of operations per second"
    made.provenance = {**profile.provenance, "compute": told}
    return made


def messages_of(profile: Profile) -> Messages:
    """From what was measured among processes of this host; of one process there are none.

    There are no other hosts: a search that asks what one would take for a bound is told what memory does.
    """
    found: dict[GroupCollective, list[Knot]] = {}
    for point in profile.points:
        group = DeviceGroup(point.workers, point.workers)
        found.setdefault(GroupCollective(point.collective, group), []).append(Knot(point.size_bytes, point.seconds))
    if not found:
        return Described(Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e9))
    quickest = max(point.size_bytes / point.seconds for point in profile.points)
    otherwise = Described(Links(quickest, quickest, 0.0, 0.0))
    return Measured({known: LatencyCurve(tuple(sorted(knots))) for known, knots in found.items()}, otherwise)
