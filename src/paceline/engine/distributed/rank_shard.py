"""What one rank holds of A, and how it takes part in the updates: whole, by stages, or by shards.

What one rank has of A, and how it takes part in the updates: the contract, and the plainest way.

What a rank has of A where a replica has stages: what its own stages need.

What a rank has of A where operators are divided among ranks: its part of each parameter.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import final

from paceline.aggregation import Synchronous
from paceline.compression import parse
from paceline.core.mesh import Coordinate
from paceline.engine.distributed.fsdp import FsdpModule, FsdpReplica, FsdpShard, only_buffers
from paceline.engine.distributed.norms import DeltaNorms, NoiseObserver
from paceline.engine.distributed.overlap import Overlap, overlapped
from paceline.engine.distributed.pipeline_sync import PartUpdate, PipelineSync
from paceline.engine.distributed.reduce_buffer import GradientSync, ReduceBuffer, StatusSync
from paceline.engine.distributed.sync_batchnorm import BatchNormGroup, SynchronisedBatchNorm
from paceline.engine.distributed.update import CompressedUpdate, ReplicatedUpdate, ShardState, Update, all_of
from paceline.engine.distributed.zero1 import ZeroOptimizer, pays
from paceline.engine.noise_scale import NoiseAccumulator
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.pipeline_rank import PipelineRank, pipelined
from paceline.engine.spmd.rank_context import RankSetup, SubGroup, holders
from paceline.engine.spmd.shard_views import FullStateGather
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.replica.base import Replica, micro_steps
from paceline.replica.flat_state import FlatState, read
from paceline.replica.single import Autograd, worthwhile
from paceline.replica.tensor.placements import is_counted_on
from paceline.trace.recorder import AnyRecorder


def stepping(
    rank_setup: RankSetup,
    held: ShardState,
    freight: ReduceBuffer,
    peers: Communicator | None,
    *,
    by_tensor: bool = False,
) -> tuple[Update, PipelineSync]:
    """What makes updates here, and the exchange before them; all ranks make it together.

    Args:
        rank_setup: the rank at the start of the run.
        held: its part of A.
        freight: what it brings.
        peers: by which those meet who have the same part in other replicas; None: there is one replica.
        by_tensor: whether gradients may stay outside the freight.
    """
    job, mesh, rank, communicator = (
        rank_setup.run_context.job,
        rank_setup.mesh,
        rank_setup.context.world.rank,
        rank_setup.context.communicator,
    )
    if communicator is None or not job.strategy.shard_optimizer:
        norms = DeltaNorms(job, freight.state, held.counted, held.whole) if job.noise_scale else None
        clipped = held.counted if job.program.clip_norm is not None else ()
        exchange = PipelineSync(freight, freight.vectors, clipped, mesh, rank, communicator, peers, norms=norms)
        update = PartUpdate(job.program, freight, held, exchange, by_tensor=by_tensor and norms is None)
        if norms is not None:
            norms.measure_by(update.stepper)
        return update, exchange
    subgroup = holders(mesh, rank, communicator, peers)
    divided = ZeroOptimizer(job.program, freight, held, subgroup, communicator)
    first = mesh.column(mesh.place(rank)).copy == 0  # each copy of a stage has the whole Δ of its replica
    exchange = PipelineSync(
        freight, divided.reduced_vectors, (), mesh, rank, communicator, subgroup.communicator, brings=first
    )
    return divided, exchange


class RankShard(ABC):
    """One rank's.

    Args:
        place: where it is among all workers.
        state: what its replica reads of A.
        freight: what it brings when ranks meet.
        update: its part in each update.
        overlap: what sends Δ during the backward pass; None where it is sent after it.
        meeting: where layers look at all ranks' samples; None where there is no such layer, or nobody else.
        divided: parameters that all ranks have to gather; None: this one has what it needs.
        noise: what is told of it; None: nobody has asked.
    """

    def __init__(
        self,
        place: Coordinate,
        state: FlatState,
        freight: ReduceBuffer,
        update: Update,
        *,
        overlap: Overlap | None = None,
        batchnorm_group: BatchNormGroup | None = None,
        fsdp: FsdpModule | None = None,
        noise: NoiseObserver | None = None,
    ) -> None:
        self.coordinate, self.state, self.reduce_buffer, self.update = place, state, freight, update
        self.overlap, self.batchnorm_group, self.fsdp, self.noise = overlap, batchnorm_group, fsdp, noise

    @property
    @abstractmethod
    def parameter_bytes(self) -> int:
        """Of the parameters that this rank keeps."""

    @property
    @abstractmethod
    def peak_saved_bytes(self) -> int | None:
        """The most that was kept for backward at one time; None: it is not counted."""

    @abstractmethod
    def status_sync(self) -> StatusSync:
        """Where this rank meets the others."""

    @abstractmethod
    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        """What computes Δ here.

        Args:
            weigh: what a Δ of so many samples counts in the sum.
            recorder: of this rank's spans.
        """

    @abstractmethod
    def notes(self) -> Mapping[str, str | int | float]:
        """What a reader of the figures should know."""


@final
class WholeModelShard(RankShard):
    """All of A, or of each parameter a part."""

    def __init__(self, rank_setup: RankSetup) -> None:
        setup, context = rank_setup.run_context, rank_setup.context
        job, self._module, self._layout = rank_setup.run_context.job, rank_setup.module, rank_setup.layout
        whole = read(rank_setup.module, rank_setup.layout.new())
        divided = None
        if context.communicator is not None and job.strategy.shard_parameters:  # with nobody else there they stay whole
            divided = FsdpModule(rank_setup.module, rank_setup.layout, context.world.size, context.communicator)
        state = whole if divided is None else only_buffers(whole)
        freight = ReduceBuffer(state.layout, context.world.size, norms=job.noise_scale)
        update = _update(rank_setup, divided, freight, state)
        noise = _noise(rank_setup, freight, update) if job.noise_scale else None
        meeting = _meeting(rank_setup, divided)
        at_once = isinstance(update, ReplicatedUpdate) and meeting is None and job.on_nonfinite != "skip"
        if job.noise_scale:  # each gradient is looked at as it is handed over, on the host
            at_once &= job.strategy.accumulate == 1 and job.strategy.device == "cpu"
        overlap = overlapped(job, context, rank_setup.backend, freight) if at_once else None
        place = Coordinate(context.world.rank)
        super().__init__(
            place, state, freight, update, overlap=overlap, batchnorm_group=meeting, fsdp=divided, noise=noise
        )
        self._setup, self._context = setup, context

    @property
    def parameter_bytes(self) -> int:
        return self._layout.parameter_bytes if self.fsdp is None else self.fsdp.nbytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return None

    def status_sync(self) -> StatusSync:
        vectors = self.update.reduced_vectors if self.overlap is None else self.reduce_buffer.tails
        return GradientSync(self.reduce_buffer, vectors, self._context.world.rank, self._context.communicator)

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        setup, rank, module = self._setup, self.coordinate.replica, self._module
        if self.fsdp is None:
            return setup.replica(rank, module, self._layout, recorder)
        autograd = Autograd(setup.job.program, module, self.state.layout, rank, setup.device(rank), recorder)
        return FsdpReplica(autograd, self.fsdp, weigh)

    def notes(self) -> Mapping[str, str | int | float]:
        ranks, size = self._context.world.size, self._layout.parameter_bytes
        rules: dict[str, str | int | float] = {
            "shard_optimizer": isinstance(self.update, ZeroOptimizer),
            "buckets": self.overlap.buckets if self.overlap is not None else 0,
            "payload_ring_formula_bytes_per_step": ranks * ring_bytes(size, ranks),
        }
        if self.fsdp is not None:  # gathered for forward, gathered for backward, and gradients summed
            rules["payload_sharded_formula_bytes_per_step"] = 3 * (ranks - 1) * size * self._setup.per_step
        return rules


def _update(rank_setup: RankSetup, divided: FsdpModule | None, freight: ReduceBuffer, state: FlatState) -> Update:
    """How updates are made."""
    job, context, communicator = rank_setup.run_context.job, rank_setup.context, rank_setup.context.communicator
    if communicator is not None and divided is not None:
        return FsdpShard(job.program, divided, freight, state, communicator)
    if communicator is not None and _divides(rank_setup):
        return ZeroOptimizer(
            job.program, freight, all_of(state), SubGroup(communicator, context.world.rank), communicator
        )
    owner = ServerOptimizer(job.program, rank_setup.run_context.policy, state)
    if communicator is None or job.strategy.compression == "none":
        return ReplicatedUpdate(freight, owner)
    return CompressedUpdate(freight, owner, parse(job.strategy.compression), communicator)


def _noise(rank_setup: RankSetup, freight: ReduceBuffer, update: Update) -> NoiseObserver:
    assert isinstance(update, ReplicatedUpdate), "another update was not refused"
    norms = DeltaNorms(rank_setup.run_context.job, freight.state, rank_setup.layout.parameter_names, rank_setup.layout)
    norms.measure_by(update.stepper)
    return NoiseObserver(NoiseAccumulator(rank_setup.run_context.reference_batch), norms, lambda _: norms.together())


def _divides(rank_setup: RankSetup) -> bool:
    """Whether each rank keeps a part of the optimizer's state."""
    job = rank_setup.run_context.job
    if job.strategy.shard_optimizer is not None:
        return job.strategy.shard_optimizer
    apart = job.strategy.compression == "none" and job.strategy.device == "cpu" and not job.noise_scale
    return apart and pays(job.program, rank_setup.layout, rank_setup.backend, rank_setup.context.world.size)


