"""A workload on a cluster, and what is known of it: costs by closed forms, simulated steps, plans."""

from dataclasses import dataclass, field, replace

import numpy as np

from paceline.plan.base import Arrangement, Cost, Plan, Workload, merged
from paceline.plan.cluster import Cluster, Remembered
from paceline.plan.cost import EXACT, cost
from paceline.plan.habits import Habits
from paceline.plan.searching import carried, simulated
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.bounds import Bounds
from paceline.plan.searching.candidates import divides, frames, streams
from paceline.plan.searching.divisions import Divisions
from paceline.plan.searching.rows import Rows


@dataclass(frozen=True)
class Known:
    """What any number of searches of a workload on a cluster have in common."""

    workload: Workload
    cluster: Cluster
    habits: Habits
    divisions: Divisions
    bounds: Bounds
    _rows: dict[tuple[object, ...], tuple[int, Rows]] = field(
        default_factory=dict[tuple[object, ...], tuple[int, Rows]]
    )

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, habits: Habits | None = None) -> "Known":
        """Nothing yet."""
        remembered, habits = replace(cluster, messages=Remembered(cluster.messages)), habits or Habits()
        divisions = Divisions(workload, remembered)
        return cls(workload, remembered, habits, divisions, Bounds(workload, remembered, habits))

    def rows(self, batch: int, asked: Asked) -> Rows:
        """Bounds of all frames of a batch for as many workers as there may be, or more of them: remembered."""
        goes_on = streams(self.cluster, asked)
        key = batch, asked.fixed, asked.replicas, asked.unbuilt, asked.engine, asked.most_chunks, goes_on
        limit = self.limit(asked)
        if key not in self._rows or self._rows[key][0] < limit:
            found = frames(self.workload, self.cluster, asked, batch)
            self._rows[key] = limit, Rows(self.bounds, found, asked.most_chunks, divides(self.cluster, asked), goes_on)
        return self._rows[key][1]

    def limit(self, asked: Asked) -> int:
        """How many workers there may be."""
        return min(self.cluster.workers, asked.workers or self.cluster.workers)

    def cost(self, arrangement: Arrangement) -> Cost:
        """By closed forms."""
        return cost(self.workload, self.cluster, arrangement, self.habits, self.divisions.of(arrangement))

    def simulated(self, arrangement: Arrangement, closed: Cost) -> Cost:
        """What messages add is by how much later the step ends with them, and bubble what is left without."""
        division = self.divisions.of(arrangement)
        each = simulated.parts(division.layers, division.cuts, arrangement, self.cluster, self.habits)
        quiet, ends_s = simulated.steps_s(arrangement, (each.quiet(), each))
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
