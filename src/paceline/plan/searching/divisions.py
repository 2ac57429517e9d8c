"""Layers and how they fall to stages, remembered: thousands of arrangements have the same few."""

from collections.abc import Sequence

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, LayerCost, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.division import Division, divide, divide_unlike, layers_of, may_tear, torn
from paceline.plan.searching.sums import seconds
from paceline.plan.sizes import shards_of, with_shards


class Divisions:
    """Of one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._layers: dict[tuple[object, ...], tuple[Sequence[LayerCost], Sequence[Seconds]]] = {}
        self._divisions: dict[tuple[object, ...], Division] = {}

    def fits(self, arrangement: Arrangement) -> bool:
        """Whether there are as many layers as parts, and those that share parameters fall where they can be shared."""
        many = arrangement.stages * arrangement.chunks <= self.count(arrangement)
        return many and (not may_tear(arrangement) or not torn(self.of(arrangement), arrangement))

    def count(self, arrangement: Arrangement) -> int:
        """Of layers."""
        return len(self._of_size(arrangement)[0])

    def of(self, arrangement: Arrangement) -> Division:
        """How layers fall to the stages of an arrangement."""
        key = (
            *_sizes(arrangement),
            arrangement.stages,
            arrangement.chunks,
            arrangement.copies,
            arrangement.stage_shards,
        )
        if key not in self._divisions:
            self._divisions[key] = self._divided(arrangement)
        return self._divisions[key]

    def _divided(self, arrangement: Arrangement) -> Division:
        each = [self._of_size(with_shards(arrangement, t)) for t in shards_of(arrangement)]
        if not arrangement.stage_shards:
            return divide(*each[0], self._cluster, arrangement)
        layers, times = zip(*each, strict=True)
        return divide_unlike(layers, times, self._cluster, arrangement)

    def _of_size(self, arrangement: Arrangement) -> tuple[Sequence[LayerCost], Sequence[Seconds]]:
        key = _sizes(arrangement)
        if key not in self._layers:
            layers = layers_of(self._workload, arrangement)
            each = seconds(layers, self._cluster, arrangement)
            self._layers[key] = layers, [each[id(layer)] for layer in layers]
        return self._layers[key]


def _sizes(arrangement: Arrangement) -> tuple[object, ...]:
    return arrangement.micro_batch, arrangement.shards, arrangement.recompute, arrangement.sequence_divided
