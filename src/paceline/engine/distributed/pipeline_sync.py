"""Synchronous training of a replica whose stages lie on several ranks: each steps on its part of A.

::

    rank 0   Δ of stage 0 --+               +--> a step on the part of stage 0
                            +-- rows, Σ Δ² -+         by one scale, on one decision
    rank 1   Δ of stage 1 --+               +--> a step on the part of stage 1

Of Δ itself nothing is sent within a replica. Of several, those who have the same part of A first sum up their Δs; or,
where the optimizer's state is divided among them, do so as they step (:mod:`~paceline.engine.distributed.zero1`).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.core.mesh import Mesh
from paceline.core.types import Clock
from paceline.engine.distributed import reduce_buffer
from paceline.engine.distributed.norms import DeltaNorms, NoiseObserver
from paceline.engine.distributed.reduce_buffer import DeltaNorm, RankStatus, ReduceBuffer, of_step
from paceline.engine.distributed.update import ShardState, Update, take_buffers
from paceline.engine.noise_scale import NoiseAccumulator
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.communicator import Communicator
from paceline.program import Program
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.flat_optimizer import FlatOptimizer, of_part
from paceline.replica.flat_state import FlatState
from paceline.replica.single import GradientHandoff


@final
class PipelineSync:
    """Where the ranks of all replicas meet: they tell each other a row and the square of their Δ's norm.

    Args:
        freight: what this rank brings, with a row for each replica.
        vectors: what of it is summed here.
        mine: the names of the parameters that count in the norm here; a tied one counts once, and none do where
            nobody asks for the norm.
        mesh: of all ranks.
        rank: whose.
        communicator: by which all meet; None: nobody else is there.
        peers: by which those meet who have the same part of A; None: nobody else has.
        brings: whether this rank does; of several in a replica who have the same Δ one does.
        norms: of what it brings; None: nobody has asked.
    """

    def __init__(
        self,
        freight: ReduceBuffer,
        vectors: list[Tensor],
        mine: Sequence[str],
        mesh: Mesh,
        rank: int,
        communicator: Communicator | None,
        peers: Communicator | None,
        *,
        brings: bool = True,
        norms: DeltaNorms | None = None,
    ) -> None:
        self._freight, self._mesh, self._rank, self._communicator, self._peers = (
            freight,
            mesh,
            rank,
            communicator,
            peers,
        )
        self._vectors, self._brings, self._norms = vectors, brings, norms
        self._replica = mesh.place(rank).replica
        parameters = dict(zip(freight.state.layout.parameter_names, freight.state.views.parameters, strict=True))
        whole = len(parameters) == len(mine)
        self._counted = freight.state.parameters if whole else [parameters[name] for name in mine]
        self._table = torch.zeros(
            mesh.workers, reduce_buffer.FIELDS + reduce_buffer.NORMS * (norms is not None) + 1, dtype=torch.float64
        )
        self._place = self._table[rank]
        self.square = 0.0
        """Of the norm of the replicas' Δs together, as they were brought."""

    def noise(self, setup: RunContext) -> NoiseObserver | None:
        """What is told of noise; None: nobody has asked."""
        if self._norms is None:
            return None
        return NoiseObserver(NoiseAccumulator(setup.reference_batch), self._norms, _together)

    def meet(self, row: RankStatus, step: Clock) -> list[RankStatus]:
        """One row of each replica; the freight then holds the sum of what was brought of its part."""
        self._freight.table.zero_()
        if self._brings:
            self._freight.count(self._replica)
        else:
            self._freight.empty()
        if self._peers is not None:
            self._peers.all_reduce(self._vectors, of_step(step))
        if self._norms is not None and row.norm is not None and self._mesh.replicas > 1:
            row = row._replace(norm=row.norm._replace(together=self._norms.together()))
        self._table.zero_()
        self._place.copy_(torch.tensor([*reduce_buffer.numbers(row), square_norm(self._counted)], dtype=torch.float64))
        if self._communicator is not None:
            self._communicator.all_reduce([self._table.view(-1)], of_step(step))
        told = self._table.tolist()
        self.square = sum(told[rank][-1] for rank in self._mesh.replica_ranks(self._replica))
        each = [reduce_buffer.read(numbers, norms=self._norms is not None) for numbers in told]
        return [
            merged([each[rank] for rank in self._mesh.replica_ranks(replica)]) for replica in range(self._mesh.replicas)
        ]


