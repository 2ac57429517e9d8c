"""The exchanges of a step: statuses among all ranks, Δ among those with the same part of A.

Where each rank has a replica, one all-reduce does both. Where a replica has several ranks, they exchange the table of
statuses alone, and the ranks that have the same part of A in other replicas sum Δ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.delta import Change, Delta
from paceline.core.types import Clock, Version
from paceline.engine.distributed.rank_status import FIELDS, NORMS, RankStatus, by_replica
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.rank_context import RankSetup
from paceline.replica.flat_state import FlatLayout
from paceline.replica.gradient_clipping import square_norm, square_norm_on_device
from paceline.replica.noise_estimator import LateNumbers, Number
from paceline.replica.own_parameters import fragments_of


def of_step(step: Clock) -> str:
    """Name the exchange of a step, for errors."""
    return f"the all-reduce of its step {step}"


class Turns:
    """Sums of Δ a fragment at a time, or while training goes on.

    Args:
        layout: of Δ.
        fragments: slices of its vectors that are summed in turn; empty: all of them are each time.
        overlapped: whether :meth:`sum` returns before Δ is summed, and :meth:`settle` waits for it.
    """

    def __init__(self, layout: FlatLayout, fragments: Sequence[Sequence[slice]], *, overlapped: bool) -> None:
        self._fragments = fragments or [[slice(None)] * len(layout.parameters)]
        self.overlapped = overlapped
        self._wait: Callable[[], None] | None = None

    @classmethod
    def of(cls, delta: Delta, whole: FlatLayout, layout: FlatLayout) -> "Turns | None":
        """Return those of a kind of Δ; None: it is summed whole, with the rest.

        Args:
            delta: the kind.
            whole: layout of A.
            layout: of A, or of this rank's part of it.
        """
        if not isinstance(delta, Change) or (delta.fragments == 1 and not delta.overlap):
            return None
        return cls(layout, fragments_of(delta, whole, layout), overlapped=bool(delta.overlap))

    def sum(
        self,
        communicator: Communicator,
        buffer: ReduceBuffer,
        contribution: ReduceBuffer | None,
        version: Version,
        description: str,
    ) -> None:
        """Sum the fragment of this version over all ranks, or begin to, and all that is no part of Δ.

        Args:
            communicator: of the ranks.
            buffer: this rank's; receives the sums.
            contribution: of this rank, which stays as it is; None: the buffer itself.
            version: of A, of which the Δs were made.
            description: of the collective, in words that follow "waited for".
        """
        slices = self._fragments[version % len(self._fragments)]
        vectors, tails = buffer.cut(slices), buffer.tails()
        if self.overlapped:
            communicator.all_reduce(tails, description)
            self._wait = communicator.begin_all_reduce(vectors, description)
            return
        given = None if contribution is None else [*contribution.cut(slices), *contribution.tails()]
        communicator.all_reduce([*vectors, *tails], description, given)

    def settle(self) -> None:
        """Return once what was begun is summed."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


@dataclass
class GradientSync:
    """The exchange of ranks that each have a replica.

    Args:
        buffer: this rank's; receives the sums.
        vectors: the parts of it that are summed here.
        rank: of this process.
        communicator: of all ranks; None: there is one.
        contribution: of this rank, all of which is summed, and stays as it is; None: the buffer itself.
        turns: sums Δ; None: it is summed with the rest, all of it and at once.
        on_device: whether the device alone waits for the sums on it: ``_sum_on_device``.
    """

    buffer: ReduceBuffer
    vectors: list[Tensor]
    rank: int
    communicator: Communicator | None
    contribution: ReduceBuffer | None = None
    turns: Turns | None = None
    on_device: bool = False
    combined: ClassVar[LateNumbers | None] = None
    """See :class:`ModelParallelSync`; here the norm of the sum is measured where it is applied."""

    @property
    def dtype(self) -> torch.dtype:
        """Return what numbers of a status are rounded to."""
        return self.buffer.table.dtype

    def exchange(self, status: RankStatus, step: Clock, version: Version = 0) -> list[RankStatus]:
        """Return one status of each replica; contributions are then summed where they have to be, or being summed."""
        own, norms = self.contribution or self.buffer, status.norm is not None
        table = own.table
        if self.communicator is None:  # nobody reads the table
            own.set_counters(self.rank)
            return [status]
        own.clear_rows()
        own.set_counters(self.rank)
        row = torch.tensor(status.encode(), dtype=table.dtype)
        table[self.rank, : len(row)] = row
        if self.turns is not None:
            self.turns.sum(self.communicator, self.buffer, self.contribution, version, of_step(step))
        else:
            contributions = self.contribution.vectors if self.contribution is not None else None
            if self.on_device:
                _sum_on_device(self.communicator, self.vectors, of_step(step))
            else:
                self.communicator.all_reduce(self.vectors, of_step(step), contributions)
        return [RankStatus.decode(each, norms=norms) for each in self.buffer.table[:, : len(row)].tolist()]


def _sum_on_device(communicator: Communicator, vectors: list[Tensor], description: str) -> None:
    """Replace each vector by its sum; the host waits for those in its own memory, the device for those on it.

    If a sum on the device never ends, for a rank has died, the host finds out in its next exchange.
    """
    works = [(communicator.start_all_reduce(vector), vector) for vector in vectors]
    communicator.traffic.sent_bytes += sum(ring_bytes(vector.nbytes, communicator.ranks) for vector in vectors)
    for work, vector in works:
        communicator.finish(work, vector, description)


