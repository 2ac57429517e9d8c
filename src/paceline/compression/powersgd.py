"""``powersgd``: a gradient's matrices as products of two thin ones (Vogels et al. 2019, arXiv 1905.13727, algorithm 2).

For a matrix M of n rows and m columns on each rank, its residual added, and Q from the step before::

    rank 0   M --> M·Q' --+                +-->  B'·M  --+               +-->  B·Σ B'·M  =  B·B'·Σ M
                          |-- all-reduce --|             |-- all-reduce --|
    rank 1   M --> M·Q' --+   B = orth(Σ)  +-->  B'·M  --+   the next Q   +-->  the same
             n × m      n × r                    r × m

One such step is a step of the power iteration, so Q turns towards the largest singular vectors of what is being summed
(warm start). r·(n + m) elements travel instead of n·m. A parameter of one dim, or one that would not shrink to half,
is sent whole and exactly, together with M·Q'. More dims than two: the first is the rows, all others are the columns.

What a rank keeps for its next step is M − B·B'·M, what its own compression lost, as in the paper's algorithm 1. (The
paper's published code keeps M minus the mean of the result instead. Over the ranks both sum up to the same; but that
one grows for ever where ranks have different data, and this one does not.) Q is made orthonormal too before it is
used, which changes no span and keeps small gradients away from the smallest floats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from paceline.compression.base import Compression, Device, DType, Group, Kept, Shape, Tensor, all_reduce, joined, split
from paceline.core.errors import check_int
from paceline.core.registry import register

# For the first Q: the same on every rank.
SEED = 0


@dataclass(frozen=True)
class Place:
    """Position of a parameter in the gradient, as rows × columns."""

    start: int
    rows: int
    columns: int

    def of(self, vector: Tensor) -> Tensor:
        """Return the parameter's view of a vector."""
        return vector[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass
class LowRankState:
    """State that is kept from step to step."""

    matrices: tuple[Place, ...]
    """Compressed parameters."""
    rest: tuple[Place, ...]
    """Parameters that are sent whole."""
    residual: Tensor
    """Loss of the compression so far, as long as the gradient; 0 for what is sent whole."""
    queries: list[Tensor]
    """Q of each matrix, one row for each of its r directions."""


@final
@register("powersgd")
@dataclass(frozen=True)
class PowerSgd(Compression[LowRankState]):
    """Two all-reduces of factors of low rank.

    Args:
        rank: r of each matrix that is sent. With 4, the paper reaches SGD's accuracy in both of its tasks.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_int("powersgd:rank", self.rank, least=1)

    def start(self, shapes: Sequence[Shape], dtype: DType, device: Device = "cpu") -> LowRankState:
        import torch

        matrices, rest = self._places(shapes)
        generator = torch.Generator().manual_seed(SEED)
        queries = [torch.randn(self.rank, p.columns, dtype=dtype, generator=generator).to(device) for p in matrices]
        residual = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        return LowRankState(tuple(matrices), tuple(rest), residual, queries)

    def _places(self, shapes: Sequence[Shape]) -> tuple[list[Place], list[Place]]:
        """Return the parameters that are compressed, and those that are sent whole."""
        matrices, rest, start = list[Place](), list[Place](), 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            place = Place(start, rows, math.prod(shape) // max(rows, 1))
            halves = 2 * self.rank * (place.rows + place.columns) <= place.rows * place.columns
            (matrices if halves else rest).append(place)
            start += math.prod(shape)
        return matrices, rest

    def all_reduce(self, state: LowRankState, gradient: Tensor, group: Group) -> int:
        import torch

        gradient.add_(state.residual)
        matrices = [place.of(gradient) for place in state.matrices]
        whole = [place.of(gradient) for place in state.rest]
        products = [matrix @ _orthonormal(q.T) for matrix, q in zip(matrices, state.queries, strict=True)]
        first, sent_bytes = _sum([*whole, *products], group)
        if not bool(torch.isfinite(first).all()):
            gradient.fill_(math.nan)
            return sent_bytes
        sums = _split(first, [*whole, *products])
        bases = [_orthonormal(product) for product in sums[len(whole) :]]
        factors = [base.T @ matrix for base, matrix in zip(bases, matrices, strict=True)]
        # The residual is taken from this rank's own matrix, before the sum replaces it.
        self._keep_lost(state, matrices, bases, factors)
        second, second_bytes = _sum(factors, group)
        state.queries = _split(second, factors)
        for matrix, base, q in zip(matrices, bases, state.queries, strict=True):
            torch.mm(base, q, out=matrix)
        for parameter, total in zip(whole, sums[: len(whole)], strict=True):
            parameter.copy_(total)
        return sent_bytes + second_bytes

    def _keep_lost(
        self, state: LowRankState, matrices: Sequence[Tensor], bases: Sequence[Tensor], factors: Sequence[Tensor]
    ) -> None:
        import torch

        for place, matrix, base, factor in zip(state.matrices, matrices, bases, factors, strict=True):
            lost = torch.mm(base, factor, out=place.of(state.residual))
            torch.sub(matrix, lost, out=lost)

    whole_parameters: ClassVar[bool] = True

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        return sum(self._sizes(*self._places(shapes))) * dtype.itemsize

    def encode(self, state: LowRankState, gradient: Tensor) -> Tensor:
        import torch

        gradient.add_(state.residual)
        if not bool(torch.isfinite(gradient).all()):
            size = sum(self._sizes(state.matrices, state.rest))
            return joined(gradient.fill_(math.nan).new_full((size,), math.nan))
        matrices = [place.of(gradient) for place in state.matrices]
        whole = [place.of(gradient) for place in state.rest]
        products = [matrix @ _orthonormal(q.T) for matrix, q in zip(matrices, state.queries, strict=True)]
        bases = [_orthonormal(product) for product in products]
        state.queries = [base.T @ matrix for base, matrix in zip(bases, matrices, strict=True)]
        self._keep_lost(state, matrices, bases, state.queries)
        message = joined(*bases, *state.queries, *whole)
        self._write(state.matrices, state.rest, message, gradient)
        return message

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        self._write(*self._places(shapes), message, out)

    def _sizes(self, matrices: Sequence[Place], rest: Sequence[Place]) -> list[int]:
        """Return the elements of each tensor of a message: bases, factors, what is sent whole."""
        bases, factors = [self.rank * p.rows for p in matrices], [self.rank * p.columns for p in matrices]
        return [*bases, *factors, *(p.rows * p.columns for p in rest)]

    def _write(self, matrices: Sequence[Place], rest: Sequence[Place], message: Tensor, out: Tensor) -> None:
        import torch

        pieces, count = split(message, *((size, out.dtype) for size in self._sizes(matrices, rest))), len(matrices)
        for place, base, factor in zip(matrices, pieces[:count], pieces[count : 2 * count], strict=True):
            torch.mm(base.view(place.rows, self.rank), factor.view(self.rank, -1), out=place.of(out))
        for place, values in zip(rest, pieces[2 * count :], strict=True):
            place.of(out).copy_(values.view(place.rows, place.columns))

    def kept(self, state: LowRankState) -> Kept:
        return state.residual, {f"query/{i}": query for i, query in enumerate(state.queries)}


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal base of at least what the columns span, as many vectors as columns."""
    import torch

    base: Tensor = torch.linalg.qr(columns).Q
    return base


def _sum(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, int]:
    """Return the sums over the ranks, in one vector and one message, and the bytes sent."""
    import torch

    flat = torch.cat([t.flatten() for t in tensors]) if tensors else torch.empty(0)
    return flat, all_reduce(flat, group) if len(flat) else 0


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    import torch

    pieces = torch.split(flat, [t.numel() for t in like])
    return [piece.view_as(t) for piece, t in zip(pieces, like, strict=True)]
