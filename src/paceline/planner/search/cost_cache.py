"""Costs of a workload on a cluster, cached for any number of searches: divisions, bounds, closed forms, simulations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paceline.planner.base import Arrangement, Cost, OverlapModel, Plan, Workload, merged
from paceline.planner.cluster import CachedMessages, Cluster
from paceline.planner.cost import EXACT, cost
from paceline.planner.search import event_simulation, supported
from paceline.planner.search.candidates import frames, supports_async_pipelines, supports_zero
from paceline.planner.search.lower_bounds import FrameBounds, OptionBounds
from paceline.planner.search.objective import Objectives
from paceline.planner.stage_division import Divisions


class CostCache:
    """Costs of a workload on a cluster.

    Args:
        workload: that is trained.
        cluster: that it is trained on.
        overlap_model: of the runtime; None: nothing overlaps.
        calibrate: correction of each plan; None: plans are as computed.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        overlap_model: OverlapModel | None = None,
        calibrate: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self.workload, self.overlap_model = workload, overlap_model or OverlapModel()
        self._calibrate = calibrate
        self.cluster = replace(cluster, messages=CachedMessages(cluster.messages))
        self.divisions = Divisions(workload, self.cluster)
        self.bounds = OptionBounds(workload, self.cluster, self.overlap_model)
        self._frame_bounds: dict[tuple[object, ...], tuple[int, FrameBounds]] = {}

    def frame_bounds(self, batch: int, objectives: Objectives) -> FrameBounds:
        """Return bounds of all frames of a batch for as many workers as there may be, or for more of them."""
        o, async_pipelines = objectives, supports_async_pipelines(self.cluster, objectives)
        key = batch, o.fixed, o.replicas, o.unbuilt, o.engine, o.most_chunks, async_pipelines
        # A curve goes from most workers to one: frames of fewer workers are among those of more.
        limit = objectives.max_workers(self.cluster)
        if key not in self._frame_bounds or self._frame_bounds[key][0] < limit:
            bounds = FrameBounds(
                self.bounds,
                frames(self.workload, self.cluster, objectives, batch),
                objectives.most_chunks,
                zero=supports_zero(self.cluster, objectives),
                async_pipelines=async_pipelines,
            )
            self._frame_bounds[key] = limit, bounds
        return self._frame_bounds[key][1]

    def cost(self, arrangement: Arrangement) -> Cost:
        """Return the cost by closed forms."""
        return cost(self.workload, self.cluster, arrangement, self.overlap_model, self.divisions.of(arrangement))

    def plan(self, arrangement: Arrangement, *, simulate: bool = True) -> Plan:
        """Return the plan of an arrangement, simulated if requested and if closed forms are not exact.

        Of a simulated step ``bubble`` is the remaining time without messages, ``stages`` the delay that messages add.
        """
        result = self.cost(arrangement)
        if simulate and arrangement.stages > 1 and arrangement.schedule not in EXACT:
            division = self.divisions.of(arrangement)
            times = event_simulation.part_times(division, arrangement, self.cluster, self.overlap_model)
            quiet_s, step_s = event_simulation.steps_s(arrangement, (times.without_messages(), times))
            bubble = max(0.0, quiet_s - result.terms["compute"] - result.terms["shards"])
            result = replace(result, terms={**result.terms, "stages": step_s - quiet_s, "bubble": bubble})
        plan = plan_of(arrangement, result, self.workload, self.cluster, simulated=simulate)
        return plan if self._calibrate is None else self._calibrate(plan)


def plan_of(
    arrangement: Arrangement, cost: Cost, workload: Workload, cluster: Cluster, *, simulated: bool = False
) -> Plan:
    """Return the plan of an arrangement with a cost; errors of workload and cluster count as independent."""
    # Relative errors of independent sources add in squares.
    spread, step_s = float(np.hypot(workload.spread, cluster.spread)), cost.step_s
    samples_per_s = arrangement.samples / step_s
    flops, peak_flops_per_s = workload.flops(), arrangement.workers * cluster.device.flops_per_s
    return Plan(
        arrangement,
        cost,
        step_s / (1 + spread),
        step_s * (1 + spread),
        samples_per_s,
        None if flops is None else flops * samples_per_s / peak_flops_per_s,
        supported.strategy(arrangement, cluster.device.kind) if supported.supports(arrangement) else None,
        simulated,
        merged(workload.provenance, cluster.provenance, cluster.device.provenance),
    )
