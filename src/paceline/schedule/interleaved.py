"""One forward, one backward, with several parts a worker: here worker 0 holds parts 0 and 2.

::

    worker 0|0F0 0F1 2F0 2F1 0F2  .  2B0 --- 0F3 2B1 --- 2F2 0B0 --- 2F3 0B1 ---  .  2B2 ---  .  2B3 --- 0B2 --- 0B3 ---
    worker 1| .  1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1F2 1B0 --- 1F3 1B1 --- 3F2 3B2 --- 3F3 3B3 --- 1B2 --- 1B3 ---  .   .
    48 of 54 cells are busy: 89 %
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from paceline.core.errors import InputError, check_int
from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule, alternate


@final
@register("interleaved")
@dataclass(frozen=True)
class Interleaved(Schedule):
    """Worker w alternates between parts w, w + p, ... every p micro-batches (Narayanan et al. 2021, 2104.04473).

    Filling the pipeline takes v times less: bubble (p - 1)/(v·m + p - 1) with equal parts, for v times the traffic.
    Worker w holds up to 2(p - 1 - w) + (v - 1)p + 1 activations of a part.

    Args:
        chunks: v, parts of each worker.

    Raises:
        InputError: fewer than two parts a worker.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        check_int("interleaved:chunks", self.chunks, least=2)

    def refuse(self, workers: int, micro_batches: int) -> None:
        super().refuse(workers, micro_batches)
        if micro_batches % workers:
            more = micro_batches + workers - micro_batches % workers
            raise InputError(
                f"micro_batches={micro_batches} is no multiple of stages={workers}, but interleaved parts take turns "
                f"by {workers} micro-batches each; write micro_batches={more}, or schedule=1f1b."
            )

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        p, v = workers, self.chunks
        ahead = min(2 * (p - 1 - worker) + (v - 1) * p, micro_batches * v)
        for kind, k in alternate(ahead, micro_batches * v):
            # A round is p micro-batches through all v chunks; backward visits the chunks from the last to the first.
            rounds, place = divmod(k, p * v)
            chunk, i = divmod(place, p)
            chunk = chunk if kind == "forward" else v - 1 - chunk
            yield Action(worker + chunk * p, kind, rounds * p + i)
