"""One rank of a pipeline: its parts of the model, made ready, and what computes Δ with them.

A model divided among the ranks of its pipeline, as one of them sees it.

What computes Δ on one rank of a pipeline.
"""

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
from paceline.engine.spmd.tensor_parallel_rank import GroupShards
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
class GroupCopies(StageReplicaGroup):
    """One rank's.

    Args:
        communicator: of the run, whose group has these copies alone; counts what is sent.
        copy: which of them this is.
    """

    def __init__(self, communicator: Communicator, copy: int) -> None:
        super().__init__(first=copy == 0)
        self._communicator, self._copy = communicator, copy

    def all_reduce(self, vector: Tensor, description: str) -> None:
        self._communicator.all_reduce([vector], f"{description}, from those who take turns with copy {self._copy}")


NORMS = ("running_mean", "running_var", "num_batches_tracked")
"""How the running statistics of a BatchNorm are called."""


class PipelineRank:
    """One rank's view; all ranks make it together.

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
        self.shards = None if shards is None else GroupShards(shards, self._shard)
        """Who share this rank's column; None: it has one for itself."""
        copies = self.subgroups.copies
        self.copies = None if copies is None else GroupCopies(copies, self._column.copy)
        """Who take turns at this rank's stage; None: nobody else does."""
        batch = first_batch(job)
        with extended_timeout(rank_setup.context):
            self.cut = prepare_cut(job.program, job.strategy, rank_setup.module, batch, self._agreement()).cut
            self.needs = part_dependencies(job.program, self.cut, rank_setup.module, batch)
            """Which parts need which."""
            held = [list(tensors_of(part.module)) for part in self.cut.parts]
            self._division = self._divided(rank_setup.module, batch)
        self.whole = rank_setup.layout
        """The layout of A."""
        self._refuse_running(held)
        self.stages = [self._stage(stage, held) for stage in range(len(self.mesh.stage_workers))]
        """How the part of A of each stage lies among its shards."""
        self.state = read(merged_module(self.parts), self.layout.new())
        """This rank's part of A_0."""
        if self.shards is not None:
            _let_go(rank_setup.module, self.parts)
        if rank_setup.context.communicator is not None:
            rank_setup.context.communicator.sent_bytes = 0

    @property
    def layout(self) -> FlatLayout:
        """Of this rank's part of A."""
        return self.stages[self.place.stage].parts[self._shard]

    @property
    def parts(self) -> list[Part]:
        """This rank's."""
        return [self._division.parts[number] for number in self._numbers(self.place.stage)]

    @property
    def shared(self) -> list[str]:
        """The parameters of which each shard of this stage has a term of the gradient."""
        return [name for name, how in self.stages[self.place.stage].lies.items() if how == PARTIAL_GRAD]

    def counted(self, *, of_each_copy: bool) -> list[str]:
        """The parameters that count here in the norm of Δ, if that is asked for: what several have counts once.

        Args:
            of_each_copy: whether those who take turns at a stage each count them, as where each has a piece of Δ.
        """
        job = self.run_context.job
        asked = job.program.clip_norm is not None or job.noise_scale
        if not asked or (self._column.copy and not of_each_copy):
            return []
        first = {name: min(self._stage_of(part) for part in parts) for name, parts in self.cut.tied.items()}
        stage, lies = self.place.stage, self.stages[self.place.stage].lies
        return [
            name
            for name in self.layout.parameter_names
            if first.get(name, stage) == stage and is_counted_on(lies.get(name), self._shard)
        ]

    def setup(self, recorder: AnyRecorder) -> PipelineSetup:
        """Return what this rank's part of a replica is made of, with a recorder for its spans."""
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
        """The stages that hold a parameter of several parts; of any other, none."""
        return sorted({self._stage_of(part) for part in self.cut.tied.get(name, ())})

    def _divided(self, module: nn.Module, batch: Batch) -> ShardedParts:
        """All parts, those of this rank rewritten as its shards."""
        job, parts = self.run_context.job, self.cut.parts
        workers = [self.mesh.shards(self._stage_of(part.number)) for part in parts]
        if max(workers) == 1:
            return ShardedParts(parts, tuple({} for _ in parts))
        own = {} if self.shards is None else dict.fromkeys(self._numbers(self.place.stage), self.shards)
        leaves, rules = self.cut.captured.flatten(first_rows(job.strategy, batch)), job.strategy.shard_rules
        request = ShardingRequest(job.program, self.cut, module, leaves, workers, rules)
        return shard_parts(request, own, self.context.gather)

    def _stage(self, stage: int, held: Sequence[Sequence[str]]) -> StageSharding:
        """Of all parts of a stage together; what two of them have lies the same way in both."""
        workers, numbers = self.mesh.shards(stage), self._numbers(stage)
        lies = {name: how for number in numbers for name, how in self._division.placements[number].items()}
        whole = self.whole.part({name for number in numbers for name in held[number]})
        if workers > 1 and self._steps_on_parts:
            refuse_unless_elementwise(self.run_context.job.program.optimizer, whole, lies, workers)
        parts = [shard_layout(whole, lies, shard) for shard in range(workers)]
        return StageSharding(lies, parts, self.mesh.stage_replicas.copies[stage])

    def _refuse_running(self, held: Sequence[Sequence[str]]) -> None:
        """Where several take turns, none sees all micro-batches in their order."""
        strategy = self.run_context.job.strategy
        running = {entry.name for block in self.whole.buffers for entry in block.entries}
        deferred = NORMS if strategy.batchnorm == "mini-batch" else ()
        for part, names in enumerate(held):
            count = strategy.copies[self._stage_of(part)]
            found = next((n for n in names if n in running and not n.endswith(deferred)), None)
            if count > 1 and found is not None:
                batchnorm = found.endswith(NORMS)
                other = "batchnorm=mini-batch, or " if batchnorm else ""
                raise InputError(
                    f"stages={list(strategy.copies)}: {found} of stage {self._stage_of(part)} moves with each "
                    f"micro-batch, in their order, but {count} take turns at them and each sees its own alone; write "
                    f"{other}stages={len(strategy.copies)}"
                )

    def _numbers(self, stage: int) -> list[int]:
        return [part.number for part in self.cut.parts if self._stage_of(part.number) == stage]

    def _stage_of(self, part: int) -> int:
        return self.order.worker_of(part, len(self.mesh.stage_workers))

    def _agreement(self) -> Agree:
        """What the first rank chooses; where there are too few cores for all, the others begin when it has chosen."""
        world = self.context.world
        if world.rank == 0:
            return lambda choose: self._said(choose())
        if world.local_size <= len(os.sched_getaffinity(0)):
            return lambda _: self._said(())
        said = self._said(())
        return lambda _: said

    def _said(self, mine: Boundaries) -> Boundaries:
        said: Boundaries = self.context.gather(mine, "where the model is cut")[0]
        return said


def _let_go(module: nn.Module, parts: Sequence[Part]) -> None:
    """Of the memory of what this rank has no part of, or a part that is its own."""
    kept = {id(tensor) for part in parts for tensor in tensors_of(part.module).values()}
    for tensor in tensors_of(module).values():
        if id(tensor) not in kept:
            tensor.data = tensor.data.new_empty(0)


def pipelined(pipeline: PipelineRank, micro_steps: int, recorder: AnyRecorder) -> Pipelined:
    """A rank's part of a replica.

    Args:
        pipeline: as this rank sees it.
        micro_steps: batches of one Δ.
        recorder: of this rank's spans.
    """
    partial_grads = None
    if pipeline.shards is not None:
        pipeline.shards.recorder = recorder
        partial_grads = PartialGrads(pipeline.shards, pipeline.layout, pipeline.shared)
    return Pipelined(pipeline.setup(recorder), micro_steps=micro_steps, partial_grads=partial_grads)
