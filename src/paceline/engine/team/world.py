"""The job that this process finds itself in: which of how many it is, and by what they reach each other."""

import os
import socket
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.core.errors import InputError, unknown
from paceline.engine.base import Job
from paceline.strategy import Device

OURS = ("hierarchical", "shm")
"""How bytes may move: through memory inside each host and sockets between hosts, or inside one host alone."""

BACKENDS = ("gloo", "nccl", *OURS)
"""Also: between CPUs, between GPUs."""


@dataclass(frozen=True, slots=True)
class World:
    """One process among those that torchrun started."""

    rank: int
    size: int
    local_size: int
    """How many of them are on this host; all, where nothing is said of it."""
    one_host: bool = False
    """Whether all are known to be on this host."""

    @classmethod
    def found(cls) -> "World":
        """What the process group says, or the environment; a process that nobody launched is alone."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_size = os.environ.get("LOCAL_WORLD_SIZE")
        return cls(rank, size, int(local_size or size), local_size == str(size))

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1


def backend_for(device: Device, asked: str | None, world: World) -> str:
    """By what ranks that compute on ``device`` reach each other, where nothing else is asked for.

    >>> two = World(rank=0, size=2, local_size=2, one_host=True)
    >>> backend_for("cpu", None, two), backend_for("cuda", None, two), backend_for("cuda", "gloo", two)
    ('shm', 'nccl', 'gloo')
    """
    if asked is not None:
        return asked
    if device == "cuda":
        return "nccl"
    return "shm" if world.one_host and sys.platform == "linux" else "gloo"


def refuse_backend(backend: str, job: Job, world: World) -> None:
    """Raise InputError where this backend can't carry the job."""
    device = job.strategy.device
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "nccl" and device == "cpu":
        raise InputError("engine='distributed:nccl' moves GPU memory, but device=cpu; write engine='distributed:gloo'")
    if backend in OURS and device == "cuda":
        raise InputError(
            f"engine='distributed:{backend}' is for CPUs, but device=cuda; write engine='distributed:nccl'"
        )
    if backend == "nccl" and world.local_size > torch.cuda.device_count():
        raise InputError(
            f"NCCL needs a GPU for each process, but this host has {torch.cuda.device_count()} for {world.local_size}; "
            f"write torchrun --nproc-per-node {torch.cuda.device_count()}, or engine='distributed:gloo'"
        )


def refuse_size(job: Job, world: World) -> None:
    """Raise InputError where the job has not a process for each worker."""
    strategy, workers = job.strategy, job.strategy.workers
    if workers == world.size:
        return
    if world.alone and "RANK" not in os.environ:
        raise InputError(
            f"replicas={strategy.replicas} needs {workers} processes, but this one was started alone; start it with "
            f"torchrun --nproc-per-node {workers} script.py, or write engine='local', which starts its own"
        )
    raise InputError(
        f"replicas={strategy.replicas} × stages={strategy.stages} × shards={strategy.shards} = {workers} workers, but "
        f"{world.size} were started by torchrun; write replicas={world.size} or start {workers}"
    )


def host_name() -> str:
    """This host, as people know it."""
    return socket.gethostname()
