"""One rank of a pipeline: its parts of the model and of A, its subgroups, and the replica that computes Δ with them."""

import os
from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.engine.run_context import first_batch
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankSetup, SubGroups, extended_timeout
from paceline.engine.spmd.shard_views import StageSharding
from paceline.engine.spmd.tensor_parallel_rank import ProcessGroupTP
from paceline.replica.base import Batch
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.hybrid import ShardedParts, ShardingRequest, shard_parts
from paceline.replica.module_utils import tensors_of
from paceline.replica.pipeline.base import NoP2P, Part, StageReplicaGroup
from paceline.replica.pipeline.comm_plan import CommPlan
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.pipeline_setup import PipelineSetup, WorkerId
from paceline.replica.pipeline.pipelined import Pipelined
from paceline.replica.pipeline.prepare import Agree, first_rows, part_dependencies, prepare_cut
from paceline.replica.pipeline.stage_runtime import merged_module
from paceline.replica.tensor.optimizer_check import refuse_unless_elementwise
from paceline.replica.tensor.placements import PARTIAL_GRAD, is_counted_on, shard_layout
from paceline.replica.tensor.tp_group import PartialGrads
from paceline.trace.recorder import AnyRecorder


@final
class ProcessGroupReplicas(StageReplicaGroup):
    """The replicas of one stage, over a process group of these alone.

    Args:
        communicator: of that group; counts the bytes.
        copy: number of this replica of the stage.
    """

    def __init__(self, communicator: Communicator, copy: int) -> None:
        super().__init__(first=copy == 0)
        self._communicator, self._copy = communicator, copy

    def all_reduce(self, vector: Tensor, description: str) -> None:
        self._communicator.all_reduce([vector], f"{description}, from the stage replicas next to replica {self._copy}")


