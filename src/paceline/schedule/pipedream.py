"""One forward, one backward, one update: a pipeline that never runs empty.

::

    worker 0|0F0 0F1 0F2  .   .   .   .  0B0 --U 0F3 0B1 --U  .  0B2 --U  .  0B3 --U
    worker 1| .  1F0 1F1  .   .  1B0 --U 1F2 1B1 --U 1F3 1B2 --U  .  1B3 --U  .   .
    worker 2| .   .  2F0 2B0 --U 2F1 2B1 --U 2F2 2B2 --U 2F3 2B3 --U  .   .   .   .
    36 of 54 cells are busy: 67 %

Drawn to the end of a stream of four micro-batches; U is the update that follows a backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule, alternate


@final
@register("pipedream")
@dataclass(frozen=True)
class PipeDream(Schedule):
    """Each micro-batch is an update of its own, and no worker waits for it (Narayanan et al. 2019, SOSP, 1806.03377).

    Part j computes micro-batch i with weights that are p - 1 - j updates older than those that its update is applied
    to, and keeps them until its backward (weight stashing): p - j versions of its weights at most.

        w(t+1) = w(t) - lr · ∇f(w_0(t - p + 1), w_1(t - p + 2), ..., w_{p-1}(t))

    The workers are idle only before the first and after the last micro-batch of a whole run.
    """

    flushes: ClassVar[bool] = False
    updates_each: ClassVar[bool] = True

    def version(self, micro_batch: int, worker: int, workers: int) -> int:
        return max(0, micro_batch - (workers - 1 - worker))

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        for kind, i in alternate(workers - 1 - worker, micro_batches):
            yield Action(worker, kind, i)
            if kind == "backward":
                yield Action(worker, "update", i)
