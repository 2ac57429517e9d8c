"""The launch environment of this process, rendezvous, and the process group by which the ranks of a run communicate.

How processes that somebody on this host has made become the ranks of a process group.

The group by which the ranks of one run talk, opened and closed in one place.
"""

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.comm import register
from paceline.core.errors import InputError, WaitTimeoutError, unknown
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.strategy import Device

OURS = ("hierarchical", "shm")
"""How bytes may move: through memory inside each host and sockets between hosts, or inside one host alone."""

BACKENDS = ("gloo", "nccl", *OURS)
"""Also: between CPUs, between GPUs."""


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """One process among those that torchrun started."""

    rank: int
    size: int
    local_size: int
    """How many of them are on this host; all, where nothing is said of it."""
    one_host: bool = False
    """Whether all are known to be on this host."""

    @classmethod
    def found(cls) -> "LaunchEnv":
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


def backend_for(device: Device, asked: str | None, world: LaunchEnv) -> str:
    """By what ranks that compute on ``device`` reach each other, where nothing else is asked for.

    >>> two = LaunchEnv(rank=0, size=2, local_size=2, one_host=True)
    >>> backend_for("cpu", None, two), backend_for("cuda", None, two), backend_for("cuda", "gloo", two)
    ('shm', 'nccl', 'gloo')
    """
    if asked is not None:
        return asked
    if device == "cuda":
        return "nccl"
    return "shm" if world.one_host and sys.platform == "linux" else "gloo"


def refuse_backend(backend: str, job: Job, world: LaunchEnv) -> None:
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


def refuse_size(job: Job, world: LaunchEnv) -> None:
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


BACKEND = "shm"
"""What carries their messages."""


def file_rendezvous(rank: int, size: int, path: str, timeout_s: Seconds) -> None:
    """Make this process one of so many ranks.

    Args:
        rank: which.
        size: how many there are.
        path: of a file by which they find each other.
        timeout_s: the longest wait for the others.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's word for a store that no rank keeps
    register()
    store = FileStore(path, size)  # torch's TCPStore would listen on every interface
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


_names = 0
"""How many have been given; every rank gives the same ones."""

_met: Store | None = None
"""The job's store, once the ranks have met in it."""


class ProcessGroup:
    """One run's.

    Args:
        handle: torch's process group of all ranks.
        store: where ranks leave notes for each other, under names of this run alone.
        backend: what moves the bytes.
    """

    def __init__(self, handle: Any, store: Store, backend: str, bound: timedelta) -> None:
        self.handle, self.store, self.backend, self._bound = handle, store, backend, bound
        self._subgroups: list[Any] = []
        self._for_ever = False

    def split(self, groups: Sequence[Sequence[int]]) -> "ProcessGroup | None":
        """A group of some ranks, in which this one is; all ranks of this group make all groups together.

        Args:
            groups: the ranks of each, every rank in one of them.

        Returns:
            None: this rank's has nobody else in it.
        """
        rank, found = dist.get_rank(self.handle), None
        for ranks in groups:
            if len(ranks) == dist.get_world_size(self.handle):
                return self
            if len(ranks) < 2:
                continue
            handle = dist.new_group(list(ranks), backend=_in_torch(self.backend), timeout=self._bound)
            if rank in ranks:
                self._subgroups.append(handle)
                found = ProcessGroup(handle, self.store, self.backend, self._bound)
        if found is not None and self._for_ever:
            found.wait_for_ever()
        return found

    def handles(self) -> list[Any]:
        """Of all groups that were made of it, itself last."""
        return [*self._subgroups, self.handle]

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, in their order."""
        found: list[Any] = [None] * dist.get_world_size(self.handle)
        dist.all_gather_object(found, value, group=self.handle)
        return found

    def wait_for_ever(self) -> None:
        """Let somebody else bound the waits from now on: a rank may be slow because it was asked to be."""
        self._for_ever = True
        if self.backend != "shm":  # there each wait says how long it may last
            dist.distributed_c10d._set_pg_timeout(timedelta(days=30), self.handle)
        if self.backend == "hierarchical":
            self.handle.wait_for_ever()


@contextlib.contextmanager
def opened(world: LaunchEnv, backend: str, timeout_s: Seconds) -> Iterator[ProcessGroup | None]:
    """The group of a run; None for who is alone.

    A process group that the user has initialised stays as it is, and the run has a group of its own next to it. Where
    there is none, one is made and destroyed at the end. Pending collectives are aborted when the run fails.

    Raises:
        WaitTimeoutError: not all ranks have come within ``timeout_s``.
    """
    if world.alone:
        yield None
        return
    if backend in OURS:
        importlib.import_module("paceline.comm").register()
    bound = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        handle: Any = dist.new_group(backend=_in_torch(backend), timeout=bound)
    else:
        _initialise(world, backend, bound)
        handle = dist.group.WORLD
    group = ProcessGroup(handle, _named(dist.distributed_c10d._get_default_store()), backend, bound)
    try:
        yield group
    except BaseException:
        for each in group.handles():
            _break_off(each)
        raise
    finally:
        for each in group.handles():
            dist.destroy_process_group(each)


def _initialise(world: LaunchEnv, backend: str, bound: timedelta) -> None:
    try:
        store = _named(_job_store(world, bound))
        dist.init_process_group(_in_torch(backend), store=store, rank=world.rank, world_size=world.size, timeout=bound)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise WaitTimeoutError(
            f"rank {world.rank} waited {bound.total_seconds():g} s for all {world.size} ranks to come, and some did "
            f"not ({error}); start them all, or write a larger timeout_s="
        ) from error


def _job_store(world: LaunchEnv, bound: timedelta) -> Store:
    """The job's store, met once: torch 2.13 would find the addresses of the group before in it if it met there anew."""
    global _met
    if _met is None:
        _met = next(rendezvous("env://", world.rank, world.size, timeout=bound))[0]
    return _met


def _named(store: Store) -> Store:
    """Names that no other run uses."""
    global _names
    _names += 1
    return PrefixStore(f"paceline/{_names}", store)


def _in_torch(backend: str) -> str:
    """With NCCL, what lies in the host's memory (words, figures, questions) goes by Gloo."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _break_off(handle: Any) -> None:
    """End what other ranks will never answer; else destroying the group waits for it."""
    with contextlib.suppress(Exception):  # a backend may have nothing to break off
        handle.abort()