def _meeting(rank_setup: RankSetup, divided: FsdpModule | None) -> BatchNormGroup | None:
    communicator, world = rank_setup.context.communicator, rank_setup.context.world
    if communicator is None or not any(isinstance(m, SynchronisedBatchNorm) for m in rank_setup.module.modules()):
        return None
    policy = rank_setup.run_context.policy
    added = isinstance(policy, Synchronous) and policy.combine == "sum"
    summed = rank_setup.run_context.job.strategy.accumulate > 1 or added or divided is not None
    return BatchNormGroup(communicator, world.rank, world.size, summed=summed)


@final
class StageShard(RankShard):
    """One rank's."""

    def __init__(self, rank_setup: RankSetup) -> None:
        self._pipeline = pipeline = PipelineRank(rank_setup)
        state, divides = pipeline.state, bool(rank_setup.run_context.job.strategy.shard_optimizer)
        gather = FullStateGather(state, pipeline.whole, pipeline.stages, pipeline.rank, rank_setup.context.communicator)
        held = ShardState(state, pipeline.whole, pipeline.counted(of_each_copy=divides), gather)
        freight = ReduceBuffer(state.layout, ranks=pipeline.mesh.replicas)
        update, self._exchange = stepping(rank_setup, held, freight, pipeline.subgroups.peers)
        super().__init__(pipeline.place, state, freight, update, noise=self._exchange.noise(rank_setup.run_context))

    @property
    def parameter_bytes(self) -> int:
        return self.state.layout.parameter_bytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._replica.peak_saved_bytes

    def status_sync(self) -> StatusSync:
        return self._exchange

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weigh  # Δ is scaled when all of it is there
        self._replica = pipelined(self._pipeline, micro_steps(self._pipeline.run_context.delta), recorder)
        return self._replica

    def notes(self) -> Mapping[str, str | int | float]:
        count = self._pipeline.run_context.job.strategy.micro_batch_count
        needs = self._pipeline.needs
        return {
            "micro_batches": count,
            "parts": needs.parts,
            "parts_need": str(needs),
            "shard_optimizer": isinstance(self.update, ZeroOptimizer),
        }


