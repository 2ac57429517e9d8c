"""Layers and how they fall to stages, remembered: thousands of arrangements have the same few."""

from collections.abc import Sequence

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, LayerCost, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.division import Division, divide, layers_of
from paceline.plan.searching.sums import seconds


class Divisions:
    """Of one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._layers: dict[tuple[object, ...], tuple[Sequence[LayerCost], Sequence[Seconds]]] = {}
        self._divisions: dict[tuple[object, ...], Division] = {}

    def fits(self, arrangement: Arrangement) -> bool:
        """Whether there are as many layers as parts."""
        return arrangement.stages * arrangement.chunks <= self.count(arrangement)

    def count(self, arrangement: Arrangement) -> int:
        """Of layers."""
        return len(self._of_size(arrangement)[0])

    def of(self, arrangement: Arrangement) -> Division:
        """How layers fall to the stages of an arrangement."""
        key = (*_sizes(arrangement), arrangement.stages, arrangement.chunks, arrangement.copies)
        if key not in self._divisions:
            layers, each = self._of_size(arrangement)
            self._divisions[key] = divide(layers, each, self._cluster, arrangement)
        return self._divisions[key]

    def _of_size(self, arrangement: Arrangement) -> tuple[Sequence[LayerCost], Sequence[Seconds]]:
        key = _sizes(arrangement)
        if key not in self._layers:
            layers = layers_of(self._workload, arrangement)
            each = seconds(layers, self._cluster, arrangement)
            self._layers[key] = layers, [each[id(layer)] for layer in layers]
        return self._layers[key]


def _sizes(arrangement: Arrangement) -> tuple[object, ...]:
    return arrangement.micro_batch, arrangement.shards, arrangement.recompute, arrangement.sequence_divided
