"""The shards of a replica as ranks of torch.distributed.

A model whose operators are divided among ranks, as one of them sees it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.engine.run_context import first_batch
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.rank_context import RankSetup, SubGroups, extended_timeout
from paceline.engine.spmd.shard_views import StageSharding
from paceline.replica.flat_state import read
from paceline.replica.module_utils import tensors_of
from paceline.replica.single import GradientHandoff
from paceline.replica.tensor.optimizer_check import refuse_unless_elementwise
from paceline.replica.tensor.placements import OnRank, Shard, shard_layout
from paceline.replica.tensor.placements import Placement as Lies
from paceline.replica.tensor.prepare import PreparedShard, prepare_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.tp_group import SingleRankTP, TPCollectives
from paceline.trace.recorder import AnyRecorder, NullRecorder


@final
class GroupShards(TPCollectives):
    """One shard's.

    Args:
        communicator: of the run, whose group has these shards alone; counts what is sent.
        rank: which shard this is.
    """

    def __init__(self, communicator: Communicator, rank: int) -> None:
        super().__init__(rank, communicator.ranks)
        self._communicator, self._group = communicator, communicator.group.handle
        self._others = " and ".join(str(shard) for shard in range(self.count) if shard != rank)
        self.recorder: AnyRecorder = NullRecorder()
        """Of the spans of what is sent: each lies within that of its forward or backward pass."""

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        with self._timed(ring_bytes(tensor.nbytes, self.count)):
            return self._communicator.combined(tensor, self._waited_for(what), largest=largest)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        mine = _padded(part, max(sizes))
        rows = mine.new_empty(self.count, max(sizes))
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._communicator.all_gather(rows, mine), what)
        return [row[:size].view(*shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        longest, own = max(part.numel() for part in parts), parts[self.rank]
        rows = torch.stack([_padded(part, longest) for part in parts])
        mine = rows.new_empty(longest)
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._communicator.reduce_scatter(rows, mine), what)
        return mine[: own.numel()].view(own.shape)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(made.nbytes if owner == self.rank else 0) as sent:
            self._wait(dist.broadcast(made, group=self._group, group_src=owner, async_op=True), what)
        self._communicator.sent_bytes += sent
        return made

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(0 if owner == self.rank else made.nbytes) as sent:
            self._wait(dist.reduce(made, group=self._group, group_dst=owner, async_op=True), what)
        self._communicator.sent_bytes += sent
        return made

    def _wait(self, work: Any, what: str) -> None:
        self._communicator.wait(work, self._waited_for(what))

    def _waited_for(self, what: str) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        return f"{what}, from shard {self._others} for shard {self.rank} {when}"

    @contextlib.contextmanager
    def _timed(self, sent_bytes: int) -> Iterator[int]:
        began = time.monotonic_ns()
        yield sent_bytes
        self.recorder.record("all_reduce", self.step, began, time.monotonic_ns(), bytes=sent_bytes)


def _padded(part: Tensor, length: int) -> Tensor:
    """As a vector that is as long as the longest: collectives send equal parts."""
    flat = part.reshape(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])


class TensorParallelRank:
    """One rank's view; all ranks make it together.

    Args:
        rank_setup: the rank at the start of the run.
    """

    def __init__(self, rank_setup: RankSetup) -> None:
        self.run_context, self._context = rank_setup.run_context, rank_setup.context
        self.mesh, self.rank = rank_setup.mesh, rank_setup.context.world.rank
        self.place = self.mesh.coordinate(self.rank)
        self._replica = self.place.replica if rank_setup.replica is None else rank_setup.replica
        self.subgroups = SubGroups.of(self.mesh, rank_setup.context.communicator)
        among = self.subgroups.shards
        self.shards: SingleRankTP | GroupShards = (
            SingleRankTP() if among is None else GroupShards(among, self.place.shard)
        )
        self.whole = rank_setup.layout
        """The layout of A."""
        self.prepared = self._made(rank_setup)
        self.lies = self.prepared.shard.parameters
        """How the tensors of A lie among the shards, by name."""
        parts = [shard_layout(self.whole, self.lies, shard) for shard in range(self.shards.count)]
        self.stages = [StageSharding(self.lies, parts)]
        self.layout = parts[self.place.shard]
        """Of this rank's part of A."""
        self.state = read(self.prepared.shard.module, self.layout.new())
        """This rank's part of A_0."""
        _let_go(rank_setup.module, self.lies, self.place.shard)

    def worker(self, micro_steps: int, recorder: AnyRecorder, loose: GradientHandoff | None = None) -> TensorParallel:
        """What computes Δ here.

        Args:
            micro_steps: batches of one Δ.
            recorder: of this rank's spans.
            loose: takes the gradients; None: they are written into the slot.
        """
        if isinstance(self.shards, GroupShards):
            self.shards.recorder = recorder
        return TensorParallel(
            self.run_context.job.program,
            self.prepared,
            self.shards,
            self._replica,
            self.layout,
            self.run_context.device(self.rank),
            recorder=recorder,
            micro_steps=micro_steps,
            loose=loose,
        )

    def _made(self, rank_setup: RankSetup) -> PreparedShard:
        """This rank's shard of the model; what it takes to find and check it is not counted as training's."""
        job, communicator, rules = (
            self.run_context.job,
            self._context.communicator,
            self.run_context.job.strategy.shard_rules,
        )
        with extended_timeout(self._context):
            made = prepare_shard(
                job.program, rank_setup.module, first_batch(job), self.shards, self._context.gather, rules
            )
            if rank_setup.steps_on_parts:
                lies = made.shard.parameters
                refuse_unless_elementwise(job.program.optimizer, self.whole, lies, self.shards.count)
        if communicator is not None:
            communicator.sent_bytes = 0
        return made


def _let_go(module: nn.Module, lies: Mapping[str, Lies], shard: int) -> None:
    """Of the memory of tensors that no shard has whole, or not this one: the shard's are its own."""
    for name, tensor in tensors_of(module).items():
        how = lies.get(name)
        if isinstance(how, Shard) or (isinstance(how, OnRank) and how.shard != shard):
            tensor.data = tensor.data.new_empty(0)
