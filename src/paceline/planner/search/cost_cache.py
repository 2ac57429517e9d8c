"""A workload on a cluster and its cached costs: stage divisions, closed forms, simulated steps, plans.

A workload on a cluster, and what is known of it: costs by closed forms, simulated steps, plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Cost, LayerCost, OverlapModel, Plan, Workload, merged
from paceline.planner.cluster import Cluster, Remembered
from paceline.planner.cost import EXACT, cost
from paceline.planner.search import carried, event_simulation
from paceline.planner.search.candidates import divides, frames, streams
from paceline.planner.search.lower_bounds import Bounds, Rows, seconds
from paceline.planner.search.objective import Objectives
from paceline.planner.stage_division import (
    StageDivision,
    divide,
    divide_unlike,
    layers_of,
    may_tear,
    shards_of,
    torn,
    with_shards,
)


class Divisions:
    """Of one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._layers: dict[tuple[object, ...], tuple[Sequence[LayerCost], Sequence[Seconds]]] = {}
        self._divisions: dict[tuple[object, ...], StageDivision] = {}

    def fits(self, arrangement: Arrangement) -> bool:
        """Whether there are as many layers as parts, and those that share parameters fall where they can be shared."""
        many = arrangement.stages * arrangement.chunks <= self.count(arrangement)
        return many and (not may_tear(arrangement) or not torn(self.of(arrangement), arrangement))

    def count(self, arrangement: Arrangement) -> int:
        """Of layers."""
        return len(self._of_size(arrangement)[0])

    def of(self, arrangement: Arrangement) -> StageDivision:
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

    def _divided(self, arrangement: Arrangement) -> StageDivision:
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


@dataclass(frozen=True)
class CostCache:
    """What any number of searches of a workload on a cluster have in common."""

    workload: Workload
    cluster: Cluster
    habits: OverlapModel
    divisions: Divisions
    bounds: Bounds
    _rows: dict[tuple[object, ...], tuple[int, Rows]] = field(
        default_factory=dict[tuple[object, ...], tuple[int, Rows]]
    )

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, habits: OverlapModel | None = None) -> "CostCache":
        """Nothing yet."""
        remembered, habits = replace(cluster, messages=Remembered(cluster.messages)), habits or OverlapModel()
        divisions = Divisions(workload, remembered)
        return cls(workload, remembered, habits, divisions, Bounds(workload, remembered, habits))

    def rows(self, batch: int, asked: Objectives) -> Rows:
        """Bounds of all frames of a batch for as many workers as there may be, or more of them: remembered."""
        goes_on = streams(self.cluster, asked)
        key = batch, asked.fixed, asked.replicas, asked.unbuilt, asked.engine, asked.most_chunks, goes_on
        limit = self.limit(asked)
        if key not in self._rows or self._rows[key][0] < limit:
            found = frames(self.workload, self.cluster, asked, batch)
            self._rows[key] = limit, Rows(self.bounds, found, asked.most_chunks, divides(self.cluster, asked), goes_on)
        return self._rows[key][1]

    def limit(self, asked: Objectives) -> int:
        """How many workers there may be."""
        return min(self.cluster.workers, asked.workers or self.cluster.workers)

    def cost(self, arrangement: Arrangement) -> Cost:
        """By closed forms."""
        return cost(self.workload, self.cluster, arrangement, self.habits, self.divisions.of(arrangement))

    def simulated(self, arrangement: Arrangement, closed: Cost) -> Cost:
        """What messages add is by how much later the step ends with them, and bubble what is left without."""
        division = self.divisions.of(arrangement)
        each = event_simulation.parts(division.layers, division.cuts, arrangement, self.cluster, self.habits)
        quiet, ends_s = event_simulation.steps_s(arrangement, (each.quiet(), each))
        bubble = max(0.0, quiet - closed.terms["compute"] - closed.terms["shards"])
        return replace(closed, terms={**closed.terms, "stages": ends_s - quiet, "bubble": bubble})

    def plan(self, arrangement: Arrangement, *, simulate: bool = True) -> Plan:
        """With its times simulated, if asked for and if there is anything to simulate."""
        found = self.cost(arrangement)
        if simulate and arrangement.stages > 1 and arrangement.schedule not in EXACT:
            found = self.simulated(arrangement, found)
        return plan_of(arrangement, found, self.workload, self.cluster, simulated=simulate)


def plan_of(
    arrangement: Arrangement, found: Cost, workload: Workload, cluster: Cluster, *, simulated: bool = False
) -> Plan:
    """What a cost means for a workload."""
    spread, step_s = spread_of(workload, cluster), found.step_s
    samples_per_s = arrangement.samples / step_s
    flops, able = workload.flops(), arrangement.workers * cluster.device.flops_per_s
    return Plan(
        arrangement,
        found,
        step_s / (1 + spread),
        step_s * (1 + spread),
        samples_per_s,
        None if flops is None else flops * samples_per_s / able,
        None if carried.never(arrangement) else carried.strategy(arrangement, cluster.device.kind),
        simulated,
        merged(workload.provenance, cluster.provenance, cluster.device.provenance),
    )


def spread_of(workload: Workload, cluster: Cluster) -> float:
    """Of times of both, which don't know of each other."""
    return float(np.hypot(workload.spread, cluster.spread))
