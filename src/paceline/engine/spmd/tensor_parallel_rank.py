"""One rank of a replica that has several, and of a tensor-parallel one: its shard and its collectives with others."""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.delta import Distance
from paceline.device import CPU
from paceline.engine.run_context import first_batch
from paceline.engine.spmd.capturing import captured_once
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.rank_context import RankSetup, SubGroups, extended_timeout
from paceline.engine.spmd.shard_views import PartChunks, ShardViews, StageSharding, names_of_part, owned_names
from paceline.replica.autograd import GradientHandoff
from paceline.replica.base import Batch, Replica
from paceline.replica.capture.input_spec import shapes_of
from paceline.replica.compilation import CompiledPart
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.local_sgd import ShardedLocalSGD
from paceline.replica.module_utils import tensors_of
from paceline.replica.own_parameters import Exchange
from paceline.replica.pipeline.pipelined import Pipelined
from paceline.replica.tensor.optimizer_check import refuse_unless_elementwise
from paceline.replica.tensor.placements import Shard, is_counted_on, shard_layout
from paceline.replica.tensor.prepare import prepare_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.short_steps import ShortSteps
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.trace.recorder import AnyRecorder, Recorder

T = TypeVar("T")


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

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager: what is sent is no part of training, so neither its bytes nor its spans are recorded."""
        recorder, sent = self._recorder, self._communicator.traffic.sent_bytes
        self._recorder = None
        try:
            yield
        finally:
            self._recorder, self._communicator.traffic.sent_bytes = recorder, sent

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        sent = ring_bytes(tensor.nbytes, self.count)
        return self._run(lambda name: self._communicator.reduced(tensor, name, largest=largest), what, sent)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        own = _padded(part, max(sizes))
        rows = own.new_empty(self.count, max(sizes))
        communicator, sent = self._communicator, (self.count - 1) * own.nbytes
        self._run(lambda name: communicator.finish(communicator.all_gather(rows, own), rows, name), what, sent)
        return [row[:size].view(*shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        longest, own = max(part.numel() for part in parts), parts[self.rank]
        rows = torch.stack([_padded(part, longest) for part in parts])
        total = rows.new_empty(longest)
        communicator, sent = self._communicator, (self.count - 1) * total.nbytes
        self._run(lambda name: communicator.finish(communicator.reduce_scatter(rows, total), total, name), what, sent)
        return total[: own.numel()].view(own.shape)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        return self._copied(tensor, what, owner == self.rank, functools.partial(dist.broadcast, group_src=owner))

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        return self._copied(tensor, what, owner != self.rank, functools.partial(dist.reduce, group_dst=owner))

    def reached(self, what: str) -> None:
        self._run(self._communicator.reached, what, 0)

    def _copied(self, tensor: Tensor, what: str, sends: bool, collective: Callable[..., Any]) -> Tensor:
        """Run a collective of torch in place of a copy."""
        result, communicator = tensor.clone(memory_format=torch.contiguous_format), self._communicator
        sent = result.nbytes if sends else 0

        def run(name: str) -> None:
            communicator.finish(collective(result, group=self._group, async_op=True), result, name)

        self._run(run, what, sent)
        communicator.traffic.sent_bytes += sent
        return result

    def _run(self, collective: Callable[[str], T], what: str, sent_bytes: int) -> T:
        """Run a collective, which is called with its description for errors, and record its span."""
        # The span begins before the start, and so has the wait for late shards in it.
        began = time.monotonic_ns()
        when = f"in step {self.step}" if self.step else "before the first step"
        result = collective(f"{what}, from shard {self._others} for shard {self.rank} {when}")
        if self._recorder is not None:
            self._recorder.record("all_reduce", self.step, began, time.monotonic_ns(), bytes=sent_bytes)
        return result


def _padded(part: Tensor, length: int) -> Tensor:
    """Flatten a part, padded to the longest one: collectives send equal parts."""
    flat = part.reshape(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])


class ModelParallelRank(ABC):
    """A rank's part of the model and of A, by stages, by shards or by both; all ranks create it together.

    Args:
        rank_setup: the rank at the start of the run.
    """

    stages: list[StageSharding]
    """How each stage's part of A is divided among its shards."""
    layout: FlatLayout
    """Layout of this rank's part of A."""
    state: FlatState
    """Initial values of that part."""
    state_json: Mapping[str, Any] = MappingProxyType({})
    """What a run that goes on must have of it, for a checkpoint."""

    def __init__(self, rank_setup: RankSetup) -> None:
        self.run_context, self.context, self.mesh = rank_setup.run_context, rank_setup.context, rank_setup.mesh
        self.rank = self.context.world.rank
        self.place = self.mesh.coordinate(self.rank)
        self.replica = self.place.replica if rank_setup.replica is None else rank_setup.replica
        self.shard = self.mesh.shard(self.place)
        self.subgroups = SubGroups.of(self.mesh, self.context.communicator)
        self.whole = rank_setup.layout
        """Layout of A."""
        self._first_stage: Mapping[str, int] = {}
        """First stage of each parameter that several stages have."""

    @abstractmethod
    def worker(
        self, micro_steps: int, recorder: AnyRecorder, handoff: GradientHandoff | None = None, *, late: bool = False
    ) -> Pipelined | TensorParallel:
        """Create the replica that computes this rank's part of Δ.

        Args:
            micro_steps: batches in one Δ.
            recorder: of this rank's spans.
            handoff: receives the gradients, on the CPU; None: they are copied into the buffer of Δ.
            late: whether loss and finite stay on the device for now.
        """

    def stepping(self, inner: Replica, summed: Callable[[float], float]) -> ShardedLocalSGD:
        """Return this rank's part of a replica with an optimizer of its own.

        Args:
            inner: computes this rank's part of the gradient of one batch.
            summed: a number -> its sum over the ranks of the replica, which all ask for it together.
        """
        context, owned = self.run_context, owned_names(self.stages, self.mesh, self.place)
        return ShardedLocalSGD(
            context.job.program,
            inner,
            self.whole,
            self.state.empty_like(),
            owned,
            self.part_chunks(),
            summed,
            Exchange.of(context.delta, context.policy.adopt, self.whole, self.layout),
            distance=isinstance(context.delta, Distance),
        )

    def part_chunks(self) -> PartChunks:
        """Return what describes tensors of this rank's part."""
        return PartChunks(self.whole, self.stages[self.place.stage].placements, self.shard)

    def counted(self, *, of_each_copy: bool) -> list[str]:
        """Return the parameters that this rank counts in the norm of Δ, if a norm is needed; each counts on one rank.

        Args:
            of_each_copy: True if each replica of a stage counts them, as when each has a piece of Δ.
        """
        job, stage = self.run_context.job, self.place.stage
        needed = job.program.clip_norm is not None or job.noise_scale
        if not needed or (self.mesh.stage_replica(self.place).copy and not of_each_copy):
            return []
        placements = self.stages[stage].placements
        return [
            name
            for name in self.layout.parameter_names
            if self._first_stage.get(name, stage) == stage and is_counted_on(placements.get(name), self.shard)
        ]

    def names(self) -> set[str]:
        """Return the tensors of this rank's part that are written from it, by the first rank that has this part."""
        return names_of_part(self.stages, self.place.stage, self.shard)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        """Gather A from all ranks' parts, one after the other, where it is wanted; all ranks call it together."""
        communicator, spill = self.context.communicator, SpillAllocator()
        full = self.whole.new(spill.empty) if wanted else None
        written = set[str]()
        source, sent = 0, communicator.traffic.sent_bytes if communicator is not None else 0
        for stage in self.stages:
            # The first replica has the first ranks; of each of its stages, the first replica of the stage sends.
            for shard, layout in enumerate(stage.parts):
                # One part after the other: no rank needs memory for more than A and one part.
                part = self.state if source + shard == self.rank else layout.new(device=self.state.device)
                if communicator is not None:
                    for vector in part.vectors:
                        communicator.broadcast(vector, source + shard, "the gathering of A")
                names = {n for n, _ in part.named() if n not in written or isinstance(stage.placements.get(n), Shard)}
                if full is not None:
                    ShardViews(part, full, stage.placements, shard, names).put()
                    spill.settle()
                written |= names
            source += stage.copies * len(stage.parts)
        if communicator is not None:
            communicator.traffic.sent_bytes = sent  # it is for evaluation: not counted as training's
        return full