NORMS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the running statistics of a BatchNorm."""


class PipelineRank:
    """A rank's parts of the model and of A; all ranks create it together.

    Args:
        rank_setup: the rank at the start of the run.
    """

    def __init__(self, rank_setup: RankSetup) -> None:
        self.run_context, self.context = rank_setup.run_context, rank_setup.context
        job, world = self.run_context.job, self.context.world
        self.mesh, self.order = rank_setup.mesh, job.strategy.order
        self._steps_on_parts = rank_setup.steps_on_parts
        self.rank, self.place = world.rank, self.mesh.coordinate(world.rank)
        self._replica = self.place.replica if rank_setup.replica is None else rank_setup.replica
        self.subgroups = SubGroups.of(self.mesh, rank_setup.context.communicator)
        shards = self.subgroups.shards
        self._column, self._shard = self.mesh.stage_replica(self.place), self.mesh.shard(self.place)
        self.shards = None if shards is None else ProcessGroupTP(shards, self._shard)
        """Collectives with the other shards of this stage; None: it has one shard."""
        copies = self.subgroups.copies
        self.copies = None if copies is None else ProcessGroupReplicas(copies, self._column.copy)
        """Collectives with the other replicas of this stage; None: it has one replica."""
        batch = first_batch(job)
        with extended_timeout(rank_setup.context):
            self.cut = prepare_cut(job.program, job.strategy, rank_setup.module, batch, self._agreement()).cut
            self.needs = part_dependencies(job.program, self.cut, rank_setup.module, batch)
            """Parts whose values each part needs."""
            held = [list(tensors_of(part.module)) for part in self.cut.parts]
            self._division = self._divided(rank_setup.module, batch)
        self.whole = rank_setup.layout
        """Layout of A."""
        self._refuse_running(held)
        self.stages = [self._stage(stage, held) for stage in range(len(self.mesh.stage_workers))]
        """How each stage's part of A is divided among its shards."""
        self.state = read(merged_module(self.parts), self.layout.new())
        """Initial values of this rank's part of A."""
        if self.shards is not None:
            _free_unused(rank_setup.module, self.parts)
        if rank_setup.context.communicator is not None:
            rank_setup.context.communicator.sent_bytes = 0

    @property
    def layout(self) -> FlatLayout:
        """Layout of this rank's part of A."""
        return self.stages[self.place.stage].parts[self._shard]

    @property
    def parts(self) -> list[Part]:
        """This rank's parts of the model."""
        return [self._division.parts[number] for number in self._numbers(self.place.stage)]

    @property
    def shared(self) -> list[str]:
        """Names of the parameters of which each shard of this stage computes a term of the gradient."""
        return [
            name for name, placement in self.stages[self.place.stage].placements.items() if placement == PARTIAL_GRAD
        ]

    def counted(self, *, of_each_copy: bool) -> list[str]:
        """Return the parameters that this rank counts in the norm of Δ, if a norm is needed; each counts on one rank.

        Args:
            of_each_copy: True if each replica of a stage counts them, as when each has a piece of Δ.
        """
        job = self.run_context.job
        needed = job.program.clip_norm is not None or job.noise_scale
        if not needed or (self._column.copy and not of_each_copy):
            return []
        first = {name: min(self._stage_of(part) for part in parts) for name, parts in self.cut.tied.items()}
        stage, placements = self.place.stage, self.stages[self.place.stage].placements
        return [
            name
            for name in self.layout.parameter_names
            if first.get(name, stage) == stage and is_counted_on(placements.get(name), self._shard)
        ]

    def setup(self, recorder: AnyRecorder) -> PipelineSetup:
        """Return the components of this rank's part of a replica; ``recorder`` records its spans."""
        job, communicator = self.run_context.job, self.context.communicator
        strategy = job.strategy
        return PipelineSetup(
            job.program,
            CommPlan.of(self.cut, self.order, strategy.stage_count, strategy.micro_batch_count, strategy.copies),
            self.cut.captured,
            self.parts,
            WorkerId(self._replica, self.mesh.stage_replicas.number(self._column), self.run_context.device(self.rank)),
            self.layout,
            NoP2P() if communicator is None else ProcessGroupP2P(communicator, Routes(self.mesh, self.place)),
            recorder,
            strategy.recompute,
            strategy.batchnorm,
            self.copies,
        )

    def holders(self, name: str) -> list[int]:
        """Return the stages that hold a parameter of several parts; none for any other parameter."""
        return sorted({self._stage_of(part) for part in self.cut.tied.get(name, ())})

    def _divided(self, module: nn.Module, batch: Batch) -> ShardedParts:
        """Return all parts, those of this rank rewritten as its shards."""
        job, parts = self.run_context.job, self.cut.parts
        workers = [self.mesh.shards(self._stage_of(part.number)) for part in parts]
        if max(workers) == 1:
            return ShardedParts(parts, tuple({} for _ in parts))
        own = {} if self.shards is None else dict.fromkeys(self._numbers(self.place.stage), self.shards)
        leaves, rules = self.cut.captured.flatten(first_rows(job.strategy, batch)), job.strategy.shard_rules
        request = ShardingRequest(job.program, self.cut, module, leaves, workers, rules)
        return shard_parts(request, own, self.context.gather)

    def _stage(self, stage: int, held: Sequence[Sequence[str]]) -> StageSharding:
        """Return the sharding of all parts of a stage; a tensor of two of them has the same placement in both."""
        workers, numbers = self.mesh.shards(stage), self._numbers(stage)
        placements = {name: each for number in numbers for name, each in self._division.placements[number].items()}
        whole = self.whole.part({name for number in numbers for name in held[number]})
        if workers > 1 and self._steps_on_parts:
            refuse_unless_elementwise(self.run_context.job.program.optimizer, whole, placements, workers)
        parts = [shard_layout(whole, placements, shard) for shard in range(workers)]
        return StageSharding(placements, parts, self.mesh.stage_replicas.copies[stage])

    def _refuse_running(self, held: Sequence[Sequence[str]]) -> None:
        """Refuse running buffers in a replicated stage: none of its replicas sees all micro-batches in their order."""
        strategy = self.run_context.job.strategy
        running = {entry.name for block in self.whole.buffers for entry in block.entries}
        deferred = NORMS if strategy.batchnorm == "mini-batch" else ()
        for part, names in enumerate(held):
            count = strategy.copies[self._stage_of(part)]
            name = next((n for n in names if n in running and not n.endswith(deferred)), None)
            if count > 1 and name is not None:
                other = "batchnorm=mini-batch, or " if name.endswith(NORMS) else ""
                raise InputError(
                    f"stages={list(strategy.copies)}: {name} of stage {self._stage_of(part)} moves with each "
                    f"micro-batch, in their order, but {count} take turns at them and each sees its own alone; write "
                    f"{other}stages={len(strategy.copies)}"
                )

    def _numbers(self, stage: int) -> list[int]:
        return [part.number for part in self.cut.parts if self._stage_of(part.number) == stage]

    def _stage_of(self, part: int) -> int:
        return self.order.worker_of(part, len(self.mesh.stage_workers))

    def _agreement(self) -> Agree:
        """Return how all ranks agree on rank 0's partition; if cores are few, the others start after it has chosen."""
        world = self.context.world
        if world.rank == 0:
            return lambda choose: self._first_choice(choose())
        if world.local_size <= len(os.sched_getaffinity(0)):
            return lambda _: self._first_choice(())
        chosen = self._first_choice(())
        return lambda _: chosen

    def _first_choice(self, own: Boundaries) -> Boundaries:
        chosen: Boundaries = self.context.gather(own, "where the model is cut")[0]
        return chosen


def _free_unused(module: nn.Module, parts: Sequence[Part]) -> None:
    """Free the tensors of the whole model that this rank's parts do not use."""
    kept = {id(tensor) for part in parts for tensor in tensors_of(part.module).values()}
    for tensor in tensors_of(module).values():
        if id(tensor) not in kept:
            tensor.data = tensor.data.new_empty(0)


def pipelined(pipeline: PipelineRank, micro_steps: int, recorder: AnyRecorder) -> Pipelined:
    """Create this rank's part of a replica, which computes Δ.

    Args:
        pipeline: this rank's parts.
        micro_steps: batches in one Δ.
        recorder: records this rank's spans.
    """
    partial_grads = None
    if pipeline.shards is not None:
        pipeline.shards.record_by(recorder)
        partial_grads = PartialGrads(pipeline.shards, pipeline.layout, pipeline.shared)
    return Pipelined(pipeline.setup(recorder), micro_steps=micro_steps, partial_grads=partial_grads)
