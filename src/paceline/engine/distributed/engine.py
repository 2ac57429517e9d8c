"""The distributed engine: the processes that torchrun started, on one host or many."""

import contextlib
import gc

import torch

from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.device import refuse_absent, use
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.checkpointing import tell
from paceline.engine.distributed.distributed_run import NAME, DistributedRun
from paceline.engine.distributed.fsdp import refuse_model
from paceline.engine.distributed.served_rank import ServedRank
from paceline.engine.run_context import RunContext, own_settings
from paceline.engine.spmd.launch_env import LaunchEnv, backend_for, refuse_launch
from paceline.engine.spmd.membership import ExcludedError, Survives
from paceline.engine.spmd.rank_context import open_rank_context
from paceline.support import ENGINE_FEATURES


@register("distributed")
class DistributedEngine(Engine):
    """Every rank holds A, and all make the same updates of it.

    Args:
        backend: ``gloo``, ``nccl``, ``shm`` or ``hierarchical``; None: what suits the device.
    """

    name = NAME
    features = ENGINE_FEATURES[name]

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend

    @classmethod
    def from_address(cls, address: str | None) -> "DistributedEngine":
        if address == "":
            raise InputError("engine='distributed:' names no backend; write engine='distributed:gloo'")
        return cls(address)

    def refuse(self, job: Job) -> None:
        world = LaunchEnv.current()
        if job.strategy.shard_parameters:
            refuse_model(job.program)
        refuse_absent(job.strategy.device)
        refuse_launch(backend_for(job.strategy.device, self._backend, world), job, world)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        world = LaunchEnv.current()
        backend = backend_for(job.strategy.device, self._backend, world)
        device = RunContext(job).device(world.rank)
        use(torch.device(device))
        if job.strategy.aggregation.collective is None:
            return self._served(job, world, backend, device, watch)
        watched = job.strategy.compression == "none"  # a compression makes collectives of its own
        survives = Survives(job.suspect_after_s, job.timeout_s, tell) if job.survives_deaths else None
        terms = {"strategy": str(job.strategy), "on_death": str(job.on_death)}
        again = False
        while True:
            context = open_rank_context(
                world, backend, device, job.timeout_s, watched=watched, survives=survives, terms=terms, again=again
            )
            try:
                with own_settings(job.strategy.device), context as together, contextlib.ExitStack() as closing:
                    return DistributedRun(job, together, backend, watch, closing).outcome()
            except ExcludedError as error:
                tell(str(error))
                again = True
            finally:
                gc.collect()  # a group that is let go of in another run's backward hangs (torch 2.13, Gloo)

    @staticmethod
    def _served(job: Job, world: LaunchEnv, backend: str, device: str, watch: Watcher) -> Outcome:
        """Run a job whose replicas go their own pace: A is with servers."""
        try:
            with own_settings(job.strategy.device), contextlib.ExitStack() as closing:
                return ServedRank(job, world, backend, device, watch, closing).outcome()
        finally:
            gc.collect()
