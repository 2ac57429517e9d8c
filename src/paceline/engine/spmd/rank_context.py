"""The ranks of one run, as one of them sees them: its communicator, its watchdog, its subgroups of the mesh.

One rank at the start of a run.

The ranks with which one shares something: a stage, or the same part of A.

::

    replicas=2 stages=2 shards=2

                 replica 0            replica 1
    stage 0     (0    1)             (4    5)          shards: who work on one stage of one replica
    stage 1     (2    3)             (6    7)          peers: 0 and 4, 1 and 5, 2 and 6, 3 and 7

    stages=[2,1] shards=[2,1]

    stage 0     (0    1)  (2    3)                     shards: who share a column
    stage 1     (4)                                    copies: who take turns at a stage, 0 and 2, 1 and 3

    replicas=2 stages=[2,1]

    stage 0      0    1               3    4           holders: who have the same part of A anywhere, 0, 1, 3 and 4
    stage 1      2                    5                and 2 and 5

Time to capture, cut and check a model before training, which may take longer than any wait in it.
"""

import contextlib
import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError, WorkerError, encode_failure, failure_text
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.process_group import LaunchEnv, opened
from paceline.engine.spmd.watchdog import CollectiveWatchdog, RankRegistry, StoreSignals
from paceline.replica.flat_state import FlatLayout

LINGER_S: Seconds = 5.0
"""How long rank 0, where it keeps the job's store, stays for the others to read why the run ended."""


class RankContext:
    """What one rank has of the others; alone, nobody.

    Args:
        world: which rank this is.
        registry: who they are.
        communicator: collectives.
        store_signals: what is said outside them.
    """

    def __init__(
        self,
        world: LaunchEnv,
        registry: RankRegistry,
        communicator: Communicator | None,
        store_signals: StoreSignals | None,
    ) -> None:
        self.world, self.registry, self.communicator, self.store_signals = world, registry, communicator, store_signals

    def gather(self, value: Any, what: str) -> list[Any]:
        """What each rank says, in their order."""
        if self.communicator is None:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(mine)]), [1] * self.world.size, what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = self._gather(padded, [len(padded)] * self.world.size, what)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def agree_on_failure(self, error: BaseException) -> BaseException:
        """What all ranks raise, where this one has met an error."""
        dead = None if isinstance(error, PacelineError) else self.registry.first_exited()
        if dead is not None:  # a collective of somebody else's broke
            told: PacelineError = WorkerError(f"{dead} ended while {self.registry.own} was at work with it: {error}")
        else:
            told = error if isinstance(error, PacelineError) else WorkerError(_told(self.world.rank, error))
        if self.store_signals is not None:
            told = self._agreed(self.store_signals, told)
        return told if isinstance(error, Exception) else error

    def _agreed(self, store_signals: StoreSignals, told: PacelineError) -> PacelineError:
        try:
            verdict = store_signals.report_failure(told)
            store_signals.acknowledge(self.world.rank)
            if self.world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                store_signals.await_acknowledgements(LINGER_S)
        except RuntimeError:  # the store has gone with who kept it
            return told
        return verdict

    def _gather(self, mine: torch.Tensor, sizes: list[int], what: str) -> list[torch.Tensor]:
        assert self.communicator is not None, "nobody is there"
        found = [torch.empty(size, dtype=mine.dtype) for size in sizes]
        self.communicator.wait(dist.all_gather(found, mine, group=self.communicator.group.handle, async_op=True), what)
        return found


