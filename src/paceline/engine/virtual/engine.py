"""The virtual engine: one process, real gradients, simulated time."""

import torch

from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.virtual.run import VirtualRun


class VirtualEngine(Engine):
    """Deterministic: the same job gives the same bytes on one machine and build, whatever its load."""

    name = "virtual"

    def refuse(self, job: Job) -> None:
        strategy = job.strategy
        if isinstance(strategy.aggregation.delta, InPlace):
            raise InputError(
                f"aggregation={strategy.aggregation} writes memory that replicas share, but engine=virtual has one "
                "replica at work at a time; write engine=local"
            )
        if strategy.device != "cpu":
            raise InputError(f"engine=virtual computes on the CPU, not on device={strategy.device}; write device=cpu")

    def run(self, job: Job, watch: Watcher) -> Outcome:
        threads = torch.get_num_threads()
        torch.set_num_threads(job.strategy.threads or 1)
        try:
            with torch.random.fork_rng(devices=[]):
                return VirtualRun(job, watch).outcome()
        finally:
            torch.set_num_threads(threads)
