"""One rank of a run: its context among the others, its setup, and its subgroups of the mesh.

Subgroups are ranks that share something: a stage, or the same part of the parameters A::

    replicas=2 stages=2 shards=2

                 replica 0            replica 1
    stage 0     (0    1)             (4    5)          shards: the workers of one stage of one replica
    stage 1     (2    3)             (6    7)          peers: 0 and 4, 1 and 5, 2 and 6, 3 and 7

    stages=[2,1] shards=[2,1]

    stage 0     (0    1)  (2    3)                     shards: the workers of one replica of the stage
    stage 1     (4)                                    copies: replicas of a stage, 0 and 2, 1 and 3

    replicas=2 stages=[2,1]

    stage 0      0    1               3    4           holders: all ranks with the same part of A, 0, 1, 3 and 4
    stage 1      2                    5                and 2 and 5
"""

import contextlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import SharedObject, share, unpack
from paceline.core.errors import CollectiveError, PacelineError, WorkerError, encode_failure, failure_text
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import ReplicaId, Seconds
from paceline.device import CPU
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.bounded_store import BoundedStore
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.launch_env import LaunchEnv, kind_of
from paceline.engine.spmd.membership import NoMemberError, RankMembership, Survives
from paceline.engine.spmd.process_group import opened
from paceline.engine.spmd.rank_registry import RankRegistry, StoreSignals
from paceline.engine.spmd.rendezvous import LINGER_S, keeps_store
from paceline.engine.spmd.survival import Survival
from paceline.engine.spmd.watchdog import CollectiveWatchdog
from paceline.replica.flat_state import FlatLayout

# Timeout of a rank that exports, partitions and verifies the model; the death of a rank is noticed at once.
PREPARATION_S: Seconds = 1800.0


