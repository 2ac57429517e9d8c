"""Clipping by the norm over all parameters, in the two parts that it takes where they lie in several places."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def square_norm(vectors: Iterable[Tensor]) -> float:
    """The square of the Euclidean norm over all vectors."""
    return sum(float(torch.linalg.vector_norm(v)) ** 2 for v in vectors)


def clip_scale(square: float, bound: float) -> float:
    """What a vector of this squared norm is to be multiplied by, for its norm to be at most ``bound``.

    As torch's clip_grad_norm_ has it.

    >>> round(clip_scale(25.0, 1.0), 3), clip_scale(0.25, 1.0)
    (0.2, 1.0)
    """
    return min(1.0, bound / (math.sqrt(square) + 1e-6))


def clip(vectors: list[Tensor], bound: float) -> None:
    """Scale the vectors so that their norm is at most ``bound``."""
    scale = clip_scale(square_norm(vectors), bound)
    if scale < 1.0:
        torch._foreach_mul_(vectors, scale)
