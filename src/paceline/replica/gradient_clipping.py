"""Gradients are clipped by the norm of all parameters.

Where one process has all of them, :func:`clip` does it. Where they are sharded, each rank adds up ``square_norm`` of
what it has, the squares are all-reduced, and all ranks scale by ``clip_scale`` of the sum (:func:`clip_by_square`).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def square_norm(vectors: Iterable[Tensor]) -> float:
    """Return the square of the Euclidean norm over all vectors."""
    return sum(float(torch.linalg.vector_norm(v)) ** 2 for v in vectors)


def clip_scale(square: float, bound: float) -> float:
    """Return the factor that bounds the norm of a vector of this squared norm, as torch's clip_grad_norm_ computes it.

    >>> round(clip_scale(25.0, 1.0), 3), clip_scale(0.25, 1.0)
    (0.2, 1.0)
    """
    return min(1.0, bound / (math.sqrt(square) + 1e-6))


def clip_by_square(vectors: list[Tensor], square: float, bound: float) -> None:
    """Scale the vectors in place, whose squared norm, over all ranks, is ``square``, to a norm of at most ``bound``."""
    scale = clip_scale(square, bound)
    if scale < 1.0 and vectors:
        torch._foreach_mul_(vectors, scale)


def clip(vectors: list[Tensor], bound: float) -> None:
    """Scale the vectors in place so that their norm is at most ``bound``."""
    clip_by_square(vectors, square_norm(vectors), bound)