def merged(parts: Sequence[RankStatus]) -> RankStatus:
    """What a replica says, of what its ranks say; its loss is the last one's.

    >>> kind = reduce_buffer.StatusKind.delta
    >>> a, b = RankStatus(kind, 4, True, False, 0.0, 7), RankStatus(kind, 4, True, True, 0.5, 9)
    >>> merged([a, b])
    Row(kind=<StatusKind.delta: 1>, samples=4, finite=True, stop=True, loss=0.5, entered_ns=9, norm=None)
    """
    norms = [part.norm for part in parts if part.norm is not None]
    return RankStatus(
        parts[-1].kind,
        parts[-1].samples,
        all(part.finite for part in parts),
        any(part.stop for part in parts),
        parts[-1].loss,
        max(part.entered_ns for part in parts),
        _added(norms) if norms else None,
    )


def _together(replicas: Sequence[RankStatus]) -> float:
    """|Σ|² of the replicas' Δs, of which each rank of any replica has its part."""
    found = next(row.norm for row in replicas if row.norm is not None)
    return found.together


def _added(norms: Sequence[DeltaNorm]) -> DeltaNorm:
    """Of a whole Δ, of which each rank tells its part."""
    square, together, before = (sum(part) for part in zip(*((n[0], n[2], n[3]) for n in norms), strict=True))
    return DeltaNorm(square, norms[-1].pieces, together, before, norms[-1].samples_before)


@final
class PartUpdate(Update):
    """Each rank steps on the part of A that its stages need.

    Args:
        program: gives optimizer, scheduler and clipping.
        freight: what this rank brings.
        held: its part of A.
        exchange: knows the norm of the whole Δ.
        by_tensor: whether the gradients may stay outside the freight, tensor by tensor; see :attr:`loose`.
    """

    def __init__(
        self,
        program: Program,
        freight: ReduceBuffer,
        held: ShardState,
        exchange: PipelineSync,
        *,
        by_tensor: bool = False,
    ) -> None:
        self._freight, self._held, self._exchange = freight, held, exchange
        self._clip_norm = program.clip_norm
        self.stepper: FlatOptimizer | None = None
        if held.state.parameters:
            make = of_part(program.optimizer, held.whole, held.state.layout)
            self.stepper = FlatOptimizer(make, program.scheduler, held.state, freight.state)
        takes_any = self.stepper is not None and self.stepper.takes_any
        self.loose = GradientHandoff() if by_tensor and takes_any and program.clip_norm is None else None
        """Where the gradients are to be; None: in the freight."""

    @property
    def reduced_vectors(self) -> list[Tensor]:
        return []

    @property
    def optimizer_bytes(self) -> int:
        return 0 if self.stepper is None else self.stepper.nbytes

    def apply(self, factor: float, rate: float) -> None:
        if self._clip_norm is not None:
            factor *= clip_scale(self._exchange.square * factor**2, self._clip_norm)
        gradients = self._freight.state.parameters
        if self.stepper is not None and self.loose is not None:
            self.stepper.step_by_tensor(self.loose.gradients, rate, weight=factor)
        elif self.stepper is not None and self.stepper.takes_any:
            self.stepper.step(gradients, rate, weight=factor)
        elif self.stepper is not None:
            torch._foreach_mul_(gradients, factor)
            self.stepper.step(gradients, rate)
        take_buffers(self._held.state, self._freight.state)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        return self._held.gather(wanted=wanted)
