"""Gradients are clipped by the norm of all parameters.

Where one process has all of them, :func:`clip` does it, on a device without waiting for it. Where they are sharded,
each rank adds up ``square_norm`` of what it has, the squares are all-reduced, and all ranks scale by ``clip_scale`` of
the sum (:func:`clip_by_square`).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.device import CPU, WITHOUT_FLOAT64


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
    """Scale the vectors in place so that their norm is at most ``bound``.

    On a device that has float64 the scale is computed there, as the host does it, and the host does not wait; but for
    half precision, to which a scale on the device would be rounded.
    """
    if not vectors or any(not _keeps_scale(v) for v in vectors):
        clip_by_square(vectors, square_norm(vectors), bound)
        return
    clip_on_device(vectors, square_norm_on_device(vectors, vectors[0].device), bound)


def square_norm_on_device(vectors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the square of the Euclidean norm over all vectors as a tensor of float64 on their device."""
    squares = [torch.linalg.vector_norm(v).double().square() for v in vectors]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def clip_on_device(vectors: Iterable[Tensor], square: Tensor, bound: float) -> None:
    """As :func:`clip_by_square`, for a square on the device of the vectors, which the host does not wait for."""
    # A quotient of two tensors: torch multiplies a number by the reciprocal.
    scale = (torch.full_like(square, bound) / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for vector in vectors:
        if vector.dtype.itemsize >= 4:
            vector.mul_(scale)
        else:  # a product with half precision would round the scale itself to that
            vector.copy_(vector.float().mul_(scale))


def has_float64(device: torch.device) -> bool:
    """Return whether a device other than the CPU computes in float64."""
    return device.type not in (CPU.type, *WITHOUT_FLOAT64)


def _keeps_scale(vector: Tensor) -> bool:
    """Return whether a vector is on a device that multiplies it by a number of float64 of its own."""
    return has_float64(vector.device) and vector.dtype.itemsize >= 4
