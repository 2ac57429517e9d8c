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
from paceline.replica.tensor.placements import Layout as Lies
from paceline.replica.tensor.placements import OnRank, Shard, part_of
from paceline.replica.tensor.prepare import Prepared, prepared
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.tp_group import SingleRankTP, TPCollectives
from paceline.trace.recorder import AnyRecorder, NullRecorder


@final
class GroupShards(TPCollectives):
    """One shard's.

    Args:
        traffic: of the run, whose group has these shards alone; counts what is sent.
        rank: which shard this is.
    """

    def __init__(self, traffic: Communicator, rank: int) -> None:
        super().__init__(rank, traffic.ranks)
        self._traffic, self._group = traffic, traffic.group.handle
        self._others = " and ".join(str(shard) for shard in range(self.count) if shard != rank)
        self.recorder: AnyRecorder = NullRecorder()
        """Of the spans of what is sent: each lies within that of its forward or backward pass."""

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        with self._timed(ring_bytes(tensor.nbytes, self.count)):
            return self._traffic.combined(tensor, self._waited_for(what), largest=largest)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        mine = _padded(part, max(sizes))
        rows = mine.new_empty(self.count, max(sizes))
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._traffic.all_gather(rows, mine), what)
        return [row[:size].view(*shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        longest, own = max(part.numel() for part in parts), parts[self.rank]
        rows = torch.stack([_padded(part, longest) for part in parts])
        mine = rows.new_empty(longest)
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._traffic.reduce_scatter(rows, mine), what)
        return mine[: own.numel()].view(own.shape)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(made.nbytes if owner == self.rank else 0) as sent:
            self._wait(dist.broadcast(made, group=self._group, group_src=owner, async_op=True), what)
        self._traffic.sent_bytes += sent
        return made

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(0 if owner == self.rank else made.nbytes) as sent:
            self._wait(dist.reduce(made, group=self._group, group_dst=owner, async_op=True), what)
        self._traffic.sent_bytes += sent
        return made

    def _wait(self, work: Any, what: str) -> None:
        self._traffic.wait(work, self._waited_for(what))

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
        here: the rank.
    """

    def __init__(self, here: RankSetup) -> None:
        self.setup, self._team = here.setup, here.team
        self.mesh, self.rank = here.mesh, here.team.world.rank
        self.place = self.mesh.place(self.rank)
        self._replica = self.place.replica if here.replica is None else here.replica
        self.circles = SubGroups.of(self.mesh, here.team.traffic)
        among = self.circles.shards
        self.shards: SingleRankTP | GroupShards = (
            SingleRankTP() if among is None else GroupShards(among, self.place.shard)
        )
        self.whole = here.layout
        """The layout of A."""
        self.prepared = self._made(here)
        self.lies = self.prepared.shard.parameters
        """How the tensors of A lie among the shards, by name."""
        parts = [part_of(self.whole, self.lies, shard) for shard in range(self.shards.count)]
        self.stages = [StageSharding(self.lies, parts)]
        self.layout = parts[self.place.shard]
        """Of this rank's part of A."""
        self.state = read(self.prepared.shard.module, self.layout.new())
        """This rank's part of A_0."""
        _let_go(here.module, self.lies, self.place.shard)

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
            self.setup.job.program,
            self.prepared,
            self.shards,
            self._replica,
            self.layout,
            self.setup.device(self.rank),
            recorder=recorder,
            micro_steps=micro_steps,
            loose=loose,
        )

    def _made(self, here: RankSetup) -> Prepared:
        """This rank's shard of the model; what it takes to find and check it is not counted as training's."""
        job, traffic, rules = self.setup.job, self._team.traffic, self.setup.job.strategy.shard_rules
        with extended_timeout(self._team):
            made = prepared(job.program, here.module, first_batch(job), self.shards, self._team.gather, rules)
            if here.steps_on_parts:
                lies = made.shard.parameters
                refuse_unless_elementwise(job.program.optimizer, self.whole, lies, self.shards.count)
        if traffic is not None:
            traffic.sent_bytes = 0
        return made


def _let_go(module: nn.Module, lies: Mapping[str, Lies], shard: int) -> None:
    """Of the memory of tensors that no shard has whole, or not this one: the shard's are its own."""
    for name, tensor in tensors_of(module).items():
        how = lies.get(name)
        if isinstance(how, Shard) or (isinstance(how, OnRank) and how.shard != shard):
            tensor.data = tensor.data.new_empty(0)