@dataclass(frozen=True)
class RankContext:
    """A rank's communicator, store and peers.

    Args:
        communicator: collectives of the whole run; None: the rank is alone.
        store_signals: failures and signs of life outside the collectives; None: the rank is alone.
        survival: of a run that survives deaths; None: the first one ends the run.
    """

    world: LaunchEnv
    registry: RankRegistry
    communicator: Communicator | None
    store_signals: StoreSignals | None
    survival: Survival | None = None

    @property
    def members(self) -> Sequence[int]:
        """Return the ranks that take part; all, unless some have died."""
        return range(self.world.size) if self.survival is None else self.survival.members

    @property
    def is_first(self) -> bool:
        """Return whether this rank does what one rank does for all."""
        return self.members[0] == self.world.rank

    def gather(self, value: Any, description: str) -> list[Any]:
        """Return the value of each rank that takes part, in their order; all of them call it together."""
        if self.survival is None:
            return self._gather(value, description)
        return self.survival.collective(lambda: self._gather(value, description))

    def _gather(self, value: Any, description: str) -> list[Any]:
        communicator = self.communicator
        if communicator is None:
            return [value]

        def all_gather(own: torch.Tensor) -> list[torch.Tensor]:
            # dist.all_gather_object would wait without the watchdog.
            gathered = [torch.empty_like(own) for _ in range(communicator.ranks)]
            work = dist.all_gather(gathered, own, group=communicator.group.handle, async_op=True)
            communicator.wait(work, description)
            return gathered

        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in all_gather(torch.tensor([len(pickled)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(pickled)] = pickled
        parts = all_gather(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def agree_on_failure(self, error: BaseException) -> BaseException:
        """Return the error that all ranks raise after this one has met ``error``: the first that was reported."""
        if self.survival is not None and isinstance(error, Exception) and not self._concerns_all(error):
            return self._leave(error)
        by_peer = isinstance(error, CollectiveError) or not isinstance(error, PacelineError)
        dead = self.registry.first_exited() if by_peer else None
        if dead is not None:  # the error is that of a collective that broke when a peer died
            failure: PacelineError = self.registry.ended_while(dead, f"was at work with it ({error})")
        elif isinstance(error, PacelineError):
            failure = error
        else:
            failure = WorkerError(failure_text(json.loads(encode_failure(self.world.rank, error))))
        if self.store_signals is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone with the process that kept it
                first = self.store_signals.report_failure(failure)
                # Where rank 0 keeps the store, it ends with its process.
                bound_s = LINGER_S if keeps_store(self.world.rank) else 0.0
                self.store_signals.acknowledge(bound_s, self.registry.exited(range(self.world.size)))
                failure = first
        return failure if isinstance(error, Exception) else error

    def _concerns_all(self, error: Exception) -> bool:
        """Return whether an error ends the run: one that all ranks meet, or that comes before training."""
        survival = self.survival
        if survival is None or (survival.state is None and survival.arrival is None):
            return True
        joining = survival.state is None
        return isinstance(error, PacelineError) and not isinstance(error, NoMemberError) and not joining

    def _leave(self, error: Exception) -> PacelineError:
        """Let the others go on without this rank, and return its own error."""
        if isinstance(error, NoMemberError):
            return error
        assert self.survival is not None, "else its errors concern all"
        failure = WorkerError(failure_text(json.loads(encode_failure(self.world.rank, error))))
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the others
            self.survival.membership.leave(f"failed: {type(error).__name__}: {error}")
        return failure


@contextlib.contextmanager
def open_rank_context(
    world: LaunchEnv,
    backend: str,
    device: str,
    timeout_s: Seconds,
    *,
    watched: bool,
    survives: Survives | None = None,
    terms: Mapping[str, str] = MappingProxyType({}),
    again: bool = False,
) -> Iterator[RankContext]:
    """Context manager: this rank's context in one run. An error that any rank raises inside, all ranks raise.

    Args:
        world: this rank's launch environment.
        backend: of the process group.
        device: of this rank's tensors.
        timeout_s: longest wait.
        watched: True if :class:`CollectiveWatchdog` waits for all collectives; else the backend must bound them.
        survives: how the run goes on when ranks die; None: it ends.
        terms: what all ranks must have in common before they begin, by name.
        again: whether this process was in the run before, and the others have gone on without it.
    """
    group_of_run = opened(world, backend, timeout_s, terms, survives=survives is not None, again=again)
    with group_of_run as group, contextlib.ExitStack() as closing:
        joins = group is not None and group.handle is None
        registry = RankRegistry(world, None if joins else group)
        closing.callback(registry.close)
        context = RankContext(world, registry, None, None)
        if group is not None:
            store: Store | BoundedStore = group.store
            membership: RankMembership | None = None
            if survives is not None:
                store = bounded_store = BoundedStore(group.store, survives.timeout_s)
                membership = RankMembership(bounded_store, registry, world.rank, survives)
                if joins:
                    generation = membership.join(timeout_s)
                    group = group.of_generation(generation.number, generation.members, timeout_s)
            if backend != "nccl" and watched:
                group.wait_for_ever()
            store_signals = StoreSignals(store, world.rank, world.size)
            watchdog = CollectiveWatchdog(store_signals, registry, timeout_s, backend, membership)
            communicator = Communicator(group, watchdog, device if kind_of(backend) != CPU.type else CPU.type)
            survival = None if membership is None else Survival(membership, communicator, watchdog, registry, timeout_s)
            context = RankContext(world, registry, communicator, store_signals, survival)
            if survival is not None and joins:
                survival.arrive()
        try:
            yield context
        except BaseException as error:
            agreed = context.agree_on_failure(error)
            if agreed is error:
                raise
            raise agreed from error


@contextlib.contextmanager
def extended_timeout(context: RankContext) -> Iterator[None]:
    """Context manager: the watchdog does not time this rank out while it prepares the model."""
    store_signals, offset_ns = context.store_signals, context.registry.clock_offset_ns
    if store_signals is not None:
        store_signals.extend_timeout(time.monotonic_ns() + offset_ns + int(PREPARATION_S * 1e9))
    yield
    if store_signals is not None:
        store_signals.extend_timeout(0)


# Methods by which a module may leave something out when it is pickled.
STATEFUL = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")


@contextlib.contextmanager
def build_once_per_host(make: Callable[[SpillAllocator], nn.Module], context: RankContext) -> Iterator[nn.Module]:
    """Context manager: the model, on all ranks, which enter and leave it together. The model outlives it.

    It is built once on each host and mapped in all its ranks, so no rank needs memory for all of it::

        first rank of a host    make() -> shared memory --+
        the others              ... wait                  +--> map it, copy-on-write

    A model that can't be pickled as it is, each rank builds for itself.

    Args:
        make: builds the same model on every rank.
        context: of all ranks.
    """
    registry, spill = context.registry, SpillAllocator()
    first = next(peer for peer in registry.peers if peer.kernel == registry.own.kernel)
    path: str | None = None
    module: nn.Module | None = None
    with contextlib.ExitStack() as closing, extended_timeout(context):
        if first == registry.own:
            module = make(spill)
            # Any error of a module that can't be pickled, as of a parametrized one, leaves it to this rank alone.
            with contextlib.suppress(Exception):
                if not any(_pickles_itself(type(part)) for part in module.modules()):
                    shared = share(module, spill)
                    closing.callback(shared.close)
                    path, module = f"/proc/{os.getpid()}/fd/{shared.fd}", None
        path = context.gather(path, "the making of A_0")[first.rank]
        if path is not None:
            with contextlib.suppress(OSError), contextlib.closing(SharedObject(os.open(path, os.O_RDONLY))) as mapped:
                module = unpack(mapped, at_once=False)  # an OSError: it is another user's or container's
        yield make(SpillAllocator()) if module is None else module
        context.gather(None, "the others' copy of A_0")


def _pickles_itself(kind: type) -> bool:
    """Return whether a module's class decides what of it is pickled: that may be less than all."""
    users = (base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch."))
    return any(name in vars(base) for base in users for name in STATEFUL)


@dataclass(frozen=True)
class RankSetup:
    """A rank that is being set up, at the start of a run.

    Args:
        module: the model with the values of A_0; of this process, though not all of it need be in its memory.
        layout: of A.
        replica: the replica whose workers are all ranks of the context; None: the context has all replicas.
        kept: what the replica's dead workers had chosen, whose place these ranks take.
    """

    run_context: RunContext
    context: RankContext
    backend: str
    module: nn.Module
    layout: FlatLayout
    replica: ReplicaId | None = None
    kept: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def mesh(self) -> Mesh:
        """Mesh of the context's ranks."""
        mesh = self.run_context.job.strategy.mesh
        return mesh if self.replica is None else replace(mesh, replicas=1)

    @property
    def steps_on_parts(self) -> bool:
        """True if each rank has an optimizer for its part of A."""
        return self.replica is None or self.run_context.local_sgd


@dataclass(frozen=True)
class SubGroups:
    """Communicators of one rank; None where the subgroup has no other rank.

    Args:
        shards: tensor-parallel: the workers of the same replica of the same stage.
        copies: ranks with the same part of A in other replicas of the same stage, in the same replica of the model.
        peers: data-parallel: ranks with the same part of A in other replicas of the model.
    """

    shards: Communicator | None
    copies: Communicator | None
    peers: Communicator | None

    @classmethod
    def of(cls, mesh: Mesh, communicator: Communicator | None) -> "SubGroups":
        """Create those of a mesh; all ranks call it together."""
        if communicator is None:
            return cls(None, None, None)
        replicas, stages = range(mesh.replicas), range(len(mesh.stage_workers))
        shards = [mesh.stage_replica_ranks(r, column) for r in replicas for column in mesh.stage_replicas]
        peers = [
            [mesh.rank(Coordinate(r, s, i)) for r in replicas] for s in stages for i in range(mesh.stage_workers[s])
        ]
        copies = [list(each) for r in replicas for s in stages for each in zip(*_columns(mesh, r, s), strict=True)]
        return cls(communicator.split(shards), communicator.split(copies), communicator.split(peers))


class SubGroup(NamedTuple):
    """A subgroup, and this rank's number in it.

    Args:
        communicator: of the subgroup; None: the rank is alone.
    """

    communicator: Communicator | None
    rank: int


def holders(mesh: Mesh, rank: int, communicator: Communicator, peers: Communicator | None) -> SubGroup:
    """Create the group of ranks with the same part of A in any replica of any stage; all ranks call it together.

    Args:
        mesh: of all ranks.
        rank: this one's.
        communicator: of the whole run.
        peers: ranks with the same part in other replicas; no others have it if no stage is replicated.
    """
    place, replicas = mesh.coordinate(rank), range(mesh.replicas)
    number = place.replica * mesh.stage_replicas.copies[place.stage] + mesh.stage_replica(place).copy
    if max(mesh.stage_replicas.copies) == 1:
        return SubGroup(peers, number)
    stages = range(len(mesh.stage_workers))
    each = [zip(*(column for r in replicas for column in _columns(mesh, r, s)), strict=True) for s in stages]
    return SubGroup(communicator.split([list(ranks) for stage in each for ranks in stage]), number)


def _columns(mesh: Mesh, replica: int, stage: int) -> list[list[int]]:
    """Return the ranks of each replica of a stage."""
    return [mesh.stage_replica_ranks(replica, column) for column in mesh.stage_replicas if column.stage == stage]
