"""Costs of a workload on a cluster, cached for any number of searches: divisions, bounds, closed forms, simulations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paceline.planner.base import Arrangement, Cost, OverlapModel, Plan, Workload, merged
from paceline.planner.cluster import CachedMessages, Cluster
from paceline.planner.cost import EXACT, cost
from paceline.planner.search import supported
from paceline.planner.search.candidates import frames, is_supported, supports_zero
from paceline.planner.search.event_simulation import PartTimes, part_times, steps_s
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
        # Asynchronous pipelines are another algorithm, with stale weights: they compete where the objective counts it.
        o, pipedream = objectives, Arrangement(stages=2, schedule="pipedream")
        async_pipelines = o.counts and is_supported(self.cluster, o, pipedream)
        key = batch, o.fixed, o.replicas, o.unbuilt, o.engine, o.most_chunks, async_pipelines
        # A curve goes from most workers to one: frames of fewer workers are among those of more.
        limit = objectives.max_workers(self.cluster)
        if key not in self._frame_bounds or self._frame_bounds[key][0] < limit:
            rows, zero = frames(self.workload, self.cluster, o, batch), supports_zero(self.cluster, o)
            self._frame_bounds[key] = limit, FrameBounds(self.bounds, rows, o.most_chunks, zero, async_pipelines)
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
            times = part_times(division, arrangement, self.cluster, self.overlap_model)
            quiet_s, step_s = steps_s(arrangement, (PartTimes(times.forward, times.backward), times))
            bubble = max(0.0, quiet_s - result.terms["compute"] - result.terms["shards"])
            result = replace(result, terms={**result.terms, "stages": step_s - quiet_s, "bubble": bubble})
        workload, device = self.workload, self.cluster.device
        # Relative errors of independent sources, of workload and cluster, add in squares.
        spread, step_s = float(np.hypot(workload.spread, self.cluster.spread)), result.step_s
        rate, flops = arrangement.samples / step_s, workload.flops()
        utilisation = None if flops is None else flops * rate / (arrangement.workers * device.flops_per_s)
        strategy = supported.strategy(arrangement, device.kind) if supported.supports(arrangement) else None
        sources = merged(workload.provenance, self.cluster.provenance, device.provenance)
        low_s, high_s = step_s / (1 + spread), step_s * (1 + spread)
        plan = Plan(arrangement, result, low_s, high_s, rate, utilisation, strategy, simulate, sources)
        return plan if self._calibrate is None else self._calibrate(plan)
