"""What a rank is started with: its number among those that torchrun has started, and the backend that joins them."""

import os
import sys
from dataclasses import dataclass

import torch.distributed as dist

from paceline.core.errors import InputError, unknown
from paceline.device import CPU, collective_backend, count
from paceline.engine.base import Job

# Paceline's own backends: shared memory inside each host and sockets between hosts, or inside one host alone.
OURS = ("hierarchical", "shm")

# Backend of ranks that main has spawned on this host.
BACKEND = "shm"

# All backends: torch's for CPUs and for GPUs, and Paceline's own.
BACKENDS = ("gloo", "nccl", *OURS)


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """A process among those that torchrun started.

    Args:
        local_size: number of them on this host; all, if the environment does not tell.
        one_host: True if all are known to be on this host.
    """

    rank: int
    size: int
    local_size: int
    one_host: bool = False

    @classmethod
    def current(cls) -> "LaunchEnv":
        """Return that of the initialized process group, or of the environment; without either, the process is alone."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_size = os.environ.get("LOCAL_WORLD_SIZE")
        return cls(rank, size, int(local_size or size), local_size == str(size))


def kind_of(backend: str) -> str:
    """Return the type of the devices between which a backend moves tensors; ``cpu``: it goes through the host's memory.

    >>> kind_of("gloo"), kind_of("nccl")
    ('cpu', 'cuda')
    """
    if backend == dist.Backend.default_device_backend_map[CPU.type]:
        return CPU.type
    kinds = dist.Backend.backend_capability.get(backend, [CPU.type])
    return next((kind for kind in kinds if kind != CPU.type), CPU.type)


def backend_for(device: str, requested: str | None, world: LaunchEnv) -> str:
    """Return the backend of ranks that compute on ``device``: the one that is requested, or the best for them.

    >>> two = LaunchEnv(rank=0, size=2, local_size=2, one_host=True)
    >>> backend_for("cpu", None, two), backend_for("cuda", None, two), backend_for("cuda", "gloo", two)
    ('shm', 'nccl', 'gloo')
    """
    if requested is not None:
        return requested
    if device != CPU.type:
        return collective_backend(device)
    return "shm" if world.one_host and sys.platform == "linux" else "gloo"


def refuse_launch(backend: str, job: Job, world: LaunchEnv) -> None:
    """Raise InputError if this backend can't run the job, or if there is not one process for each of its workers."""
    strategy, workers, device = job.strategy, job.strategy.workers, job.strategy.device
    if backend not in BACKENDS and backend.upper() not in dist.Backend._plugins:
        raise unknown("backend", backend, BACKENDS)
    moves = kind_of(backend)
    if moves != CPU.type and device == CPU.type:
        raise InputError(
            f"engine='distributed:{backend}' moves memory of device={moves}, but device=cpu; write "
            "engine='distributed:gloo'"
        )
    if device != CPU.type and (backend in OURS or moves not in (device, CPU.type)):
        which = "CPUs" if backend in OURS else f"device={moves}"
        raise InputError(
            f"engine='distributed:{backend}' is for {which}, but device={device}; write "
            f"engine='distributed:{collective_backend(device)}'"
        )
    if backend == "nccl" and world.local_size > count(device):
        raise InputError(
            f"NCCL needs a GPU for each process, but this host has {count(device)} for {world.local_size}; "
            f"write torchrun --nproc-per-node {count(device)}, or engine='distributed:gloo'"
        )
    if (servers := strategy.servers or 1) > workers:
        raise InputError(
            f"servers={servers} are in as many ranks, but the strategy has {workers} workers; write servers={workers}"
        )
    if workers == world.size:
        return
    if world.size == 1 and "RANK" not in os.environ:
        raise InputError(
            f"replicas={strategy.replicas} needs {workers} processes, but this one was started alone; start it with "
            f"torchrun --nproc-per-node {workers} script.py, or write engine='local', which starts its own"
        )
    raise InputError(
        f"replicas={strategy.replicas} × stages={strategy.stages} × shards={strategy.shards} = {workers} workers, but "
        f"{world.size} were started by torchrun; write replicas={world.size} or start {workers}"
    )
