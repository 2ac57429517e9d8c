"""The local engine: real processes on this host."""

import torch

from paceline.aggregation.base import InPlace
from paceline.comm.nursery import Nursery
from paceline.core.errors import InputError
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.local.run import LocalRun

PRELOAD = ("torch", "paceline.engine.local.worker", "paceline.engine.local.scorer")


class LocalEngine(Engine):
    """Keeps its fork server from one run to the next."""

    name = "local"

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    def refuse(self, job: Job) -> None:
        strategy = job.strategy
        in_place = isinstance(strategy.aggregation.delta, InPlace)
        if in_place and job.on_nonfinite == "skip":
            raise InputError(
                f"on_nonfinite=skip discards a Δ before it is applied, but aggregation={strategy.aggregation} has "
                "none: replicas write A in place; write on_nonfinite='stop'"
            )
        if in_place and strategy.device != "cpu":
            raise InputError(
                f"aggregation={strategy.aggregation} shares A in the host's memory, not on device={strategy.device}; "
                "write device=cpu"
            )

    def run(self, job: Job, watch: Watcher) -> Outcome:
        if self._nursery is None:
            self._nursery = Nursery.start(PRELOAD)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the owner's part of the work is small vectors
        run = LocalRun(job, self._nursery, watch)
        try:
            return run.outcome()
        finally:
            run.close()
            torch.set_num_threads(threads)

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
