"""What the ranks of a run have in common, as the survivors of a death go on with it.

A, its optimizer and all that the policy decides are the same on every rank. So a rank that dies takes with it no more
than its own Δ of the round, its place among those that write checkpoints, and the snapshots that it was to score.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.core.records import ReplicaExit
from paceline.engine import run_context
from paceline.engine.checkpointing import Checkpointer, tell
from paceline.engine.distributed.agreement import DivergenceCheck
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator, SyncedClock
from paceline.engine.spmd.membership import Generation
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.rank_registry import PeerInfo
from paceline.engine.spmd.survival import ReplicatedState


class RunCopy(NamedTuple):
    """The replicated state of a run, as a rank that joins receives it from another one.

    Args:
        facts: what ranks must have in common, by name.
        coordinator: as :meth:`ReplicatedCoordinator.replicate` takes it.
        clock: when training began, and how long it stood still.
        tensors: A.
        optimizer: as :meth:`FlatOptimizer.replicate` takes it.
        checkpointer: as :meth:`Checkpointer.replicate` takes it.
        compared: version at the newest comparison of A.
    """

    facts: Mapping[str, str]
    coordinator: list[bytes]
    clock: tuple[int, int]
    tensors: list[Tensor]
    optimizer: Mapping[str, Any]
    checkpointer: tuple[Any, ...]
    compared: int


@final
class SharedRun(ReplicatedState):
    """The replicated state of one run, on one rank.

    Args:
        context: of the rank.
        coordinator: runs the policy, as on all ranks.
        shard: all of A, and its optimizer.
        clock: training time.
        checkpointer: saves the run.
        divergence: compares A among the ranks.
        facts: what ranks must have in common, by name.
    """

    def __init__(
        self,
        context: RankContext,
        coordinator: ReplicatedCoordinator,
        shard: RankShard,
        clock: SyncedClock,
        checkpointer: Checkpointer,
        divergence: DivergenceCheck,
        facts: Mapping[str, str],
    ) -> None:
        self._context, self._coordinator, self._shard = context, coordinator, shard
        self._clock, self._checkpointer, self._divergence = clock, checkpointer, divergence
        self._facts = facts
        assert shard.update.optimizer is not None, "a rank with a part of the optimizer was not refused"
        self._optimizer = shard.update.optimizer

    def changed(self, generation: Generation) -> None:
        coordinator, peers, known = self._coordinator, self._context.registry.peers, len(self._coordinator.loop.exits)
        for rank, reason in sorted(generation.left.items()):
            coordinator.died(ReplicaExit(rank, reason, coordinator.now))
        version = coordinator.decisions.version
        for rank, request in sorted(generation.joined.items()):
            fields = json.loads(request)
            del fields["token"]
            if rank != self._context.world.rank:
                self._context.registry.know([PeerInfo(**fields)])
            coordinator.joined(rank)
            if self._context.is_first:
                tell(f"{peers[rank]} joins again at update {version}")
        run_context.first_rank = self._context.members[0]
        for exit in coordinator.loop.exits[known:]:
            coordinator.loop.tell(exit)
        if self._context.is_first and generation.left:
            self._checkpointer.take_over()
            lost = "; ".join(f"{peers[rank]} {reason}" for rank, reason in sorted(generation.left.items()))
            left = len(generation.members)
            tell(f"{lost}; {left} rank{'s go' if left > 1 else ' goes'} on from update {version}")

    def tensors(self) -> list[Tensor]:
        return self._shard.state.vectors

    def rest(self) -> Any:
        return self._optimizer.replicated()

    def stage(self, tensors: list[Tensor], rest: Any) -> None:
        self._coordinator.staged = functools.partial(self._adopt, tensors, rest)

    def whole(self) -> "RunCopy":
        return RunCopy(
            self._facts,
            self._coordinator.replicated(),
            (self._clock.began_ns, self._clock.paused_ns),
            self._shard.state.vectors,
            self._optimizer.replicated(),
            self._checkpointer.replicated(),
            self._divergence.compared,
        )

    def join(self, other: "RunCopy") -> None:
        """Stand where the rank stood whose :meth:`whole` this is; its coordinator stands there already."""
        self._adopt(other.tensors, other.optimizer)
        self._clock.began_ns, self._clock.paused_ns = other.clock
        self._checkpointer.replicate(other.checkpointer)
        self._divergence.compared = other.compared
        run_context.first_rank = self._context.members[0]

    def lost_sums(self) -> None:
        self._shard.reduce_buffer.renew()

    def _adopt(self, tensors: list[Tensor], rest: Any) -> None:
        torch._foreach_copy_(self._shard.state.vectors, tensors)
        self._optimizer.replicate(rest)
