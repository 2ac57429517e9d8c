"""The flat buffer that a rank contributes to an all-reduce, the status of each rank in it, and the exchanges by it.

Δ, the running buffers and a table with a status row for each rank are one vector for each dtype::

    float32 vector   | parameters ................ | running buffers ... | status of all ranks |
                       ^ Δ is written here           ^ and here            ^ each rank fills its own row

Each rank leaves the rows of the others zero, so one all-reduce sums Δ and spreads all statuses. Where a replica has
several ranks, they exchange the table alone, and the ranks that have the same part of A in other replicas sum Δ.

The table of statuses has a row for each rank. A rank fills its own and leaves the others zero, so their sum is the
whole table::

    rank 0   | kind | samples | finite | stop | loss | when | counters |     + zeros
    rank 1     zeros                                                              + | kind | ...

Whole numbers that may be large are stored as digits that float32 represents exactly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.delta import Change, Delta
from paceline.core.types import Clock, Nanoseconds, Version
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.rank_context import RankSetup
from paceline.replica.flat_optimizer import square_norm
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.own_parameters import fragments_of

# Bits of one digit of an integer: a float32 represents integers of 24 bits exactly.
BITS = 22

# Digits of an integer: three cover an int64.
DIGITS = 3

# Numbers in a status row, without norms and counters.
FIELDS = 2 + DIGITS * 2

# Numbers of a DeltaNorm in a row: two counts, and each of three norms in two parts.
NORMS = 8

_MASK = (1 << BITS) - 1


class StatusKind(IntEnum):
    """The contribution of a rank to an exchange."""

    left = 0
    """None: its replica has left."""
    delta = 1
    """A Δ, new or one that waits for its round."""
    leaving = 2
    """None: its replica leaves now."""


class DeltaNorm(NamedTuple):
    """Squared norms of a rank's Δ, over the elements that count on this rank.

    Args:
        square: of Δ, or the mean over its micro-steps where these were measured.
        parts: how many parts of Δ that is a mean of: 1, or its micro-steps; 0: nothing was measured.
        combined: of the combination of these: Δ itself, its mean with the previous Δ, or the sum of all replicas' Δs.
        previous: of the previous Δ, where that was kept.
        previous_samples: samples of the previous Δ; 0: none was kept.
    """

    square: float = 0.0
    parts: int = 0
    combined: float = 0.0
    previous: float = 0.0
    previous_samples: int = 0


class RankStatus(NamedTuple):
    """The metadata of a rank's contribution to an exchange.

    >>> a = RankStatus(StatusKind.delta, 4, finite=True, stop=False, loss=0.0, entered_ns=7)
    >>> b = RankStatus(StatusKind.delta, 4, finite=True, stop=True, loss=0.5, entered_ns=9)
    >>> RankStatus.decode(b.encode()) == b
    True
    >>> RankStatus.merge([a, b]) == b
    True

    Args:
        stop: whether the process was asked to end the run.
        saving: whether the process is still writing a checkpoint.
        joining: whether ranks that were started again ask to join.
        entered_ns: when it entered the exchange, in training time.
        norm: of its Δ; None: norms are not measured in this run.
    """

    kind: StatusKind
    samples: int
    finite: bool
    stop: bool
    loss: float
    entered_ns: Nanoseconds
    norm: DeltaNorm | None = None
    saving: bool = False
    joining: bool = False

    def encode(self) -> list[float]:
        """Return the row of the status table."""
        flags = int(self.kind) + 4 * self.finite + 8 * self.stop + 16 * self.saving + 32 * self.joining
        row = [flags, self.loss, *to_digits(self.samples), *to_digits(self.entered_ns)]
        if self.norm is not None:
            # Roots, since squares may exceed float32; what float32 rounds off a root is a second number.
            roots = [math.sqrt(square) for square in (self.norm.square, self.norm.combined, self.norm.previous)]
            rounded = torch.tensor(roots, dtype=torch.float32).tolist()
            rests = [root - near for root, near in zip(roots, rounded, strict=True)]
            row += [self.norm.parts, self.norm.previous_samples, *rounded, *rests]
        return row

    @classmethod
    def decode(cls, row: Sequence[float], *, norms: bool = False) -> "RankStatus":
        """Rebuild the status from its row, with norms or without."""
        flags, loss, *integers = row[:FIELDS]
        norm = None
        if norms:
            parts, previous_samples, *roots = row[FIELDS : FIELDS + NORMS]
            lengths = [near + rest for near, rest in zip(roots[:3], roots[3:], strict=True)]
            square, combined, previous = (length * length for length in lengths)
            norm = DeltaNorm(square, int(parts), combined, previous, int(previous_samples))
        kind, finite, stop = StatusKind(int(flags) & 3), bool(int(flags) & 4), bool(int(flags) & 8)
        samples, entered_ns = from_digits(integers[:DIGITS]), from_digits(integers[DIGITS:])
        saving, joining = bool(int(flags) & 16), bool(int(flags) & 32)
        return cls(kind, samples, finite, stop, loss, entered_ns, norm, saving, joining)

    @staticmethod
    def merge(parts: Sequence["RankStatus"]) -> "RankStatus":
        """Combine the statuses of a replica's ranks to the replica's; the last rank knows the loss."""
        last, norms = parts[-1], [part.norm for part in parts if part.norm is not None]
        norm = None
        if norms:  # each rank measures its own elements, so squares add up
            square, combined, previous = (
                sum(column) for column in zip(*((n[0], n[2], n[3]) for n in norms), strict=True)
            )
            norm = DeltaNorm(square, norms[-1].parts, combined, previous, norms[-1].previous_samples)
        finite, stop = all(part.finite for part in parts), any(part.stop for part in parts)
        saving, entered_ns = any(part.saving for part in parts), max(part.entered_ns for part in parts)
        return RankStatus(last.kind, last.samples, finite, stop, last.loss, entered_ns, norm, saving)


def to_digits(number: int) -> list[int]:
    """Split an integer into digits that a float32 represents exactly, the lowest first.

    >>> to_digits(5 + (7 << 22)), to_digits(-1)
    ([5, 7, 0], [4194303, 4194303, -1])
    """
    return [number & _MASK, (number >> BITS) & _MASK, number >> (2 * BITS)]


def from_digits(digits: Sequence[float]) -> int:
    """Return the integer of these digits.

    >>> from_digits(to_digits(-(2**60) + 3)) == -(2**60) + 3
    True
    """
    low, middle, high = map(int, digits)
    return low + (middle << BITS) + (high << (2 * BITS))


def by_replica(statuses: Sequence[RankStatus], replicas: int) -> list[RankStatus]:
    """Merge the statuses of all ranks to one for each replica, whose ranks are neighbours."""
    each = len(statuses) // replicas
    return [RankStatus.merge(statuses[start : start + each]) for start in range(0, len(statuses), each)]


class ReduceBuffer:
    """Flat buffer that a rank contributes to the all-reduce; holds the sums afterwards.

    Args:
        layout: of A, or of its running buffers alone where Δ is summed elsewhere.
        ranks: rows of the status table.
        norms: whether rows have norms.
    """

    def __init__(self, layout: FlatLayout, ranks: int, *, norms: bool = False) -> None:
        self._layout, self._ranks, self._norms = layout, ranks, norms
        self.vectors: list[Tensor] = []
        """The buffer: reduced whole where Δ is summed in it."""
        self.renew()

    def renew(self) -> None:
        """Take new memory, all zeros; a collective that was given up may still write into what there was."""
        layout, ranks, norms = self._layout, self._ranks, self._norms
        # One vector for each dtype: parameters, then floating-point running buffers, then the table.
        blocks = (*layout.parameters, *(b for b in layout.buffers if b.dtype.is_floating_point))
        sizes: dict[torch.dtype, int] = {}
        starts = []
        for block in blocks:
            starts.append(sizes.get(block.dtype, 0))
            sizes[block.dtype] = starts[-1] + block.elements
        table_dtype = next((dtype for dtype in (torch.float64, torch.float32) if dtype in sizes), torch.float64)
        table_start = sizes.get(table_dtype, 0)
        counters = sum(b.elements for b in layout.buffers if not b.dtype.is_floating_point)
        self._fields = FIELDS + NORMS * norms
        width = self._fields + DIGITS * counters
        sizes[table_dtype] = table_start + ranks * width
        vectors = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
        self.vectors[:] = vectors.values()
        self.nbytes = sum(v.nbytes for v in self.vectors)
        self.table = vectors[table_dtype][table_start:].view(ranks, width)
        """A row for each rank: its status, and its integer buffers (counters) as digits."""

        self._sums = [vectors[b.dtype][s : s + b.elements] for b, s in zip(blocks, starts, strict=True)]
        self._floats = self._sums[len(layout.parameters) :]
        floats = iter(self._floats)
        buffers = [
            next(floats) if b.dtype.is_floating_point else torch.zeros(b.elements, dtype=b.dtype)
            for b in layout.buffers
        ]
        self.state = FlatState(layout, self._sums[: len(layout.parameters)], buffers)
        """Views of the buffer: Δ is written here, and Σ weight·Δ is here afterwards."""
        self._counters = [b for b in buffers if not b.is_floating_point()]
        self._parameters = {block.dtype: block.elements for block in layout.parameters}

    def cut(self, slices: Sequence[slice]) -> list[Tensor]:
        """Return these slices of Δ; views of the buffer."""
        cut = (vector[each] for vector, each in zip(self.state.parameters, slices, strict=True))
        return [vector for vector in cut if len(vector)]

    def tails(self, last: Mapping[torch.dtype, int] | None = None) -> list[Tensor]:
        """Return the running buffers and the table, and the last so many elements of Δ of a dtype."""
        starts = [self._parameters.get(v.dtype, 0) - (last or {}).get(v.dtype, 0) for v in self.vectors]
        return [tail for v, start in zip(self.vectors, starts, strict=True) if len(tail := v[start:])]

    def scale(self, weight: float) -> None:
        """Multiply Δ and the floating-point running buffers."""
        if weight != 1.0 and self._sums:
            torch._foreach_mul_(self._sums, weight)

    def scale_buffers(self, factor: float) -> None:
        """Multiply the floating-point running buffers alone."""
        if self._floats:
            torch._foreach_mul_(self._floats, factor)

    def zero(self) -> None:
        """Contribute nothing to the sums."""
        if self._sums:
            torch._foreach_zero_(self._sums)

    def set_counters(self, rank: int) -> None:
        """Write this rank's integer buffers as digits into its row: sums of floats would round them."""
        if self._counters:
            flat = torch.cat([c.to(torch.int64) for c in self._counters])
            digits = torch.stack([flat & _MASK, (flat >> BITS) & _MASK, flat >> (2 * BITS)])
            self.table[rank, self._fields :] = digits.flatten()

    def take_counters(self, ranks: list[int]) -> None:
        """Set each integer buffer to the largest of these ranks'."""
        if self._counters:
            digits = self.table[ranks, self._fields :].to(torch.int64).view(len(ranks), DIGITS, -1)
            largest = (digits[:, 0] + (digits[:, 1] << BITS) + (digits[:, 2] << (2 * BITS))).amax(dim=0)
            values = torch.split(largest, [c.numel() for c in self._counters])
            for counter, value in zip(self._counters, values, strict=True):
                counter.copy_(value)

    def copy_running_buffers(self, state: FlatState) -> None:
        """Write the reduced running buffers into A; integer ones never decrease."""
        for own, reduced in zip(state.buffers, self.state.buffers, strict=True):
            own.copy_(reduced if own.is_floating_point() else torch.maximum(own, reduced))


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
    """

    buffer: ReduceBuffer
    vectors: list[Tensor]
    rank: int
    communicator: Communicator | None
    contribution: ReduceBuffer | None = None
    turns: Turns | None = None

    def exchange(self, status: RankStatus, step: Clock, version: Version = 0) -> list[RankStatus]:
        """Return one status of each replica; contributions are then summed where they have to be, or being summed."""
        own, norms = self.contribution or self.buffer, status.norm is not None
        table = own.table.zero_()
        row = torch.tensor(status.encode(), dtype=table.dtype)
        table[self.rank, : len(row)] = row
        own.set_counters(self.rank)
        if self.communicator is not None:
            if self.turns is not None:
                self.turns.sum(self.communicator, self.buffer, self.contribution, version, of_step(step))
            else:
                contributions = self.contribution.vectors if self.contribution is not None else None
                self.communicator.all_reduce(self.vectors, of_step(step), contributions)
        return [RankStatus.decode(each, norms=norms) for each in self.buffer.table[:, : len(row)].tolist()]


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
    """

    def __init__(
        self,
        setup: RankSetup,
        buffer: ReduceBuffer,
        vectors: list[Tensor],
        counted: Sequence[str],
        peers: Communicator | None,
        *,
        contributes: bool = True,
        combined: Callable[[], float] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._mesh, self._rank, self._communicator = setup.mesh, setup.context.world.rank, setup.context.communicator
        self._buffer, self._vectors, self._peers = buffer, vectors, peers
        self._contributes, self._combined, self.turns = contributes, combined, turns
        self._replica = self._mesh.coordinate(self._rank).replica
        self._replica_ranks = self._mesh.replica_ranks(self._replica)
        parameters = dict(zip(buffer.state.layout.parameter_names, buffer.state.views.parameters, strict=True))
        every = len(parameters) == len(counted)
        self._counted = buffer.state.parameters if every else [parameters[name] for name in counted]
        self._table = torch.zeros(self._mesh.workers, FIELDS + NORMS * (combined is not None) + 1, dtype=torch.float64)
        self.square = 0.0
        """|Σ Δ|² over all ranks of a replica, as contributed."""

    def exchange(self, status: RankStatus, step: Clock, version: Version = 0) -> list[RankStatus]:
        """Return one status of each replica; Δ is then summed among the peers."""
        # Δ first: the norm in the statuses is that of the sum over replicas.
        self._buffer.table.zero_()
        if self._contributes:
            self._buffer.set_counters(self._replica)
        else:
            self._buffer.zero()
        if self._peers is not None and self.turns is not None:
            self.turns.sum(self._peers, self._buffer, None, version, of_step(step))
        elif self._peers is not None:
            self._peers.all_reduce(self._vectors, of_step(step))
        if self._combined is not None and status.norm is not None and self._mesh.replicas > 1:
            status = status._replace(norm=status.norm._replace(combined=self._combined()))

        self._table.zero_()
        row = [*status.encode(), square_norm(self._counted) if self._counted else 0.0]
        self._table[self._rank] = torch.tensor(row, dtype=torch.float64)
        if self._communicator is not None:
            self._communicator.all_reduce([self._table.view(-1)], of_step(step))
        rows = self._table.tolist()
        # Summed in ascending rank, so that every rank computes the same bits and clips by the same scale.
        self.square = sum(rows[rank][-1] for rank in self._replica_ranks)
        statuses = [RankStatus.decode(row, norms=self._combined is not None) for row in rows]
        return by_replica(statuses, self._mesh.replicas)
