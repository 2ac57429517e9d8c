"""One rank of a pipeline: its parts of the model and of A, its subgroups, and the replica that computes Δ with them."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.device import CPU
from paceline.engine.run_context import first_batch
from paceline.engine.spmd.capturing import share_of
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankSetup, extended_timeout
from paceline.engine.spmd.shard_views import StageSharding
from paceline.engine.spmd.tensor_parallel_rank import ModelParallelRank, ProcessGroupTP, free_unused
from paceline.replica.autograd import GradientHandoff
from paceline.replica.base import Batch
from paceline.replica.capture.input_spec import shapes_of
from paceline.replica.compilation import CompiledPart
from paceline.replica.flat_state import read
from paceline.replica.hybrid import ShardedParts, ShardingRequest, shard_parts
from paceline.replica.module_utils import tensors_of
from paceline.replica.pipeline.comm_plan import CommPlan, PipelineContext
from paceline.replica.pipeline.micro_batches import micro_batch_sizes, select_rows
from paceline.replica.pipeline.p2p_queue import StageReplicaGroup
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.pipelined import Pipelined
from paceline.replica.pipeline.prepare import (
    Agree,
    first_rows,
    part_arguments,
    part_dependencies,
    prepare_cut,
)
from paceline.replica.pipeline.stage_runtime import merged_module
from paceline.replica.tensor.optimizer_check import refuse_unless_elementwise
from paceline.replica.tensor.placements import PARTIAL_GRAD, shard_layout
from paceline.replica.tensor.tp_group import PartialGrads
from paceline.schedule.dependencies import Dependencies
from paceline.strategy import Strategy
from paceline.trace.recorder import AnyRecorder

# Key of the cut among what a checkpoint has of the engine.
_CUT = "cut"


def _cut_options(strategy: Strategy) -> str:
    """Return the options of a strategy that a cut depends on, besides measured times."""
    options = strategy.stages, strategy.shards, strategy.schedule, strategy.micro_batch_count, strategy.cuts
    return str((*options, strategy.stage_memory_bytes))


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


# Names of the running statistics of a BatchNorm.
NORMS = ("running_mean", "running_var", "num_batches_tracked")


@final
class PipelineRank(ModelParallelRank):
    """A rank's parts of the model, each maybe a shard of it."""

    def __init__(self, rank_setup: RankSetup) -> None:
        super().__init__(rank_setup)
        job, module, mesh, self._kept = self.run_context.job, rank_setup.module, self.mesh, rank_setup.kept
        self.order, self._steps_on_parts = job.strategy.order, rank_setup.steps_on_parts
        self._column = mesh.stage_replica(self.place)
        shards, copies = self.subgroups.shards, self.subgroups.copies
        self.shards = None if shards is None else ProcessGroupTP(shards, self.shard)
        """Collectives with the other shards of this stage; None: it has one shard."""
        self.copies = None if copies is None else ProcessGroupReplicas(copies, self._column.copy)
        """Collectives with the other replicas of this stage; None: it has one replica."""
        batch = first_batch(job)
        with extended_timeout(self.context):
            share = share_of(job, self.context)
            prepared = prepare_cut(job.program, job.strategy, module, batch, self._agreement(), share)
            self.cut = prepared.cut
            # Rank 0 runs the parts for that while another one verifies the cut.
            own = part_dependencies(job.program, self.cut, module, batch) if self.context.world.rank == 0 else None
            needs: Dependencies = self.context.gather(own, "which parts of the model need which")[0]
            self.needs = needs
            """Parts whose values each part needs."""
            self._stage_of = [self.order.worker_of(p.number, len(mesh.stage_workers)) for p in self.cut.parts]
            names = [list(tensors_of(part.module)) for part in self.cut.parts]
            division = self._shard_parts(module, batch)
        self.state_json = {_CUT: {"of": _cut_options(job.strategy), "boundaries": list(prepared.boundaries)}}
        self.holders = {n: sorted({self._stage_of[p] for p in parts}) for n, parts in self.cut.tied.items()}
        """The stages that have a parameter of several parts, by its name."""
        self._first_stage = {name: stages[0] for name, stages in self.holders.items()}
        self._refuse_running(names)
        self.stages = [self._sharding(stage, names, division) for stage in range(len(mesh.stage_workers))]
        self.layout = self.stages[self.place.stage].parts[self.shard]
        self.parts = [division.parts[number] for number in self._numbers(self.place.stage)]
        """This rank's parts of the model."""
        self.state = read(merged_module(self.parts), self.layout.new(device=self.run_context.device(self.rank)))
        self._compiled = self._compile(module, batch, division) if job.strategy.compile else {}
        if self.shards is not None:
            free_unused(module, [part.module for part in self.parts])
        if self.context.communicator is not None:
            self.context.communicator.traffic.sent_bytes = 0  # those of preparation do not count as training's

    def worker(
        self, micro_steps: int, recorder: AnyRecorder, handoff: GradientHandoff | None = None, *, late: bool = False
    ) -> Pipelined:
        partial_grads = None
        if self.shards is not None:
            self.shards.record_by(recorder)
            placements = self.stages[self.place.stage].placements
            # Each shard of this stage computes a term of the gradient of these.
            partial = [name for name, placement in placements.items() if placement == PARTIAL_GRAD]
            partial_grads = PartialGrads(self.shards, self.layout, partial)
        context = self.pipeline_context(recorder)
        return Pipelined(context, micro_steps=micro_steps, partial_grads=partial_grads, handoff=handoff, late=late)

    def pipeline_context(self, recorder: AnyRecorder) -> PipelineContext:
        """Return the components of this rank's part of a replica; ``recorder`` records its spans."""
        job, communicator = self.run_context.job, self.context.communicator
        strategy, replicas = job.strategy, self.mesh.stage_replicas
        p2p, device = None, self.run_context.device(self.rank)
        if communicator is not None:
            # NCCL has the messages of two ranks in one order, and a stage asks for the next ones before it sends.
            backward = communicator if communicator.device == CPU else communicator.again()
            p2p = ProcessGroupP2P(communicator, Routes(self.mesh, self.place), torch.device(device), backward)
        return PipelineContext(
            job.program,
            CommPlan.of(self.cut, self.order, replicas, strategy.micro_batch_count),
            self.cut.captured,
            self.parts,
            self.layout,
            replicas.number(self._column),
            self.replica,
            device,
            p2p,
            recorder,
            strategy.recompute,
            strategy.batchnorm,
            self.copies,
            self._compiled,
        )

    def _numbers(self, stage: int) -> list[int]:
        """Return the numbers of a stage's parts."""
        return [number for number, each in enumerate(self._stage_of) if each == stage]

    def _shard_parts(self, module: nn.Module, batch: Batch) -> ShardedParts:
        """Return all parts, those of this rank rewritten as its shards."""
        job, parts = self.run_context.job, self.cut.parts
        workers = [self.mesh.shards(stage) for stage in self._stage_of]
        if max(workers) == 1:
            return ShardedParts(parts, tuple({} for _ in parts))
        own = {} if self.shards is None else dict.fromkeys(self._numbers(self.place.stage), self.shards)
        leaves, rules = self.cut.captured.flatten(first_rows(job.strategy, batch)), job.strategy.shard_rules
        request = ShardingRequest(job.program, self.cut, module, leaves, workers, rules)
        return shard_parts(request, own, self.context.gather)

    def _compile(self, module: nn.Module, batch: Batch, division: ShardedParts) -> dict[int, CompiledPart]:
        """Return the compiled forward of each part of this rank; all shards of a stage call it together."""
        program, count = self.run_context.job.program, self.run_context.job.strategy.micro_batch_count
        sizes = sorted(set(micro_batch_sizes(batch.samples, count)), reverse=True)
        flatten = self.cut.captured.flatten
        with extended_timeout(self.context), program.autocast(str(next(module.parameters()).device)):
            rows = [flatten(select_rows(batch.input, batch.samples, slice(size))) for size in sizes]
            batches = {shapes_of(leaves): part_arguments(self.cut, module, leaves) for leaves in rows}
            compiled = {}
            for number, part in ((part.number, part.module) for part in self.parts):
                comparing = self.shards.uncounted if self.shards and division.placements[number] else None
                arguments = {shapes: each[number] for shapes, each in batches.items()}
                compiled[number] = CompiledPart(part, arguments, comparing)
            return compiled

    def _sharding(self, stage: int, names: Sequence[Sequence[str]], division: ShardedParts) -> StageSharding:
        """Return the sharding of all parts of a stage; a tensor of two of them has the same placement in both."""
        workers, numbers = self.mesh.shards(stage), self._numbers(stage)
        placements = {name: each for number in numbers for name, each in division.placements[number].items()}
        whole = self.whole.part({name for number in numbers for name in names[number]})
        if workers > 1 and self._steps_on_parts:
            refuse_unless_elementwise(self.run_context.job.program.optimizer, whole, placements, workers)
        parts = [shard_layout(whole, placements, shard) for shard in range(workers)]
        return StageSharding(placements, parts, self.mesh.stage_replicas.copies[stage])

    def _refuse_running(self, tensors: Sequence[Sequence[str]]) -> None:
        """Refuse running buffers in a replicated stage: none of its replicas sees all micro-batches in their order."""
        strategy = self.run_context.job.strategy
        running = {entry.name for block in self.whole.buffers for entry in block.entries}
        deferred = NORMS if strategy.batchnorm == "mini-batch" else ()
        for part, names in enumerate(tensors):
            count = strategy.copies[self._stage_of[part]]
            name = next((n for n in names if n in running and not n.endswith(deferred)), None)
            if count > 1 and name is not None:
                other = "batchnorm=mini-batch, or " if name.endswith(NORMS) else ""
                raise InputError(
                    f"stages={list(strategy.copies)}: {name} of stage {self._stage_of[part]} moves with each "
                    f"micro-batch, in their order, but {count} take turns at them and each sees its own alone; write "
                    f"{other}stages={len(strategy.copies)}"
                )

    def _agreement(self) -> Agree:
        """Return how all ranks agree on rank 0's partition; the others wait while it measures.

        A run that goes on keeps the cut that it had, and so does a replica whose workers were replaced: measured times
        might say another, and dropout draws by stage.
        """
        job = self.run_context.job
        resumed = job.resume.run.engine if job.resume is not None and job.resume.options else {}
        saved = self._kept.get(_CUT) or resumed.get(_CUT) or {}
        if saved.get("of") == _cut_options(job.strategy):
            return lambda _: tuple(saved["boundaries"])

        def first_choice(own: Boundaries) -> Boundaries:
            chosen: Boundaries = self.context.gather(own, "where the model is cut")[0]
            return chosen

        first = self.context.world.rank == 0
        return lambda choose: first_choice(choose() if first else ())
