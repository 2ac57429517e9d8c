"""One micro-batch in the whole pipeline at a time.

::

    worker 0|0F0  .   .   .   .   .   .  0B0 --- 0F1  .   .   .   .   .   .  0B1 ---
    worker 1| .  1F0  .   .   .  1B0 ---  .   .   .  1F1  .   .   .  1B1 ---  .   .
    worker 2| .   .  2F0 2B0 ---  .   .   .   .   .   .  2F1 2B1 ---  .   .   .   .
    18 of 54 cells are busy: 33 %

The model is divided, its work is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule


@final
@register("sequential")
@dataclass(frozen=True)
class Sequential(Schedule):
    """Forward through all parts, backward through all of them, then the next micro-batch.

    p workers are busy 1/p of the time, and hold the activations of one micro-batch.
    """

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        del workers
        for i in range(micro_batches):
            yield Action(worker, "forward", i)
            yield Action(worker, "backward", i)
