"""The distributed engine: the processes that torchrun started, on one host or many."""

import gc
from contextlib import ExitStack

import torch

from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.distributed.fsdp import refuse_model
from paceline.engine.distributed.rank_run import DistributedRun, own_settings
from paceline.engine.run_context import RunContext, refuse_absent_gpu
from paceline.engine.spmd.process_group import LaunchEnv, backend_for, refuse_backend, refuse_size
from paceline.engine.spmd.rank_context import open_rank_context
from paceline.support import ENGINES


@register("distributed")
class DistributedEngine(Engine):
    """Every rank holds A, and all make the same updates of it.

    Args:
        backend: ``gloo``, ``nccl``, ``shm`` or ``hierarchical``; None: what suits the device.
    """

    name = "distributed"
    features = ENGINES[name]

    def __init__(self, backend: str | None = None) -> None:
        self._asked = backend

    @classmethod
    def from_address(cls, address: str | None) -> "DistributedEngine":
        if address == "":
            raise InputError("engine='distributed:' names no backend; write engine='distributed:gloo'")
        return cls(address)

    def refuse(self, job: Job) -> None:
        world = LaunchEnv.found()
        if job.strategy.shard_parameters:
            refuse_model(job.program)
        refuse_absent_gpu(job)
        refuse_backend(backend_for(job.strategy.device, self._asked, world), job, world)
        refuse_size(job, world)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        world = LaunchEnv.found()
        backend = backend_for(job.strategy.device, self._asked, world)
        device = RunContext.of(job).device(world.rank)
        if backend == "nccl":
            torch.cuda.set_device(device)
        watched = job.strategy.compression == "none"  # a compression makes collectives of its own
        context = open_rank_context(world, backend, device, job.timeout_s, watched=watched)
        try:
            with own_settings(), context as together, ExitStack() as closing:
                return DistributedRun(job, together, backend, watch, closing).outcome()
        finally:
            gc.collect()  # a group that is let go of in the middle of another run's backward hangs (torch 2.13, Gloo)
