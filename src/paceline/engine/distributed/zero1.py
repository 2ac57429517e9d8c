"""ZeRO-1: the optimizer's state is partitioned among the ranks that have the same part of A (arXiv 1910.02054).

::

    Δ of all of them --- reduce-scatter ---> Σ Δ of my slice -- step on my slice of A --+
                                                                                         |
    their whole new part of A <------------------------ all-gather ---------------------+

Where an optimizer treats each element alone, the part is cut anywhere; one that looks at whole parameters gets whole
ones. With replicas of one worker the part is A; with replicas of stages and shards each worker has another part, and
its peers in the other replicas the same.

Replicas of one worker on one host have A in memory that they share (:mod:`.shared_parameters`), so that nothing has to
be gathered::

    Δ of all of them --- reduce-scatter ---> Σ Δ of my slice -- step on my slice of the only A -- wait for the others
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.shm.process_group import NAME as SHM
from paceline.core.types import Version
from paceline.engine.distributed.gradient_buckets import GradientBuckets, apart_pays, cut_apart
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import ShardState, Update, clip_across_ranks
from paceline.engine.distributed.zero_partition import SharedPartition, ZeroPartition, ZeroSlice
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.rank_context import SubGroup
from paceline.program import Program
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState
from paceline.replica.optimizer_factory import (
    build_optimizer,
    is_elementwise,
    optimizer_of_part,
    optimizer_of_vectors,
    shape_only_parameters,
)
from paceline.replica.optimizer_kernels import StateVectors

# Elements of A from which on it pays, measured.
LEAST_ELEMENTS = 300_000


def pays(program: Program, layout: FlatLayout, backend: str) -> bool:
    """Return whether ZeRO-1 should make a step of replicas of one worker quicker than the whole optimizer on each rank.

    Where ranks share the memory of A, 300,000 elements took 0.84 to 0.95 of the time with 2 and 4 ranks under SGD and
    Adam, a million and more 0.57 to 0.85. Fewer took up to 1.26 of it, and over Gloo, where A is gathered, all sizes
    1.28 and more (benchmarks/data_parallel).
    """
    if backend != SHM or sum(block.elements for block in layout.parameters) < LEAST_ELEMENTS:
        return False
    parameters = list(shape_only_parameters(layout).values())
    return is_elementwise(build_optimizer(program.optimizer, parameters), len(parameters))


@final
class HeldGradients(GradientBuckets):
    """Keeps the gradients of Δ where autograd has left them, until the update sums them."""

    def __init__(self, buffer: ReduceBuffer) -> None:
        layout = buffer.state.layout
        self._held, self._complete = list[Tensor | None](), list[Tensor | None]()
        super().__init__(cut_apart(layout), layout, buffer.state.parameters, early=False)

    def wait(self, description: str) -> None:
        """Be ready for the next Δ: the update waits for the sums of this one."""
        del description
        self._complete, self._held = self._held, []
        self._reset()

    def take(self) -> list[Tensor | None]:
        """Return what this rank contributes to each bucket, None where it is in the vector; it is not held any more."""
        complete, self._complete = self._complete, []
        return complete

    def _start(self, part: Tensor, given: Tensor | None) -> None:
        del part
        self._held.append(given)


@final
class ZeroOptimizer(Update):
    """Each rank steps on its slice of its part of A, and keeps the optimizer's state of that slice alone.

    Args:
        program: gives optimizer, scheduler and clipping.
        buffer: holds this rank's Δ.
        shard: this rank's part of A.
        group: the ranks that have the same part.
        communicator: of all ranks; sums the norm of the whole Δ.
        shares: whether these ranks share the memory of that part.
    """

    def __init__(
        self,
        program: Program,
        buffer: ReduceBuffer,
        shard: ShardState,
        group: SubGroup,
        communicator: Communicator,
        *,
        shares: bool = False,
    ) -> None:
        self._buffer, self._state, self._group, self._all = buffer, shard.state, group.communicator, communicator
        self._clip_norm, self.shares = program.clip_norm, shares
        layout, full = shard.state.layout, shard.full_layout
        parameters = list(shape_only_parameters(full).values())
        anywhere = is_elementwise(build_optimizer(program.optimizer, parameters), len(parameters))
        self._partitions = list[ZeroPartition]()
        self._shared = list[SharedPartition]()
        self.gradients = HeldGradients(buffer) if shares and anywhere and apart_pays(layout) else None
        """May hold the gradients of Δ in place of the buffer; None: A is not shared, or it would not pay."""
        own, common = self._cut(group.rank, anywhere=anywhere, shares=shares)
        slices = [*own, *common]
        self._gradients = [piece.delta for piece in slices]
        self.reduced_vectors = buffer.tails({piece.block.dtype: piece.block.elements for piece in common})

        # Elements that every rank of the group steps on count in the norm on its first rank.
        blocks, names = {block.dtype: block for block in layout.parameters}, set(shard.counted)
        counted = slices if group.rank == 0 else own
        self._counted = [tensor for piece in counted for tensor in piece.of(blocks[piece.block.dtype], names)]
        if slices:
            flat = FlatLayout(tuple(piece.block for piece in slices), ())
            of_vectors = optimizer_of_vectors(program.optimizer, full)
            make = of_vectors if anywhere else optimizer_of_part(program.optimizer, full, flat)
            states = FlatState(flat, [piece.state for piece in slices], []), FlatState(flat, self._gradients, [])
            self.optimizer = FlatOptimizer(make, program.scheduler, *states)
        self.slices: dict[int, tuple[DtypeBuffer, int]] = {}
        """Layout of the vector, and offset in it, of each slice that is cut anywhere, by its only entry's identity."""
        if anywhere and self._group is not None:
            self.slices = {id(piece.block.entries[0]): (blocks[piece.block.dtype], piece.start) for piece in slices}
        self.common_entries = {id(entry) for piece in common for entry in piece.block.entries}
        """Identities of the entries of slices that all ranks of the group step on."""

    def _cut(self, rank: int, *, anywhere: bool, shares: bool) -> tuple[list[ZeroSlice], list[ZeroSlice]]:
        """Partition this part of A; return the slices that this rank alone steps on, and those that all do."""
        layout = self._state.layout
        vectors = list(zip(layout.parameters, self._state.parameters, self._buffer.state.parameters, strict=True))
        if self._group is None:  # no other rank has this part
            return [ZeroSlice(block, 0, a, delta) for block, a, delta in vectors], []
        ranks = self._group.ranks
        if not shares:
            build = ZeroPartition.even if anywhere else ZeroPartition.by_parameters
            self._partitions = [build(block, a, delta, rank, ranks) for block, a, delta in vectors]
            own = [partition.own for partition in self._partitions if partition.own.block.elements]
            return own, [each.common for each in self._partitions if each.common is not None]
        if self.gradients is not None:
            parts = [(vectors[each.vector], slice(each.start, each.stop)) for each in self.gradients.buckets]
        else:
            parts = [(vector, slice(0, vector[0].elements)) for vector in vectors]
        self._shared = [SharedPartition.of(*each, part, rank, ranks, anywhere=anywhere) for each, part in parts]
        return [each.own for each in self._shared if each.own.block.elements], []

    def apply(self, factor: float, rate: float, version: Version) -> None:
        del version
        if self.optimizer is not None and self.optimizer.has_kernel and self._shared and self._clip_norm is None:
            self._step_as_summed(self.optimizer, factor, rate)
        else:
            self._sum_and_step(factor, rate)
        self._gather()
        self._buffer.copy_running_buffers(self._state)

    def _step_as_summed(self, optimizer: FlatOptimizer, factor: float, rate: float) -> None:
        """Step on each piece of the sum as it is made, and is in the caches."""
        group = self._group
        assert group is not None, "others share A"
        kernel = optimizer.kernel(rate)

        def step(a: Tensor, state: StateVectors, start: int, piece: Tensor) -> None:
            part = slice(start, start + piece.numel())
            kernel.step(a[part], a[part], piece, [v[part] for v in state], factor, consumes=True)

        vectors = iter(zip(optimizer.state.parameters, optimizer.state_vectors, strict=True))
        works = [
            each.begin_reduce_scatter(group, part, partial(step, *next(vectors)) if each.own.block.elements else None)
            for each, part in zip(self._shared, self._given(), strict=True)
        ]
        self._finish(group, works, "the reduce-scatter of Δ")
        optimizer.end_step(optimizer.state)

    def _given(self) -> list[Tensor | None]:
        """Return what this rank contributes to each shared partition, None where it is in the vector."""
        given = self.gradients.take() if self.gradients is not None else []
        return given or [None] * len(self._shared)

    def _sum_and_step(self, factor: float, rate: float) -> None:
        """Step once all of the sum is there."""
        self._sum()
        if self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        if self._clip_norm is not None:
            clip_across_ranks(self._gradients, self._counted, self._clip_norm, self._all)
        if self.optimizer is not None:
            self.optimizer.step(self._gradients, rate, consumes=True)

    def _sum(self) -> None:
        """Sum Δ, on each rank its slices."""
        group = self._group
        if group is None:
            return
        works = [partition.begin_reduce_scatter(group) for partition in self._partitions]
        shared = zip(self._shared, self._given(), strict=True)
        works += [each.begin_reduce_scatter(group, part) for each, part in shared]
        self._finish(group, works, "the reduce-scatter of Δ")

    def _gather(self) -> None:
        """Have all of the new A on each rank."""
        group = self._group
        if group is None:
            return
        if self._shared:
            group.wait(group.start_barrier(), "the others' steps on their slices of A")
        works = [partition.begin_all_gather(group) for partition in self._partitions]
        self._finish(group, works, "the all-gather of A")
        for partition in self._partitions:
            partition.unpack()

    def _finish(self, group: Communicator, works: Sequence[Any], description: str) -> None:
        """Wait for collectives of A's vectors, on the host or on the device alone."""
        for work in works:
            group.finish(work, self._state.parameters[0], description)
