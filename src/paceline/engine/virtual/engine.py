"""The virtual engine: one process, real gradients, simulated time."""

import torch

from paceline.clock.times import Times
from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.virtual.virtual_run import VirtualRun
from paceline.support import ENGINES


@register("virtual")
class VirtualEngine(Engine):
    """Deterministic: the same job gives the same bytes on one machine and build, whatever its load."""

    name = "virtual"
    features = ENGINES[name]

    def refuse(self, job: Job) -> None:
        if job.budget.unit == "seconds" and _timeless(job.times or Times()):
            raise InputError(
                f"times={str(job.times)!r}: nothing takes time, so seconds never pass; write compute=0.01, or steps="
            )

    def run(self, job: Job, watch: Watcher) -> Outcome:
        threads = torch.get_num_threads()
        torch.set_num_threads(job.strategy.threads or 1)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(job.program.seed)  # what samples draw as they are read
                return VirtualRun(job, watch).outcome()
        finally:
            torch.set_num_threads(threads)


def _timeless(times: Times) -> bool:
    parts = (times.compute, times.transfer, times.apply, times.gradient)
    return all(not isinstance(part, str) and part.mean_s == 0 for part in parts)
