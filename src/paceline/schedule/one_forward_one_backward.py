"""One forward, one backward.

::

    worker 0|0F0 0F1 0F2  .   .   .   .  0B0 --- 0F3 0B1 ---  .  0B2 ---  .  0B3 ---
    worker 1| .  1F0 1F1  .   .  1B0 --- 1F2 1B1 --- 1F3 1B2 ---  .  1B3 ---  .   .
    worker 2| .   .  2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 ---  .   .   .   .
    36 of 54 cells are busy: 67 %
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from paceline.aggregation.registry import register
from paceline.schedule.alternation import alternate
from paceline.schedule.base import Action, Schedule, refuse_less_than_one


@register("1f1b")
@final
@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """Worker w goes p - 1 - w forwards ahead, then alternates (PipeDream-Flush of Narayanan et al. 2020, 2006.09503).

    As quick as ``gpipe``, bubble (p - 1)/(m + p - 1) with equal parts, but worker w holds the activations of p - w
    micro-batches, however many there are.
    """

    def refuse(self, workers: int, micro_batches: int) -> None:
        refuse_less_than_one(workers, micro_batches)

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        for kind, i in alternate(workers - 1 - worker, micro_batches):
            yield Action(worker, kind, i)