class ModelParallelSync:
    """The exchange of replicas of several ranks: statuses among all ranks, Δ among those with the same part of A.

    ::

        rank 0   Δ of stage 0 --+                   +--> a step on the part of stage 0
                                +-- statuses, |Δ|² -+         by one scale, on one decision
        rank 1   Δ of stage 1 --+                   +--> a step on the part of stage 1

    Args:
        setup: of this rank.
        buffer: its Δ, with a counter row for each replica.
        vectors: the parts of it that are summed among ``peers``.
        counted: the parameters that count in the norm on this rank: each of A counts on one rank of a replica, and
            none where the norm is not needed.
        peers: the ranks of other replicas with the same part of A; None: there are none.
        contributes: whether this rank adds its Δ; of several ranks of a replica with the same Δ one does.
        combined: measures the squared norm of the sum of all Δs on this rank's elements; None: norms are not measured.
        turns: sums Δ; None: all of ``vectors`` is summed at once.
        on_device: the device that alone waits for the sums on it, of Δ and of squared norms; None: the host waits.
        clips: whether the norm of the whole Δ is needed.
    """

    dtype = torch.float64
    """What numbers of a status are rounded to."""

    def __init__(
        self,
        setup: RankSetup,
        buffer: ReduceBuffer,
        vectors: list[Tensor],
        counted: Sequence[str],
        peers: Communicator | None,
        *,
        contributes: bool = True,
        combined: Callable[[], Number] | None = None,
        turns: Turns | None = None,
        on_device: torch.device | None = None,
        clips: bool = False,
    ) -> None:
        self._mesh, self._rank, self._communicator = setup.mesh, setup.context.world.rank, setup.context.communicator
        self._buffer, self._vectors, self._peers = buffer, vectors, peers
        self._contributes, self._measured, self.turns = contributes, combined, turns
        self.combined: LateNumbers | None = None
        """Squared norm of the newest sum on this rank's elements, if the host does not wait for it."""
        self._replica = self._mesh.coordinate(self._rank).replica
        self._replica_ranks = self._mesh.replica_ranks(self._replica)
        parameters = dict(zip(buffer.state.layout.parameter_names, buffer.state.views.parameters, strict=True))
        every = len(parameters) == len(counted)
        self._counted = buffer.state.parameters if every else [parameters[name] for name in counted]
        self._table = torch.zeros(self._mesh.workers, FIELDS + NORMS * (combined is not None) + 1, dtype=self.dtype)
        self._on_device = on_device is not None
        self._squares: Tensor | None = None
        """|Σ Δ|² of the elements that count on each rank; None: they are in the table."""
        if clips and on_device is not None:
            self._squares = torch.zeros(self._mesh.workers, dtype=self.dtype, device=on_device)
        self.square: float | Tensor = 0.0
        """|Σ Δ|² over all ranks of a replica, as contributed; on the device if that alone waits for it."""

    def exchange(self, status: RankStatus, step: Clock, version: Version = 0) -> list[RankStatus]:
        """Return one status of each replica; Δ is then summed among the peers."""
        # Δ first: the norm in the statuses is that of the sum over replicas.
        self._buffer.clear_rows()
        if self._contributes:
            self._buffer.set_counters(self._replica)
        else:
            self._buffer.zero()
        if self._peers is not None and self.turns is not None:
            self.turns.sum(self._peers, self._buffer, None, version, of_step(step))
        elif self._peers is not None and self._on_device:
            _sum_on_device(self._peers, self._vectors, of_step(step))
        elif self._peers is not None:
            self._peers.all_reduce(self._vectors, of_step(step))
        if self._measured is not None and status.norm is not None and self._mesh.replicas > 1:
            measured = self._measured()
            if self._on_device:
                self.combined = LateNumbers.of((measured,), lambda read: read[0])
            else:
                status = status._replace(norm=status.norm._replace(combined=float(measured)))

        if self._squares is not None:
            self.square = self._square_on_device(self._squares, step)
        self._table.zero_()
        square = square_norm(self._counted) if self._counted and self._squares is None else 0.0
        row = [*status.encode(), square]
        self._table[self._rank] = torch.tensor(row, dtype=torch.float64)
        if self._communicator is not None:
            self._communicator.all_reduce([self._table.view(-1)], of_step(step))
        rows = self._table.tolist()
        if self._squares is None:
            # Summed in ascending rank, so that every rank computes the same bits and clips by the same scale.
            self.square = sum(rows[rank][-1] for rank in self._replica_ranks)
        statuses = [RankStatus.decode(row, norms=self._measured is not None) for row in rows]
        return by_replica(statuses, self._mesh.replicas)

    def _square_on_device(self, squares: Tensor, step: Clock) -> Tensor:
        """Return the squared norm of this replica's Δ, which its ranks add up in one order, on the device."""
        squares.zero_()
        squares[self._rank] = square_norm_on_device(self._counted, squares.device)
        if self._communicator is not None:
            _sum_on_device(self._communicator, [squares], of_step(step))
        return squares[self._replica_ranks.start : self._replica_ranks.stop].sum()
