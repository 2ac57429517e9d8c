"""A workload on a cluster, and what is known of it: costs by closed forms, simulated steps, plans."""

from dataclasses import dataclass, replace

import numpy as np

from paceline.plan.base import Arrangement, Cost, Plan, Workload, merged
from paceline.plan.cluster import Cluster, Remembered
from paceline.plan.cost import cost
from paceline.plan.habits import Habits
from paceline.plan.searching import carried, simulated
from paceline.plan.searching.bounds import Bounds
from paceline.plan.searching.divisions import Divisions


@dataclass(frozen=True)
class Known:
    """What any number of searches of a workload on a cluster have in common."""

    workload: Workload
    cluster: Cluster
    habits: Habits
    divisions: Divisions
    bounds: Bounds

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, habits: Habits | None = None) -> "Known":
        """Nothing yet."""
        remembered, habits = replace(cluster, messages=Remembered(cluster.messages)), habits or Habits()
        divisions = Divisions(workload, remembered)
        return cls(workload, remembered, habits, divisions, Bounds(workload, remembered, habits))

    def cost(self, arrangement: Arrangement) -> Cost:
        """By closed forms."""
        return cost(self.workload, self.cluster, arrangement, self.habits, self.divisions.of(arrangement))

    def simulated(self, arrangement: Arrangement, closed: Cost) -> Cost:
        """What messages add is by how much later the step ends with them, and bubble what is left without."""
        division = self.divisions.of(arrangement)
        each = simulated.parts(division.layers, division.cuts, arrangement, self.cluster, self.habits)
        quiet = simulated.step_s(arrangement, each.quiet())
        bubble = max(0.0, quiet - closed.terms["compute"] - closed.terms["shards"])
        messages = simulated.step_s(arrangement, each) - quiet
        return replace(closed, terms={**closed.terms, "stages": messages, "bubble": bubble})

    def plan(self, arrangement: Arrangement, *, simulate: bool = True) -> Plan:
        """With its times simulated, if asked for and if there is anything to simulate."""
        found = self.cost(arrangement)
        if simulate and arrangement.stages > 1:
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
