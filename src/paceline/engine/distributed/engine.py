"""The distributed engine: the processes that torchrun started, on one host or many."""

import gc
from contextlib import ExitStack

import torch

from paceline.aggregation import Synchronous, text_of
from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.distributed.run import DistributedRun, own_settings
from paceline.engine.distributed.validation import refuse_dividing
from paceline.engine.run_context import RunContext, refuse_absent_gpu
from paceline.engine.spmd.process_group import LaunchEnv, backend_for, refuse_backend, refuse_size
from paceline.engine.spmd.rank_context import open_rank_context
from paceline.engine.validation import refuse_norms, refuse_pieces, refuse_shards, refuse_stages


@register("distributed")
class DistributedEngine(Engine):
    """Every rank holds A, and all make the same updates of it.

    Args:
        backend: ``gloo``, ``nccl``, ``shm`` or ``hierarchical``; None: what suits the device.
    """

    name = "distributed"

    def __init__(self, backend: str | None = None) -> None:
        self._asked = backend

    @classmethod
    def from_address(cls, address: str | None) -> "DistributedEngine":
        if address == "":
            raise InputError("engine='distributed:' names no backend; write engine='distributed:gloo'")
        return cls(address)

    def refuse(self, job: Job) -> None:
        world = LaunchEnv.found()
        policy = job.strategy.aggregation
        if not isinstance(policy, Synchronous) or policy.backups:
            raise InputError(
                f"aggregation={text_of(policy)}: under engine=distributed all ranks make one update of all gradients; "
                "write aggregation=synchronous, or engine='ray' (many hosts) or engine='local' (one)"
            )
        if job.strategy.tensor_parallel:
            refuse_shards(job)
        if job.strategy.pipelined:
            refuse_stages(job)
        _refuse_mixtures(job)
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


def _refuse_mixtures(job: Job) -> None:
    strategy = job.strategy
    refuse_norms(job)
    if strategy.shard_parameters:
        refuse_dividing(job)
    refuse_pieces(job)
    if strategy.compression != "none" and strategy.device != "cpu":
        raise InputError(
            f"compression={strategy.compression} is carried between CPUs, not on device={strategy.device}; leave it "
            "out, or write device=cpu"
        )
