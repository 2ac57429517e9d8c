"""One rank of a tensor-parallel replica: its collectives with the other shards, and its shard of the model."""

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
from paceline.replica.tensor.placements import OnRank, Placement, Shard, shard_layout
from paceline.replica.tensor.prepare import PreparedShard, prepare_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.trace.recorder import AnyRecorder, Recorder


@final
class ProcessGroupTP(TPCollectives):
    """Collectives of one shard, over a process group of the shards alone.

    Args:
        communicator: of that group; counts the bytes.
        rank: number of this shard.
    """

    def __init__(self, communicator: Communicator, rank: int) -> None:
        super().__init__(rank, communicator.ranks)
        self._communicator, self._group = communicator, communicator.group.handle
        self._others = " and ".join(str(shard) for shard in range(self.count) if shard != rank)
        self._recorder: Recorder | None = None

    def record_by(self, recorder: AnyRecorder) -> None:
        """Record a span for each collective, within that of its forward or backward pass."""
        self._recorder = recorder if isinstance(recorder, Recorder) else None

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        with self._timed(ring_bytes(tensor.nbytes, self.count)):
            return self._communicator.reduced(tensor, self._described(what), largest=largest)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        own = _padded(part, max(sizes))
        rows = own.new_empty(self.count, max(sizes))
        with self._timed((self.count - 1) * own.nbytes):
            self._wait(self._communicator.all_gather(rows, own), what)
        return [row[:size].view(*shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        longest, own = max(part.numel() for part in parts), parts[self.rank]
        rows = torch.stack([_padded(part, longest) for part in parts])
        total = rows.new_empty(longest)
        with self._timed((self.count - 1) * total.nbytes):
            self._wait(self._communicator.reduce_scatter(rows, total), what)
        return total[: own.numel()].view(own.shape)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(result.nbytes if owner == self.rank else 0) as sent:
            self._wait(dist.broadcast(result, group=self._group, group_src=owner, async_op=True), what)
        self._communicator.sent_bytes += sent
        return result

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(0 if owner == self.rank else result.nbytes) as sent:
            self._wait(dist.reduce(result, group=self._group, group_dst=owner, async_op=True), what)
        self._communicator.sent_bytes += sent
        return result

    def _wait(self, work: Any, what: str) -> None:
        self._communicator.wait(work, self._described(what))

    def _described(self, what: str) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        return f"{what}, from shard {self._others} for shard {self.rank} {when}"

    @contextlib.contextmanager
    def _timed(self, sent_bytes: int) -> Iterator[int]:
        began = time.monotonic_ns()
        yield sent_bytes
        if self._recorder is not None:
            self._recorder.record("all_reduce", self.step, began, time.monotonic_ns(), bytes=sent_bytes)


def _padded(part: Tensor, length: int) -> Tensor:
    """Flatten a part, padded to the longest one: collectives send equal parts."""
    flat = part.reshape(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])


class TensorParallelRank:
    """A rank's shard of the model and of A; all ranks create it together.

    Args:
        rank_setup: the rank at the start of the run.
    """

    def __init__(self, rank_setup: RankSetup) -> None:
        self.run_context, self._context = rank_setup.run_context, rank_setup.context
        self.mesh, self.rank = rank_setup.mesh, rank_setup.context.world.rank
        self.place = self.mesh.coordinate(self.rank)
        self._replica = self.place.replica if rank_setup.replica is None else rank_setup.replica
        self.subgroups = SubGroups.of(self.mesh, rank_setup.context.communicator)
        communicator = self.subgroups.shards
        assert communicator is not None, "a strategy with shards has several ranks"
        self.shards = ProcessGroupTP(communicator, self.place.shard)
        self.whole = rank_setup.layout
        """Layout of A."""
        self.prepared = self._prepare(rank_setup)
        self.placements = self.prepared.shard.parameters
        """Placements of the tensors of A among the shards, by name."""
        parts = [shard_layout(self.whole, self.placements, shard) for shard in range(self.shards.count)]
        self.stages = [StageSharding(self.placements, parts)]
        self.layout = parts[self.place.shard]
        """Layout of this rank's part of A."""
        self.state = read(self.prepared.shard.module, self.layout.new())
        """Initial values of this rank's part of A."""
        _free_unused(rank_setup.module, self.placements, self.place.shard)

    def worker(self, micro_steps: int, recorder: AnyRecorder, loose: GradientHandoff | None = None) -> TensorParallel:
        """Create the replica that computes this rank's part of Δ.

        Args:
            micro_steps: batches in one Δ.
            recorder: of this rank's spans.
            loose: receives the gradients; None: they are written to the Δ buffer.
        """
        self.shards.record_by(recorder)
        device = self.run_context.device(self.rank)
        return TensorParallel(
            self.prepared, self.layout, self._replica, device, recorder=recorder, micro_steps=micro_steps, loose=loose
        )

    def _prepare(self, rank_setup: RankSetup) -> PreparedShard:
        """Create and verify this rank's shard of the model; the bytes of that are not counted as training's."""
        job, communicator = self.run_context.job, self._context.communicator
        rules = job.strategy.shard_rules
        with extended_timeout(self._context):
            shard = prepare_shard(
                job.program, rank_setup.module, first_batch(job), self.shards, self._context.gather, rules
            )
            if rank_setup.steps_on_parts:
                placements = shard.shard.parameters
                refuse_unless_elementwise(job.program.optimizer, self.whole, placements, self.shards.count)
        if communicator is not None:
            communicator.sent_bytes = 0
        return shard


def _free_unused(module: nn.Module, placements: Mapping[str, Placement], shard: int) -> None:
    """Free the tensors of the whole model that this shard does not use as they are."""
    for name, tensor in tensors_of(module).items():
        placement = placements.get(name)
        if isinstance(placement, Shard) or (isinstance(placement, OnRank) and placement.shard != shard):
            tensor.data = tensor.data.new_empty(0)