def free_unused(module: nn.Module, used: Sequence[nn.Module]) -> None:
    """Free the tensors of the whole model that are in none of the modules which this rank uses."""
    kept = {id(tensor) for part in used for tensor in tensors_of(part).values()}
    for tensor in tensors_of(module).values():
        if id(tensor) not in kept:
            tensor.data = tensor.data.new_empty(0)


@final
class TensorParallelRank(ModelParallelRank):
    """A rank's shard of the model."""

    def __init__(self, rank_setup: RankSetup) -> None:
        super().__init__(rank_setup)
        job, communicator = self.run_context.job, self.subgroups.shards
        assert communicator is not None, "a strategy with shards has several ranks"
        self.shards = ProcessGroupTP(communicator, self.shard)
        with extended_timeout(self.context):
            gather, rules = self.context.gather, job.strategy.shard_rules
            batch = first_batch(job)
            obtain = captured_once(job, self.context)
            self.prepared = prepare_shard(
                job.program, rank_setup.module, batch, self.shards, gather, rules, obtain=obtain
            )
            self._compiled = self._compile(batch) if job.strategy.compile else None
            self.placements = placements = self.prepared.shard.parameters
            """Placements of the tensors of A among the shards, by name."""
            if rank_setup.steps_on_parts:
                refuse_unless_elementwise(job.program.optimizer, self.whole, placements, self.shards.count)
        if self.context.communicator is not None:
            self.context.communicator.traffic.sent_bytes = 0  # those of preparation do not count as training's
        parts = [shard_layout(self.whole, placements, shard) for shard in range(self.shards.count)]
        self.stages, self.layout = [StageSharding(placements, parts)], parts[self.shard]
        self.state = read(self.prepared.shard.module, self.layout.new(device=self.run_context.device(self.rank)))
        free_unused(rank_setup.module, [self.prepared.shard.module])

    def worker(
        self, micro_steps: int, recorder: AnyRecorder, handoff: GradientHandoff | None = None, *, late: bool = False
    ) -> TensorParallel:
        self.shards.record_by(recorder)
        device, program, shards = self.run_context.device(self.rank), self.prepared.program, self.shards
        short: ShortSteps | None = None
        if torch.device(device) == CPU and self._compiled is None:
            module, autocast = self.prepared.shard.module, functools.partial(program.autocast, device)
            short = ShortSteps(module, shards, autocast, shards.uncounted)
        return TensorParallel(
            self.prepared,
            self.layout,
            self.replica,
            device,
            recorder=recorder,
            micro_steps=micro_steps,
            handoff=handoff,
            compiled=self._compiled,
            short=short,
            late=late,
        )

    def _compile(self, batch: Batch) -> CompiledPart:
        """Return the shard's compiled forward; all shards call it together."""
        program, module = self.prepared.program, self.prepared.shard.module
        device = next(module.parameters()).device
        leaves = [leaf.to(device) for leaf in self.prepared.captured.input_spec.flatten((batch.input, batch.target))]
        with program.autocast(str(device)):
            return CompiledPart(module, {shapes_of(leaves): leaves}, self.shards.uncounted)
