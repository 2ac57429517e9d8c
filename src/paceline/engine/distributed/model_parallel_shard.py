"""The part of A of a rank whose replica has several: a stage, a shard, or both."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

import torch

from paceline.device import CPU
from paceline.engine.distributed.exchange import ModelParallelSync, Turns
from paceline.engine.distributed.held_tensors import HeldTensors, part_tensors, zero_tensors
from paceline.engine.distributed.norms import DeltaNorms, NoiseObserver
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import ModelParallelUpdate, ShardState
from paceline.engine.distributed.zero1 import ZeroOptimizer
from paceline.engine.own_states import replica_chunks
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.rank_context import RankSetup, holders
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.replica.autograd import handoff_pays
from paceline.replica.base import Replica, micro_steps
from paceline.replica.gradient_clipping import has_float64
from paceline.replica.noise_estimator import Preconditioner
from paceline.trace.recorder import AnyRecorder


@final
class ModelParallelShard(RankShard):
    """A replica has several ranks: pipeline stages, tensor-parallel shards, or both; each has its part of A."""

    def __init__(self, setup: RankSetup) -> None:
        job, communicator = setup.run_context.job, setup.context.communicator
        zero = bool(job.strategy.shard_optimizer)
        self._ranks = ranks = PipelineRank(setup) if job.strategy.pipelined else TensorParallelRank(setup)
        self.state_json = ranks.state_json
        counted = ranks.counted(of_each_copy=zero)
        self.coordinate, self.state = ranks.place, ranks.state
        self.parameter_bytes = ranks.state.layout.parameter_bytes
        self.full_state = ranks.full_state
        shard = ShardState(ranks.state, ranks.whole, counted)
        self.reduce_buffer = buffer = ReduceBuffer(ranks.state.layout, ranks.mesh.replicas, ranks.state.device)

        local_sgd, policy = setup.run_context.local_sgd, setup.run_context.policy
        clips, device = job.program.clip_norm is not None and not local_sgd, setup.run_context.device(ranks.rank)
        # Replicas of a stage tell each other losses through the host.
        self.late = setup.run_context.reads_late and not job.strategy.replicated
        self.late &= communicator is not None and communicator.device == torch.device(device)
        self.late &= not clips or has_float64(torch.device(device))
        on_device = torch.device(device) if self.late else None

        peers = ranks.subgroups.peers
        if communicator is not None and zero:
            group = holders(ranks.mesh, ranks.rank, communicator, peers)
            self.update = ZeroOptimizer(job.program, buffer, shard, group, communicator)
            # Each replica of a stage has the whole Δ of its replica of the model.
            first = ranks.mesh.stage_replica(ranks.place).copy == 0
            self.status_sync = ModelParallelSync(
                setup,
                buffer,
                self.update.reduced_vectors,
                (),
                group.communicator,
                contributes=first,
                on_device=on_device,
            )
            return
        norms = DeltaNorms(job, buffer.state, counted, ranks.whole) if job.noise_scale else None
        combined = None if norms is None else norms.combined
        sync = ModelParallelSync(
            setup,
            buffer,
            buffer.own_vectors,
            counted if clips else (),
            peers,
            combined=combined,
            turns=Turns.of(policy.delta, ranks.whole, ranks.layout),
            on_device=on_device,
            clips=clips,
        )
        # Without a sum over replicas gradients may stay where autograd wrote them.
        by_tensor = ranks.mesh.replicas == 1 and norms is None
        by_tensor &= device == CPU.type and handoff_pays(ranks.state.layout) and not local_sgd
        self.update = update = ModelParallelUpdate(job.program, policy, buffer, shard, sync, by_tensor=by_tensor)
        self._own_ranks: Communicator | None = None
        """The ranks of this replica, where they clip its gradients together."""
        if communicator is not None and local_sgd and job.program.clip_norm is not None:
            self._own_ranks = communicator.split([ranks.mesh.replica_ranks(r) for r in range(ranks.mesh.replicas)])
        self.status_sync = sync
        if norms is not None:
            norms.preconditioner = Preconditioner(update.optimizer)
            self.noise = NoiseObserver(setup.run_context, norms, from_statuses=True, late=self.late)

    def replica(self, weight: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weight  # Δ is scaled when all of it is there
        ranks, context = self._ranks, self._ranks.run_context
        if context.local_sgd:
            self.worker = ranks.worker(1, recorder)
            stepping = ranks.stepping(self.worker, self._summed)
            self.own, self.forget, self.takes_over = stepping, stepping.forget, stepping.exchange
            return stepping
        handoff = self.update.handoff if isinstance(self.update, ModelParallelUpdate) else None
        self.worker = ranks.worker(micro_steps(context.delta), recorder, handoff, late=self.late)
        self._adds_up_in_place(self.worker)
        return self.worker

    def _summed(self, square: float) -> float:
        """Return the sum of a number over the ranks of this replica."""
        total = torch.tensor([square], dtype=torch.float64)
        if self._own_ranks is not None:
            self._own_ranks.all_reduce([total], "the norm of a gradient")
        return float(total)

    def held(self) -> HeldTensors:
        ranks, place = self._ranks, self._ranks.place
        part = ranks.part_chunks()
        state = part.of(self.state)
        first = ranks.mesh.stage_replica(place).copy == 0 and place.replica == 0
        owned = ranks.names()
        if isinstance(self.update, ZeroOptimizer):
            return zero_tensors(self.update, part, state, first=first, owned=owned)
        held = part_tensors(part, state, self.update.optimizer, owned if first else ())
        own = [] if self.own is None else [*replica_chunks(place.replica, self.own)]
        return replace(held, own=own, writes_any=held.writes_any or ranks.run_context.local_sgd)

    def notes(self) -> Mapping[str, str | int | float]:
        ranks, zero = self._ranks, isinstance(self.update, ZeroOptimizer)
        if isinstance(ranks, TensorParallelRank):
            sent = ranks.prepared.plan.cost.sent_bytes
            return {"shards": ranks.shards.count, "planned_bytes_per_step": sent, "shard_optimizer": zero}
        return {
            "micro_batches": ranks.run_context.job.strategy.micro_batch_count,
            "parts": ranks.needs.parts,
            "part_dependencies": str(ranks.needs),
            "shard_optimizer": zero,
        }
