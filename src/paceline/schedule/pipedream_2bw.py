"""A pipeline that never runs empty, with two versions of the weights.

::

    worker 0|0F0 0F1  .   .  0B0 --- 0F2 0B1 --- 0F3 0B2 --U 0F4 0B3 --- 0F5 0B4 ---  .  0B5 --U
    worker 1| .  1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --U 1F3 1B3 --- 1F4 1B4 --- 1F5 1B5 --U  .   .
    36 of 42 cells are busy: 86 %

Drawn for two mini-batches of three micro-batches; U is the update that follows a backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule, alternate


@final
@register("pipedream-2bw", every=None)
@dataclass(frozen=True)
class PipeDream2BW(Schedule):
    """An update every m micro-batches, and no worker waits for it (Narayanan et al. 2020, arXiv 2006.09503).

    All m micro-batches of mini-batch t use the weights after t - 1 updates, on every worker, so that two versions do:

        w(t+1) = w(t) - lr · ∇f(w(t - 1))

    Mini-batches 0 and 1 both use w(0). The version that mini-batch t needs is complete before its first forward because
    m ≥ p. A mini-batch that is cut off by the end of the stream has no update.

    Args:
        every: m; None: all that :meth:`actions` covers is one mini-batch. No option of the text: a Strategy has m in
            ``micro_batches``, and :meth:`resolved` fills it in.
    """

    every: int | None = None

    flushes: ClassVar[bool] = False

    def resolved(self, micro_batches: int) -> "PipeDream2BW":
        return replace(self, every=micro_batches)

    def version(self, micro_batch: int, worker: int, workers: int) -> int:
        del worker, workers
        return max(0, micro_batch // self.every - 1) if self.every else 0

    def refuse(self, workers: int, micro_batches: int) -> None:
        super().refuse(workers, micro_batches)
        every = self.every or micro_batches
        if every < workers:
            raise InputError(
                f"micro_batches={every} is less than stages={workers}, but two versions of the weights take an update "
                f"every {workers} micro-batches or more; write micro_batches={workers}, or schedule=pipedream."
            )

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        every = self.every or micro_batches
        for kind, i in alternate(workers - 1 - worker, micro_batches):
            yield Action(worker, kind, i)
            if kind == "backward" and (i + 1) % every == 0:
                yield Action(worker, "update", i)
