"""Long vectors in pieces that stay in the caches: memory is read once for all that is done to a piece."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

PIECE = 2**16
"""Elements: in float32 a quarter of a megabyte, and a step works on up to four such pieces at once."""


def pieces(elements: int) -> Iterator[slice]:
    """Where they lie in a vector.

    >>> [(piece.start, piece.stop) for piece in pieces(150_000)]
    [(0, 65536), (65536, 131072), (131072, 196608)]
    """
    return (slice(start, start + PIECE) for start in range(0, elements, PIECE))


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Copy each source into its target, which is contiguous; whether all elements are finite."""
    clear = True
    for source, target in zip(sources, targets, strict=True):
        if source.is_contiguous():
            flat, whole = source.view(-1), target.view(-1)
            for piece in pieces(len(flat)):
                clear = _surely_finite(whole[piece].copy_(flat[piece])) and clear
        else:
            clear = _surely_finite(target.copy_(source)) and clear
    return clear or all(bool(target.isfinite().all()) for target in targets)


def _surely_finite(x: Tensor) -> bool:
    """Whether its sum is finite: then all that it adds are. A sum may also overflow, so False says nothing."""
    return math.isfinite(abs(x.sum().item()))
