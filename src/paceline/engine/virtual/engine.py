"""The virtual engine: one process, real gradients, simulated time (:mod:`~paceline.engine.virtual.virtual_run`)."""

import torch

from paceline.clock.hosts import refuse_servers
from paceline.clock.times import Times
from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.device import refuse_absent
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.run_context import own_settings
from paceline.engine.virtual.user_loops import refuse_loops
from paceline.engine.virtual.virtual_run import VirtualRun
from paceline.support import ENGINE_FEATURES


@register("virtual")
class VirtualEngine(Engine):
    """Deterministic: the same job gives the same bytes on one machine and build, whatever its load."""

    name = "virtual"
    features = ENGINE_FEATURES[name]

    def refuse(self, job: Job) -> None:
        refuse_absent(job.strategy.device)
        times = job.times or Times()
        parts = (times.compute, times.transfer, times.apply, times.gradient)
        timeless = all(not isinstance(part, str) and part.mean_s == 0 for part in parts) and times.network is None
        refuse_servers(times.network, job.strategy.servers)
        refuse_loops(job)
        if job.budget.unit == "seconds" and timeless:
            raise InputError(
                f"times={str(job.times)!r}: nothing takes time, so seconds never pass; write compute=0.01, or steps="
            )

    def run(self, job: Job, watch: Watcher) -> Outcome:
        with own_settings(job.strategy.device):
            torch.set_num_threads(job.strategy.threads or 1)
            torch.default_generator.manual_seed(job.program.seed)  # what samples draw as they are read
            return VirtualRun(job, watch).outcome()
