"""The rendezvous and the process groups of the ranks of a run; groups open and close here alone."""

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from paceline.comm import register
from paceline.comm.shm.rendezvous import of_this_start
from paceline.core.errors import WaitTimeoutError
from paceline.core.types import Seconds
from paceline.device import CPU
from paceline.engine.spmd.launch_env import BACKEND, OURS, LaunchEnv, kind_of
from paceline.engine.spmd.rendezvous import AGENT_STORE, INTERFACE, all_here, attend, job_store


@dataclass(frozen=True)
class Rendezvous:
    """How ranks meet that are told of each other by who has started them.

    Args:
        rank: this one.
        size: number of ranks.
        store: makes the store in which they meet.
        local_rank: number of this one among those on its host.
        local_size: number of ranks on its host.
        interface: name of the network interface by which other hosts reach this one; needed where there are any.
        kept: whether rank 0 keeps the store, so that it ends with it.
    """

    rank: int
    size: int
    store: Callable[[], Store]
    local_rank: int
    local_size: int
    interface: str = ""
    kept: bool = False

    @classmethod
    def by_file(cls, rank: int, size: int, path: str) -> "Rendezvous":
        """Return that of ranks of one host, all of which open this file; torch's TCPStore would listen to anybody."""
        return cls(rank, size, lambda: FileStore(path, size), rank, size)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size

    @property
    def backend(self) -> str:
        """The backend for these ranks."""
        return BACKEND if self.one_host else "hierarchical"

    def join(self, timeout_s: Seconds) -> None:
        """Make this process a rank of the default process group; wait so long for the others at most."""
        names = {"RANK": self.rank, "WORLD_SIZE": self.size}
        names |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_size}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ[AGENT_STORE] = str(not self.kept)
        if self.interface:
            os.environ.setdefault(INTERFACE, self.interface)
        register()
        bound = timedelta(seconds=timeout_s)
        dist.init_process_group(self.backend, store=self.store(), rank=self.rank, world_size=self.size, timeout=bound)


# Runs of this process so far; every rank makes the same ones in the same order.
_runs = 0

# The job's store, after the rendezvous.
_job_store: Store | None = None


@dataclass
class ProcessGroup:
    """The process group of a run, or a subgroup of it.

    Args:
        handle: torch's process group; None: this process was started again, while the others train.
        store: the job's, with a prefix of this run.
        bound: timeout of the backend.
        for_ever: whether that was extended by :meth:`wait_for_ever`.
        subgroups: those that were split from it, as torch has them.
    """

    handle: Any
    store: Store
    backend: str
    bound: timedelta
    for_ever: bool = False
    rank: int = 0
    """This process's in the run, where it forms groups of some ranks."""
    subgroups: list[Any] = field(default_factory=list)

    def split(self, groups: Sequence[Sequence[int]]) -> "ProcessGroup | None":
        """Create subgroups, and return this rank's; all ranks of this group call it together.

        Args:
            groups: ranks of each subgroup; every rank is in one of them.

        Returns:
            None: this rank's subgroup has no other rank.
        """
        rank, own = dist.get_rank(self.handle), None
        for ranks in groups:
            if len(ranks) == dist.get_world_size(self.handle):
                return self
            if len(ranks) < 2:
                continue
            handle = dist.new_group(list(ranks), backend=_in_torch(self.backend), timeout=self.bound)
            if rank in ranks:
                self.subgroups.append(handle)
                own = ProcessGroup(handle, self.store, self.backend, self.bound)
        if own is not None and self.for_ever:
            own.wait_for_ever()
        return own

    def again(self) -> "ProcessGroup":
        """Create another group of the same ranks; all of them call it together.

        A backend of a device may keep the messages of two ranks in the order in which both were asked for them: here
        nothing waits for those of the other group.
        """
        handle = dist.new_group(backend=_in_torch(self.backend), timeout=self.bound)
        self.subgroups.append(handle)
        group = ProcessGroup(handle, self.store, self.backend, self.bound)
        if self.for_ever:
            group.wait_for_ever()
        return group

    def of_generation(self, number: int, members: Sequence[int], timeout_s: Seconds) -> "ProcessGroup":
        """Form a group of some ranks of the run, by themselves; they call it together.

        Args:
            number: of their generation, which no other group of the run has.
            members: their ranks.
            timeout_s: longest wait for each other.

        Raises:
            RuntimeError: one of them does not come.
        """
        store = PrefixStore(f"generation {number}", self.store)
        own = members.index(self.rank)
        handle = _formed(self.backend, store, own, members, timedelta(seconds=timeout_s))
        group = ProcessGroup(handle, self.store, self.backend, self.bound, rank=self.rank)
        if self.for_ever:
            group.wait_for_ever()
        return group

    def give_up(self) -> bool:
        """Leave a group of which members are lost; return whether collectives may still write what they were given."""
        if self.backend == "shm":
            self.handle.shutdown()
            return False
        # Gloo can't cancel a collective (torch 2.13), and to destroy its group would be to wait for it.
        kept = (self.handle.gloo, self.handle._between) if self.backend == "hierarchical" else (self.handle,)
        for each in kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        if self.backend == "hierarchical":
            self.handle.shutdown()
        return True

    def wait_for_ever(self) -> None:
        """Extend the backend's timeout: the watchdog bounds each wait, and knows which ranks are slow on purpose."""
        self.for_ever = True
        if self.backend in ("gloo", "hierarchical"):  # of the others, each wait has a timeout of its own
            dist.distributed_c10d._set_pg_timeout(timedelta(days=30), self.handle)
        if self.backend == "hierarchical":
            self.handle.wait_for_ever()


