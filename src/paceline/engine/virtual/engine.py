"""The virtual engine: one process, real gradients, simulated time."""

import torch

from paceline.aggregation import text_of
from paceline.clock.times import Times
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.run_context import refuse_absent_gpu
from paceline.engine.virtual.run import VirtualRun
from paceline.strategy import Strategy


@register("virtual")
class VirtualEngine(Engine):
    """Deterministic: the same job gives the same bytes on one machine and build, whatever its load."""

    name = "virtual"

    def refuse(self, job: Job) -> None:
        refuse_absent_gpu(job)
        strategy = job.strategy
        if isinstance(strategy.aggregation.delta, InPlace):
            raise InputError(
                f"aggregation={text_of(strategy.aggregation)} writes memory that replicas share, but engine=virtual "
                "has one replica at work at a time; write engine=local"
            )
        if strategy.device != "cpu":
            raise InputError(f"engine=virtual computes on the CPU, not on device={strategy.device}; write device=cpu")
        _refuse_streams(strategy)
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


def _refuse_streams(strategy: Strategy) -> None:
    """What does not compute as one process does."""
    if strategy.pipelined and not strategy.order.flushes:
        raise InputError(
            f"schedule={strategy.schedule} moves weights within a stream of micro-batches, but engine=virtual computes "
            "each Δ as one process does, by one version; write engine=local, or schedule=1f1b"
        )
    if strategy.pipelined:
        strategy.order.refuse(strategy.stage_count, strategy.micro_batch_count)


def _timeless(times: Times) -> bool:
    parts = (times.compute, times.transfer, times.apply, times.gradient)
    return all(not isinstance(part, str) and part.mean_s == 0 for part in parts)
