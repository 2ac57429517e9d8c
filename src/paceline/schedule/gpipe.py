"""All forward, then all backward.

::

    worker 0|0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B3 --- 0B2 --- 0B1 --- 0B0 ---
    worker 1| .  1F0 1F1 1F2 1F3  .   .   .  1B3 --- 1B2 --- 1B1 --- 1B0 ---  .   .
    worker 2| .   .  2F0 2F1 2F2 2F3 2B3 --- 2B2 --- 2B1 --- 2B0 ---  .   .   .   .
    36 of 54 cells are busy: 67 %
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule


@final
@register("gpipe")
@dataclass(frozen=True)
class GPipe(Schedule):
    """All micro-batches forward, then all backward, the last one first (Huang et al. 2019, arXiv 1811.06965).

    Bubble (p - 1)/(m + p - 1) with equal parts. The activations of all m micro-batches are held at once.
    """

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        del workers
        for i in range(micro_batches):
            yield Action(worker, "forward", i)
        for i in reversed(range(micro_batches)):
            yield Action(worker, "backward", i)
