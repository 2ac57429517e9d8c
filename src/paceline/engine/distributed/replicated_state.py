"""What the ranks of a run have in common, as the survivors of a death go on with it.

A, its optimizer and all that the policy decides are the same on every rank. So a rank that dies takes with it no more
than its own Δ of the round, its place among those that write checkpoints, and the snapshots that it was to score.
"""

import functools
from typing import Any, final

import torch
from torch import Tensor

from paceline.core.records import ReplicaExit
from paceline.engine.checkpointing import Checkpointer, tell
from paceline.engine.distributed.client import ReplicatedCoordinator
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.spmd.membership import Generation
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.survival import ReplicatedState


@final
class SharedRun(ReplicatedState):
    """The replicated state of one run, on one rank.

    Args:
        context: of the rank.
        coordinator: runs the policy, as on all ranks.
        shard: all of A, and its optimizer.
        checkpointer: saves the run.
    """

    def __init__(
        self, context: RankContext, coordinator: ReplicatedCoordinator, shard: RankShard, checkpointer: Checkpointer
    ) -> None:
        self._context, self._coordinator, self._shard = context, coordinator, shard
        self._checkpointer = checkpointer
        assert shard.update.optimizer is not None, "a rank with a part of the optimizer was not refused"
        self._optimizer = shard.update.optimizer

    def changed(self, generation: Generation) -> None:
        coordinator, peers = self._coordinator, self._context.registry.peers
        for rank, reason in sorted(generation.left.items()):
            coordinator.died(ReplicaExit(rank, reason, coordinator.now))
        if self._context.is_first:
            self._checkpointer.take_over()
            lost = "; ".join(f"{peers[rank]} {reason}" for rank, reason in sorted(generation.left.items()))
            left = len(generation.members)
            tell(f"{lost}; {left} rank{'s go' if left > 1 else ' goes'} on from update {coordinator.decisions.version}")

    def tensors(self) -> list[Tensor]:
        return self._shard.state.vectors

    def rest(self) -> Any:
        return self._optimizer.replicated()

    def stage(self, tensors: list[Tensor], rest: Any) -> None:
        self._coordinator.staged = functools.partial(self._adopt, tensors, rest)

    def lost_sums(self) -> None:
        self._shard.reduce_buffer.renew()

    def _adopt(self, tensors: list[Tensor], rest: Any) -> None:
        torch._foreach_copy_(self._shard.state.vectors, tensors)
        self._optimizer.replicate(rest)
