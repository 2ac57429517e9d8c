"""One forward, one backward.

::

    worker 0|0F0 0F1 0F2  .   .   .   .  0B0 --- 0F3 0B1 ---  .  0B2 ---  .  0B3 ---
    worker 1| .  1F0 1F1  .   .  1B0 --- 1F2 1B1 --- 1F3 1B2 ---  .  1B3 ---  .   .
    worker 2| .   .  2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 ---  .   .   .   .
    36 of 54 cells are busy: 67 %
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from paceline.core.mesh import StageReplica, StageReplicas
from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule, alternate


@register("1f1b")
@final
@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """Worker w goes p - 1 - w forwards ahead, then alternates (PipeDream-Flush of Narayanan et al. 2020, 2006.09503).

    As fast as ``gpipe``, bubble (p - 1)/(m + p - 1) with equal parts, but worker w holds the activations of p - w
    micro-batches, however many there are.
    """

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        for kind, i in alternate(workers - 1 - worker, micro_batches):
            yield Action(worker, kind, i)

    def stage_replica_actions(
        self, replica: StageReplica, stage_replicas: StageReplicas, micro_batches: int
    ) -> Iterator[Action]:
        """Yield the actions of one stage replica (PipeDream's 1F1B-RR, Narayanan et al. 2019, 1806.03377).

        It holds h_s micro-batches: h = 1 in the last stage, and h_s = 1 + ⌈h_{s+1} · n_{s+1} / n_s⌉, one plus its
        share of those that later stages hold; with n = 1 that is p - s. PipeDream's NOAM, ⌈Σ n_t / n_0⌉, is the same
        for two stages, but too few if later stages hold more than one for each replica: with n = (1, 2, 1) a step
        then takes half as long again.

        >>> replicas = StageReplicas((2, 1))
        >>> for each in replicas:
        ...     print(*OneForwardOneBackward().stage_replica_actions(each, replicas, 4))
        0F0 0F2 0B0 0B2
        0F1 0F3 0B1 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
        """
        stage, copy = replica
        own = range(copy, micro_batches, stage_replicas.copies[stage])
        held = 1  # by the last stage; each stage before it adds its share, rounded up
        for count, following in reversed(list(pairwise(stage_replicas.copies[stage:]))):
            held = 1 - (-held * following // count)
        for kind, k in alternate(held - 1, len(own)):
            yield Action(stage, kind, own[k])
