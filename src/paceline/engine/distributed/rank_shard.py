"""The part of A that one rank has, and everything that updates it; here all of A, or a part of each parameter."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn

from paceline.aggregation import text_of
from paceline.comm.shm.process_group import NAME as SHM
from paceline.compression import parse
from paceline.core.errors import InputError
from paceline.core.mesh import Coordinate
from paceline.core.types import Version
from paceline.device import CPU
from paceline.engine.distributed.exchange import GradientSync, ModelParallelSync, Turns
from paceline.engine.distributed.fsdp import FsdpModule
from paceline.engine.distributed.fsdp_replica import FsdpReplica, FsdpUpdate
from paceline.engine.distributed.gradient_buckets import GradientBuckets
from paceline.engine.distributed.held_tensors import HeldTensors, among, zero_tensors
from paceline.engine.distributed.kept_residuals import KeptResiduals
from paceline.engine.distributed.norms import DeltaNorms, NoiseObserver
from paceline.engine.distributed.overlap import build_overlap
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.shared_parameters import SharedParameters
from paceline.engine.distributed.sync_batchnorm import BatchNormGroup, SynchronisedBatchNorm
from paceline.engine.distributed.update import ReplicatedUpdate, ShardState, Update
from paceline.engine.distributed.zero1 import ZeroOptimizer, pays
from paceline.engine.own_states import KEY, replica_chunks
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.communicator import ring_bytes
from paceline.engine.spmd.rank_context import RankSetup, SubGroup
from paceline.engine.spmd.shard_views import PartChunks
from paceline.replica.autograd import Autograd
from paceline.replica.base import Replica
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.local_sgd import KeepsState, LocalSGD, autograd_of
from paceline.replica.noise_estimator import Preconditioner
from paceline.replica.operator_list import WARM_S
from paceline.replica.own_parameters import Exchange
from paceline.replica.pipeline.async_stage import AsyncStage
from paceline.replica.pipeline.pipelined import Pipelined
from paceline.replica.single import Single
from paceline.replica.tensor.runtime import TensorParallel
from paceline.trace.recorder import AnyRecorder


class RankShard(ABC):
    """One rank's part of A with its reduce buffer, its exchange and its update; subclasses build them."""

    coordinate: Coordinate
    """Of this rank among all workers."""
    state: FlatState
    """The part of A that this rank's replica reads."""
    shared: SharedParameters | None = None
    """A in memory that other ranks share, which has :attr:`state`; None: it is this rank's own."""
    trained: nn.Module | None = None
    """The model that the replica trains, where it is the program's; None: it has a part of it."""
    autograd: Autograd | None = None
    """Computes the gradients of that model, once the replica is built."""
    reduce_buffer: ReduceBuffer
    contribution: ReduceBuffer | None = None
    """This rank's Δ, if it is kept until a round is complete everywhere; None: it is in the reduce buffer."""
    status_sync: GradientSync | ModelParallelSync | None = None
    """The exchange of a step; None: the rank's client exchanges statuses asynchronously."""
    update: Update
    parameter_bytes: int
    """Bytes of parameters on this rank."""
    full_state: Callable[..., FlatState | None]
    """Returns a copy of A where it is ``wanted``, None elsewhere; all ranks call it together."""
    read_version: Callable[[Version], Version] | None = None
    """Number of a Δ -> how many updates the A that it reads has had; None: as many as where the policy sends it."""
    worker: AsyncStage | Pipelined | TensorParallel | None = None
    """The replica's part on this rank, once it is built, if it has several ranks."""
    overlap: GradientBuckets | None = None
    """Takes the gradients of Δ one by one; None: they are in the reduce buffer when the exchange begins."""
    batchnorm_group: BatchNormGroup | None = None
    """Ranks whose samples BatchNorm layers normalise together; None: each rank alone."""
    fsdp: FsdpModule | None = None
    """Parameters that all ranks gather in each pass; None: this rank has those that it needs."""
    state_json: Mapping[str, Any] = MappingProxyType({})
    """What a run that goes on must have of the division into parts, for a checkpoint."""
    noise: NoiseObserver | None = None
    """None: the gradient noise scale is not measured."""
    own: KeepsState | None = None
    """The replica, once it is built, where it keeps a state of its own from Δ to Δ that checkpoints have."""
    takes_over: Exchange | None = None
    """How its parameters and A meet, where it has parameters of its own."""
    late: bool = False
    """Whether its losses are known when the next Δ is complete."""
    forget: Callable[[], None] = staticmethod(lambda: None)
    """Has the replica begin anew with the next A, for its Δ was not finite."""

    @abstractmethod
    def replica(self, weight: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        """Build the replica that computes Δ on this rank.

        Args:
            weight: number of samples -> weight of such a Δ in the sum.
            recorder: of this rank's spans.
        """

    @abstractmethod
    def held(self) -> HeldTensors:
        """Return the tensors of this rank, for a checkpoint."""

    def release(self) -> None:
        """Have the trained model in memory of this process alone, once updates of A have ended on all ranks."""
        shared, self.shared = self.shared, None
        if shared is not None:
            private = shared.release()
            if self.autograd is not None:
                self.autograd.bind(private)

    def _adds_up_in_place(self, replica: Single | Pipelined | TensorParallel) -> None:
        """Let gradients be added up in the buffer of Δ, for a device's memory to have them once.

        On the CPU autograd's own tensors take less time. Where buckets are sent, a sum is there before its check is.
        """
        if self.state.device != CPU and self.overlap is None:
            replica.autograd.gradients = self.reduce_buffer.state

    def engine_json(self) -> dict[str, Any]:
        """Return what a checkpoint has of this rank that only the engine understands."""
        saved = None if self.own is None else self.own.state_json()
        return dict(self.state_json) | ({} if saved is None else {KEY: {str(self.coordinate.replica): saved}})

    @abstractmethod
    def notes(self) -> Mapping[str, str | int | float]:
        """Return notes on this run's communication for its summary; all ranks call it together."""


@final
class WholeModelShard(RankShard):
    """Each rank has a replica of its own: all of A (data parallel, ZeRO-1), or a part of each parameter (FSDP)."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup, job, world = setup, setup.run_context.job, setup.context.world
        communicator, strategy = setup.context.communicator, job.strategy
        self.coordinate, self.trained = Coordinate(world.rank), setup.module
        device = torch.device(setup.run_context.device(world.rank))
        self.state = read(setup.module, setup.layout.new(device=device))
        self.parameter_bytes = setup.layout.parameter_bytes
        self.full_state = lambda *, wanted: self.state.clone() if wanted else None
        if communicator is not None and strategy.shard_parameters:  # with a single rank they stay whole
            self.fsdp = FsdpModule(setup.module, setup.layout, world.rank, world.size, communicator, device)
            self.parameter_bytes = self.fsdp.shard.layout.nbytes
            self.state = FlatState(FlatLayout((), self.state.layout.buffers), [], self.state.buffers)
            self.full_state = functools.partial(self.fsdp.full_state, self.state)
        self._divides = communicator is not None and self.fsdp is None and self._partitions_optimizer()
        """Whether each rank has a part of the optimizer's state."""
        if self._divides and setup.backend == SHM and device == CPU:
            self.shared = SharedParameters.of(self.state, setup.context)
            self.state = self.state if self.shared is None else self.shared.state
        self.reduce_buffer = ReduceBuffer(self.state.layout, world.size, device, norms=job.noise_scale)
        if job.survives_deaths and communicator is not None:
            self.contribution = ReduceBuffer(self.state.layout, world.size, device)
        self.update = update = self._build_update()
        policy = setup.run_context.policy
        if communicator is not None and any(isinstance(m, SynchronisedBatchNorm) for m in setup.module.modules()):
            if setup.run_context.local_sgd:
                raise InputError(
                    "synchronised BatchNorm normalises the samples of all replicas together, but under aggregation="
                    f"{text_of(policy)} each has weights of its own; leave synchronised_batchnorm out, or write "
                    "aggregation=synchronous"
                )
            if strategy.compile:
                raise InputError(
                    "synchronised BatchNorm exchanges sums within forward and backward, of which compile="
                    f"{strategy.compile} makes one piece; leave synchronised_batchnorm out, or write compile=false"
                )
            summed = strategy.accumulate > 1 or policy.collective == "sum" or self.fsdp is not None
            self.batchnorm_group = BatchNormGroup(communicator, world.rank, summed)

        # Gradients are taken as they come only where nothing has to be known of the whole Δ before.
        overlaps = strategy.compression == "none" and not setup.run_context.local_sgd
        overlaps &= self.batchnorm_group is None and job.on_nonfinite != "skip" and not job.survives_deaths
        if job.noise_scale:  # each gradient is measured as it is handed over
            overlaps &= strategy.accumulate == 1
        # Sums by way of the host wait for the device, as do compressions.
        self.late = setup.run_context.reads_late
        self.late &= strategy.compression == "none" and self.batchnorm_group is None
        self.late &= communicator is None or communicator.device == device
        if job.noise_scale:
            assert isinstance(update, ReplicatedUpdate), "another update was not refused"
            norms = DeltaNorms(job, self.reduce_buffer.state, setup.layout.parameter_names, setup.layout)
            norms.preconditioner = Preconditioner(update.optimizer)
            self.noise = NoiseObserver(setup.run_context, norms, from_statuses=False, late=self.late)
        if overlaps and isinstance(update, ReplicatedUpdate):
            self.overlap = build_overlap(job, setup.context, setup.backend, self.reduce_buffer, late=self.late)
        elif overlaps and isinstance(update, ZeroOptimizer):
            self.overlap = update.gradients
        vectors = update.reduced_vectors if self.overlap is None else self.reduce_buffer.tails()
        turns = Turns.of(setup.run_context.delta, setup.layout, setup.layout)
        self.status_sync = GradientSync(
            self.reduce_buffer, vectors, world.rank, communicator, self.contribution, turns, self.late
        )

    def _partitions_optimizer(self) -> bool:
        setup, job = self._setup, self._setup.run_context.job
        strategy = job.strategy
        if strategy.shard_optimizer is not None:
            return strategy.shard_optimizer
        chosen = strategy.compression == "none" and strategy.device == "cpu" and not job.noise_scale
        chosen &= not setup.run_context.local_sgd and job.loop is None  # whose optimizer may change the options
        # The state of a rank that dies would be lost.
        chosen &= not job.survives_deaths
        return chosen and pays(job.program, setup.layout, setup.backend)

    def _build_update(self) -> Update:
        setup, job, world = self._setup, self._setup.run_context.job, self._setup.context.world
        communicator, strategy = setup.context.communicator, job.strategy
        if communicator is not None and self.fsdp is not None:
            return FsdpUpdate(job.program, self.fsdp, self.reduce_buffer, self.state, communicator)
        if communicator is not None and self._divides:
            shard = ShardState(self.state, self.state.layout, self.state.layout.parameter_names)
            group = SubGroup(communicator, world.rank)
            shares = self.shared is not None
            return ZeroOptimizer(job.program, self.reduce_buffer, shard, group, communicator, shares=shares)
        # The only Δ is the sum of all: a device has no other vectors for it.
        combined = None if self.state.device == CPU or job.noise_scale else self.reduce_buffer.state
        context = setup.run_context
        owner = ServerOptimizer(
            job.program,
            context.policy,
            self.state,
            subtracts=False,
            combined=combined,
            own_steps=lambda: context.own_steps,
            one_replica=context.one_replica,
        )
        if communicator is None or strategy.compression == "none":
            return ReplicatedUpdate(self.reduce_buffer, owner)
        return ReplicatedUpdate(self.reduce_buffer, owner, parse(strategy.compression), communicator)

    def replica(self, weight: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        context, rank, module = self._setup.run_context, self.coordinate.replica, self._setup.module
        if self.fsdp is None:
            # Callbacks of this process may have the module, where model() returns one that they know.
            after = WARM_S if not context.job.callbacks and self.batchnorm_group is None else None
            own = (self.contribution or self.reduce_buffer).state
            delta = (lambda: own) if own.device == CPU and self.overlap is None else None
            replica = context.replica(
                rank, module, self._setup.layout, recorder, late=self.late, graphs_after=after, delta=delta
            )
            self.autograd = autograd_of(replica)
            if isinstance(replica, LocalSGD):
                self.own, self.takes_over = replica, replica.exchange
            elif isinstance(replica, Single) and not context.job.noise_scale:  # which needs each micro-step's own
                self._adds_up_in_place(replica)
            return replica
        autograd = Autograd(context.job.program, module, self.state.layout, rank, context.device(rank), recorder)
        communicator = self._setup.context.communicator
        if communicator is not None:
            autograd.before_reading = functools.partial(communicator.reached, "the layers of its step")
        self.fsdp.late = self.late
        return FsdpReplica(autograd, self.fsdp, weight)

    def held(self) -> HeldTensors:
        setup, first = self._setup, self._setup.context.is_first
        part = PartChunks(setup.layout, {}, 0)
        if self.fsdp is not None:
            state = [*self.fsdp.chunks(), *part.of(self.state)]
            has = among(self.state.layout.names)
            describe = self.fsdp.describe
            writes = lambda name: first or not has(name)  # noqa: E731
            return HeldTensors(state, self.update.optimizer, describe, writes, lambda *_: True)
        state = part.of(self.state)
        if isinstance(self.update, ZeroOptimizer):
            return zero_tensors(self.update, part, state, first=first, owned=setup.layout.names)
        kept, compression = None, setup.run_context.job.strategy.compression
        if compression != "none" and isinstance(self.update, ReplicatedUpdate):
            policy, ranks = setup.run_context.policy, setup.context.world.size
            mean = policy.collective == "mean"
            kept = KeptResiduals(compression, *self.update.kept(), self.coordinate.replica, ranks, mean)
        writes_any = first or setup.run_context.local_sgd or bool(kept is not None and kept.residuals)
        own = [] if self.own is None else [*replica_chunks(self.coordinate.replica, self.own)]
        return HeldTensors(state, self.update.optimizer, part, lambda _: first, lambda *_: first, writes_any, kept, own)

    def notes(self) -> Mapping[str, str | int | float]:
        ranks, nbytes = self._setup.context.world.size, self._setup.layout.parameter_bytes
        notes: dict[str, str | int | float] = {
            "shard_optimizer": isinstance(self.update, ZeroOptimizer),
            "shared_parameters": isinstance(self.update, ZeroOptimizer) and self.update.shares,
            "buckets": len(self.overlap.buckets) if self.overlap is not None else 0,
            "payload_ring_formula_bytes_per_step": ranks * ring_bytes(nbytes, ranks),
        }
        if self.fsdp is not None:  # gathered for forward, gathered for backward, and gradients summed
            sent = 3 * (ranks - 1) * nbytes * self._setup.run_context.per_step
            notes["payload_sharded_formula_bytes_per_step"] = sent
        return notes