@contextlib.contextmanager
def open_rank_context(
    world: LaunchEnv, backend: str, device: str, timeout_s: Seconds, *, watched: bool
) -> Iterator[RankContext]:
    """The team of one run, while that lasts; what any rank raises inside, all raise.

    Args:
        world: which rank this is.
        backend: moves the bytes.
        device: where this rank computes.
        timeout_s: the longest wait.
        watched: whether :class:`CollectiveWatchdog` waits for collectives; else the backend itself must bound them.
    """
    with opened(world, backend, timeout_s) as group, contextlib.ExitStack() as closing:
        registry = RankRegistry(world, group)
        closing.callback(registry.close)
        if group is None:
            context = RankContext(world, registry, None, None)
        else:
            if backend != "nccl" and watched:
                group.wait_for_ever()
            store_signals = StoreSignals(group.store, world.rank, world.size)
            watchdog = CollectiveWatchdog(store_signals, registry, timeout_s, backend)
            communicator = Communicator(group, watchdog, device if backend == "nccl" else "cpu")
            context = RankContext(world, registry, communicator, store_signals)
        try:
            yield context
        except BaseException as error:
            said = context.agree_on_failure(error)
            if said is error:
                raise
            raise said from error


def _told(rank: int, error: BaseException) -> str:
    return failure_text(json.loads(encode_failure(rank, error)))


@dataclass(frozen=True)
class RankSetup:
    """One rank at the start of a run."""

    run_context: RunContext
    context: RankContext
    backend: str
    module: nn.Module
    """With the values of A_0; of this process, though not all of it need lie in its memory."""
    layout: FlatLayout
    """Of A."""
    replica: ReplicaId | None = None
    """The one that is all of the team; None: the team has all replicas."""

    @property
    def mesh(self) -> Mesh:
        """Of the team's ranks."""
        mesh = self.run_context.job.strategy.mesh
        return mesh if self.replica is None else replace(mesh, replicas=1)

    @property
    def steps_on_parts(self) -> bool:
        """Whether each rank steps on its part of A, with an optimizer for that."""
        return self.replica is None or self.run_context.local_sgd


@dataclass(frozen=True)
class SubGroups:
    """One rank's; None where it is alone."""

    shards: Communicator | None
    """With those who work on the same column of the same replica."""
    copies: Communicator | None
    """With those who have the same part of A in other columns of the same stage and replica."""
    peers: Communicator | None
    """With those who have the same part of A in other replicas."""

    @classmethod
    def of(cls, mesh: Mesh, communicator: Communicator | None) -> "SubGroups":
        """Those of a mesh; all ranks make them together."""
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
    """Some ranks, as one of them sees it."""

    communicator: Communicator | None
    """None: it is alone."""
    rank: int
    """Which of them it is."""


def holders(mesh: Mesh, rank: int, communicator: Communicator, peers: Communicator | None) -> SubGroup:
    """Who have the same part of A, in any column of any replica; all ranks make it together.

    Args:
        mesh: of all ranks.
        rank: whose.
        communicator: of the whole run.
        peers: those in other replicas, who are all where nobody takes turns.
    """
    place, replicas = mesh.coordinate(rank), range(mesh.replicas)
    mine, copies = mesh.stage_replica(place), mesh.stage_replicas.copies[place.stage]
    number = place.replica * copies + mine.copy
    if max(mesh.stage_replicas.copies) == 1:
        return SubGroup(peers, number)
    stages = range(len(mesh.stage_workers))
    each = [zip(*(column for r in replicas for column in _columns(mesh, r, s)), strict=True) for s in stages]
    return SubGroup(communicator.split([list(ranks) for stage in each for ranks in stage]), number)


def _columns(mesh: Mesh, replica: int, stage: int) -> list[list[int]]:
    """The ranks of each column of a stage."""
    return [mesh.stage_replica_ranks(replica, column) for column in mesh.stage_replicas if column.stage == stage]


PREPARATION_S: Seconds = 1800.0
"""How long that may take before it counts as a hang; a rank that dies meanwhile is missed at once."""


@contextlib.contextmanager
def extended_timeout(context: RankContext) -> Iterator[None]:
    """While it is entered, nobody takes this rank's silence for a hang."""
    store_signals, offset_ns = context.store_signals, context.registry.clock_offset_ns
    if store_signals is not None:
        store_signals.extend_timeout(time.monotonic_ns() + offset_ns + int(PREPARATION_S * 1e9))
    yield
    if store_signals is not None:
        store_signals.extend_timeout(0)