@final
class TensorParallelShard(RankShard):
    """One rank's."""

    def __init__(self, rank_setup: RankSetup) -> None:
        self._sharding = sharding = TensorParallelRank(rank_setup)
        mesh, rank, communicator = sharding.mesh, sharding.rank, rank_setup.context.communicator
        state, place = sharding.state, sharding.place
        job = rank_setup.run_context.job
        names = state.layout.parameter_names if job.program.clip_norm is not None or job.noise_scale else ()
        counted = [name for name in names if is_counted_on(sharding.lies.get(name), place.shard)]
        gather = FullStateGather(state, sharding.whole, sharding.stages, rank, communicator)
        held, freight = (
            ShardState(state, sharding.whole, counted, gather),
            ReduceBuffer(state.layout, ranks=mesh.replicas),
        )
        by_tensor = mesh.replicas == 1 and rank_setup.run_context.device(rank) == "cpu" and worthwhile(state.layout)
        update, self._exchange = stepping(rank_setup, held, freight, sharding.subgroups.peers, by_tensor=by_tensor)
        self._loose = update.loose if isinstance(update, PartUpdate) else None
        super().__init__(place, state, freight, update, noise=self._exchange.noise(rank_setup.run_context))

    @property
    def parameter_bytes(self) -> int:
        return self.state.layout.parameter_bytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._replica.peak_saved_bytes

    def status_sync(self) -> StatusSync:
        return self._exchange

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weigh  # Δ is scaled when all of it is there
        self._replica = self._sharding.worker(micro_steps(self._sharding.run_context.delta), recorder, self._loose)
        return self._replica

    def notes(self) -> Mapping[str, str | int | float]:
        sharding = self._sharding
        return {
            "shards": sharding.shards.count,
            "planned_bytes_per_step": sharding.prepared.plan.cost.sent_bytes,
            "shard_optimizer": isinstance(self.update, ZeroOptimizer),
        }