@contextlib.contextmanager
def opened(
    world: LaunchEnv,
    backend: str,
    timeout_s: Seconds,
    terms: Mapping[str, str],
    *,
    survives: bool = False,
    again: bool = False,
) -> Iterator[ProcessGroup | None]:
    """Context manager: the process group of a run; None if this process is alone.

    A process group that the user has initialised stays as it is, and the run has a group of its own next to it. Where
    there is none, one is made and destroyed at the end. Pending collectives are aborted when the run fails. A run that
    survives deaths has a group that torch.distributed does not keep, and which can be replaced.

    Args:
        world: this rank's launch environment.
        backend: of the process group.
        timeout_s: longest wait for the others.
        terms: what all ranks must have in common, by name.
        survives: whether the run survives deaths.
        again: whether this process was in the run before, and the others have gone on without it.

    Raises:
        WaitTimeoutError: not all ranks have come within ``timeout_s``.
        PacelineError: ranks differ in a term, or two processes are the same rank.
    """
    global _runs
    _runs += not again
    if world.size == 1:
        yield None
        return
    if backend in OURS:
        register()
    bound = timedelta(seconds=timeout_s)
    with _gloo_on_loopback(world):
        with _all_come(world, timeout_s):
            base = dist.distributed_c10d._get_default_store() if dist.is_initialized() else _store_of_job(world, bound)
            terms = {"backend": backend, **terms}
            joins = attend(_own_prefix(base, "arrivals"), world.rank, world.size, terms, timeout_s, may_join=survives)
        yield from _opened_alone(world, backend, bound, joins=joins) if survives else _opened(world, backend, bound)


@contextlib.contextmanager
def _gloo_on_loopback(world: LaunchEnv) -> Iterator[None]:
    """Context manager: groups that are made inside listen on loopback, if all ranks are known to be on this host."""
    if not all_here(one_host=world.one_host) or INTERFACE in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def _opened(world: LaunchEnv, backend: str, bound: timedelta) -> Iterator[ProcessGroup]:
    """Yield a group that torch.distributed keeps."""
    if dist.is_initialized():
        handle: Any = dist.new_group(backend=_in_torch(backend), timeout=bound)
    else:
        with _all_come(world, bound.total_seconds()):
            dist.init_process_group(
                _in_torch(backend),
                store=_own_prefix(_store_of_job(world, bound), "group"),
                rank=world.rank,
                world_size=world.size,
                timeout=bound,
            )
        handle = dist.group.WORLD
    group = ProcessGroup(handle, _own_prefix(dist.distributed_c10d._get_default_store(), "run"), backend, bound)
    try:
        yield group
    except BaseException:
        # Collectives that other ranks will never join; else destroying the groups would wait for them.
        for each in (*group.subgroups, handle):
            with contextlib.suppress(Exception):  # a backend may have nothing to abort
                each.abort()
        raise
    finally:
        for each in (*group.subgroups, handle):
            dist.destroy_process_group(each)


def _opened_alone(world: LaunchEnv, backend: str, bound: timedelta, *, joins: bool) -> Iterator[ProcessGroup]:
    """Yield a group that torch.distributed does not keep; one without members for a process that joins the others."""
    with _all_come(world, bound.total_seconds()):
        base = dist.distributed_c10d._get_default_store() if dist.is_initialized() else _store_of_job(world, bound)
        group = ProcessGroup(None, _own_prefix(base, "run"), backend, bound, rank=world.rank)
        if not joins:
            group.handle = group.of_generation(0, range(world.size), bound.total_seconds()).handle
    try:
        yield group
    except BaseException:
        if group.handle is not None:
            group.give_up()
        raise


def _store_of_job(world: LaunchEnv, bound: timedelta) -> Store:
    """Return the job's store: one for all groups, since in a second one torch 2.13 finds the last one's addresses."""
    global _job_store
    if _job_store is None:
        _job_store = job_store(world.rank, bound.total_seconds())
    return _job_store


@contextlib.contextmanager
def _all_come(world: LaunchEnv, timeout_s: Seconds) -> Iterator[None]:
    """Context manager: the rendezvous of all ranks; name the timeout if some do not come."""
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise WaitTimeoutError(
            f"rank {world.rank} waited {timeout_s:g} s for all {world.size} ranks to come, and some did not "
            f"({error}); start them all, or write a larger timeout_s="
        ) from error


def _formed(backend: str, store: Store, rank: int, members: Sequence[int], bound: timedelta) -> Any:
    """Return a process group that torch.distributed does not keep: the ranks of its default one may be dead.

    Args:
        backend: for CPUs.
        store: of this group alone.
        rank: this process's among the members.
        members: their ranks in the run.
        bound: longest wait for the others.
    """
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo(store, rank, len(members), bound)
        gloo._set_sequence_number_for_group()
        handle = dist.ProcessGroup(store, rank, len(members))
        kind = dist.ProcessGroup.BackendType.GLOO
        handle._set_default_backend(kind)
        handle._register_backend(torch.device("cpu"), kind, gloo)
    else:
        create = importlib.import_module(f"paceline.comm.{'shm.process_group' if backend == 'shm' else backend}").create
        options = SimpleNamespace(
            store=store,
            group_id="of the run",
            group_rank=rank,
            group_size=len(members),
            global_ranks_in_group=list(members),
            timeout=bound,
        )
        handle = create(options, None)
    return handle


def _own_prefix(store: Store, use: str) -> Store:
    """Return the store with a prefix that no other run uses, and this one for nothing else."""
    return PrefixStore(f"paceline/{_runs}/{use}", of_this_start(store))


def _in_torch(backend: str) -> str:
    """Return torch's name of a backend: beside one for a device, tensors in the host's memory go through Gloo."""
    kinds = dist.Backend.backend_capability.get(backend, [CPU.type])
    return backend if CPU.type in kinds else f"cpu:gloo,{kind_of(backend)}:{backend}"
