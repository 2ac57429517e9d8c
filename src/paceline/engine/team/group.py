"""The group by which the ranks of one run talk, opened and closed in one place."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import WaitTimeoutError
from paceline.core.types import Seconds
from paceline.engine.team.world import OURS, World

_names = 0
"""How many have been given; every rank gives the same ones."""

_met: Store | None = None
"""The job's store, once the ranks have met in it."""


class Group:
    """One run's.

    Args:
        handle: torch's process group of all ranks.
        store: where ranks leave notes for each other, under names of this run alone.
        backend: what moves the bytes.
    """

    def __init__(self, handle: Any, store: Store, backend: str, bound: timedelta) -> None:
        self.handle, self.store, self.backend, self._bound = handle, store, backend, bound
        self._circles: list[Any] = []
        self._for_ever = False

    def circle(self, circles: Sequence[Sequence[int]]) -> "Group | None":
        """A group of some ranks, in which this one is; all ranks of this group make all circles together.

        Args:
            circles: the ranks of each, every rank in one of them.

        Returns:
            None: this rank's has nobody else in it.
        """
        rank, found = dist.get_rank(self.handle), None
        for ranks in circles:
            if len(ranks) == dist.get_world_size(self.handle):
                return self
            if len(ranks) < 2:
                continue
            handle = dist.new_group(list(ranks), backend=_in_torch(self.backend), timeout=self._bound)
            if rank in ranks:
                self._circles.append(handle)
                found = Group(handle, self.store, self.backend, self._bound)
        if found is not None and self._for_ever:
            found.wait_for_ever()
        return found

    def handles(self) -> list[Any]:
        """Of all groups that were made of it, itself last."""
        return [*self._circles, self.handle]

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
def opened(world: World, backend: str, timeout_s: Seconds) -> Iterator[Group | None]:
    """The group of a run; None for who is alone.

    A process group that the user has initialised stays as it is, and the run's traffic has a group of its own beside
    it. Where there is none, one is made here and destroyed at the end. What hangs in it when the run fails is broken
    off.

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
    group = Group(handle, _named(dist.distributed_c10d._get_default_store()), backend, bound)
    try:
        yield group
    except BaseException:
        for each in group.handles():
            _break_off(each)
        raise
    finally:
        for each in group.handles():
            dist.destroy_process_group(each)


def _initialise(world: World, backend: str, bound: timedelta) -> None:
    try:
        store = _named(_job_store(world, bound))
        dist.init_process_group(_in_torch(backend), store=store, rank=world.rank, world_size=world.size, timeout=bound)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise WaitTimeoutError(
            f"rank {world.rank} waited {bound.total_seconds():g} s for all {world.size} ranks to come, and some did "
            f"not ({error}); start them all, or write a larger timeout_s="
        ) from error


def _job_store(world: World, bound: timedelta) -> Store:
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
