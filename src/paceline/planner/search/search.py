"""The best ways to train a workload on a cluster: enumerated, bounded, ranked by closed forms, simulated.

::

    frames     candidates.py    every size of a step                        10^4 to 10^6, a row of numbers each
    bounds     rows.py          least time and memory of each, in order of which they are looked at
               bounds.py        of each of their options
    closed     cost.py          of those that may be among the best; what does not fit is left out
    simulated  simulated.py     of the best of these, and of some of each kind (kinds.py)

What is left out can't be among the best by closed forms: a frame is left out when its least time is more than the last
of those kept takes. Among equals the one that holds less and then the plainest is first.
"""

from dataclasses import dataclass, replace

from paceline.core.errors import InputError
from paceline.planner.base import OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.policies import ENTERED, compete
from paceline.planner.search.candidates import divisors
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.ranking import Ranking, key, undominated

OF_EACH_KIND = 3
"""So many are simulated of each kind where alternatives are to be shown: closed forms don't order them as that does."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found."""

    plans: tuple[Plan, ...]
    """Best first; empty where nothing fits."""
    frames: int
    """That there are."""
    costed: int
    """Arrangements whose cost was computed."""
    left_out: int
    """Of these, because a worker would hold more than it can."""


def search(
    workload: Workload,
    cluster: Cluster,
    asked: Objectives | None = None,
    habits: OverlapModel | None = None,
    known: CostCache | None = None,
    *,
    simulate: bool = True,
    of_each_kind: int = 0,
) -> Found:
    """The best, best first, each with the Strategy that train takes.

    Args:
        workload: what is trained.
        cluster: on what.
        asked: the objective and what is to be kept to; None: the most samples a second.
        habits: of who carries it out; None: nothing overlaps.
        known: what another search of the same workload, cluster and habits has found out.
        simulate: whether to simulate the best; otherwise closed forms are all.
        of_each_kind: how many of each kind are simulated beside the best, of frames that may be among these.

    Raises:
        InputError: no number of workers can divide the batch.
    """
    asked, known = asked or Objectives(), known or CostCache.of(workload, cluster, habits)
    if asked.delay is not None:
        return _delayed(known, asked)
    ranking = Ranking(known, asked, of_each_kind)
    ranking.take(asked_batches(workload, cluster, asked))
    if not ranking.frames and asked.replicas is None:
        raise InputError(
            f"a batch of {workload.global_batch} samples can't be divided among {cluster.workers} workers; write "
            f"global_batch={cluster.workers}, or fewer workers."
        )
    best = [known.plan(arrangement, simulate=simulate) for arrangement in ranking.best()]
    plans = undominated(sorted(best, key=lambda plan: key(plan, workload, asked)))
    return Found(tuple(plans), ranking.frames, ranking.costed, ranking.left_out)


def _delayed(known: CostCache, asked: Objectives) -> Found:
    """Delays are worse the more replicas wait for each other: the best of each number of them compete."""
    workload, cluster = known.workload, known.cluster
    own = replace(asked, delay=None, simulated=ENTERED)
    most = min(cluster.workers, asked.workers or cluster.workers)
    many = [asked.replicas] if asked.replicas else _numbers(workload, asked, most)
    each = [search(workload, cluster, replace(own, replicas=count), known=known) for count in many]
    plans = compete((plan for found in each for plan in found.plans), workload, cluster, asked)
    sums = (sum(getattr(found, name) for found in each) for name in ("frames", "costed", "left_out"))
    return Found(tuple(plans[: asked.simulated]), *sums)


def _numbers(workload: Workload, asked: Objectives, most: int) -> list[int]:
    """Of replicas that some batch can be divided among."""
    if asked.fixed == "replica":
        return list(range(1, most + 1))
    return sorted({r for batch in asked.batches(workload) for r in divisors(batch) if r <= most})


def asked_batches(workload: Workload, cluster: Cluster, asked: Objectives) -> list[int]:
    """Of a step: the workload's own, others where they may vary."""
    if asked.fixed == "global":
        return list(dict.fromkeys(asked.batches(workload)))
    most = min(cluster.workers, asked.workers or cluster.workers)
    return [batch for replicas in range(1, most + 1) for batch in asked.batches(workload, replicas)]
