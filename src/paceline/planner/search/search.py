"""Search of the best ways to train a workload on a cluster: enumerated, bounded, ranked by closed forms, simulated.

::

    frames     candidates.py         every size of a step                    10^4 to 10^6, columns of numbers
    bounds     lower_bounds.py       least time and memory of each frame, in whose order they are considered, then of
                                     each of its options
    closed     cost.py               of those that may be among the best; those that don't fit are left out
    simulated  event_simulation.py   the best of these, and some of each kind (ranking.py)

The search is exact by closed forms: a frame is left out when its least time is more than that of the last plan kept.
Among equals the one that needs less memory and then the plainest is first.
"""

from dataclasses import dataclass, replace

from paceline.core.errors import InputError
from paceline.planner.base import OverlapModel, Plan, Workload, divisors
from paceline.planner.cluster import Cluster
from paceline.planner.policies import compete
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.ranking import Ranking, key, undominated

OF_EACH_KIND = 3
"""Plans of each kind to simulate where alternatives are shown: closed forms don't order them as a simulation does."""

DELAY_FINALISTS = 8
"""Plans without delays of each number of replicas that compete under all policies."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans found by a search, and how many were considered."""

    plans: tuple[Plan, ...]
    """Best first; empty where nothing fits."""
    frames: int
    """Number of frames."""
    costed: int
    """Arrangements whose cost was computed."""
    left_out: int
    """Arrangements that exceed a worker's memory."""


def search(
    workload: Workload,
    cluster: Cluster,
    objectives: Objectives | None = None,
    overlap_model: OverlapModel | None = None,
    cost_cache: CostCache | None = None,
    *,
    simulate: bool = True,
    of_each_kind: int = 0,
) -> SearchResult:
    """Return the best plans, best first, each with the Strategy that train takes.

    Args:
        workload: that is trained.
        cluster: that it is trained on.
        objectives: objective and limits; None: the most samples a second.
        overlap_model: of the runtime; None: nothing overlaps.
        cost_cache: of an earlier search of the same workload, cluster and overlap model.
        simulate: whether to simulate the best; otherwise closed forms are all.
        of_each_kind: number of plans to simulate of each kind in addition, of frames that may be among the best.

    Raises:
        InputError: no number of workers can divide the batch.
    """
    objectives, cache = objectives or Objectives(), cost_cache or CostCache(workload, cluster, overlap_model)
    if objectives.delay is not None:
        return _search_with_delay(cache, objectives)
    ranking = Ranking(cache, objectives, of_each_kind)
    ranking.take(batches(workload, cluster, objectives))
    if not ranking.frames and objectives.replicas is None:
        raise InputError(
            f"a batch of {workload.global_batch} samples can't be divided among {cluster.workers} workers; write "
            f"global_batch={cluster.workers}, or fewer workers."
        )
    best, max_bytes = (cache.plan(each, simulate=simulate) for each in ranking.best()), objectives.max_bytes(cluster)
    fitting = [plan for plan in best if plan.cost.peak.total <= max_bytes]  # a calibration may make them larger
    plans = undominated(sorted(fitting, key=lambda plan: key(plan, workload, objectives)))
    return SearchResult(tuple(plans), ranking.frames, ranking.costed, ranking.left_out)


def _search_with_delay(cache: CostCache, objectives: Objectives) -> SearchResult:
    """Delays are worse the more replicas wait for each other: the best plans of each number of replicas compete."""
    workload, cluster, most = cache.workload, cache.cluster, objectives.max_workers(cache.cluster)
    if objectives.replicas:
        counts = [objectives.replicas]
    elif objectives.fixed == "replica":
        counts = list(range(1, most + 1))
    else:
        counts = sorted({r for batch in objectives.batches(workload) for r in divisors(batch) if r <= most})
    own = replace(objectives, delay=None, simulated=DELAY_FINALISTS)
    results = [search(workload, cluster, replace(own, replicas=each), cost_cache=cache) for each in counts]
    plans = compete((plan for result in results for plan in result.plans), workload, cluster, objectives)
    totals = (sum(getattr(result, name) for result in results) for name in ("frames", "costed", "left_out"))
    return SearchResult(tuple(plans[: objectives.simulated]), *totals)


def batches(workload: Workload, cluster: Cluster, objectives: Objectives) -> list[int]:
    """Return the batches to consider: the workload's own, others where they may vary."""
    if objectives.fixed == "global":
        return list(dict.fromkeys(objectives.batches(workload)))
    replicas = range(1, objectives.max_workers(cluster) + 1)
    return [batch for count in replicas for batch in objectives.batches(workload, count)]
