"""``fp16``: every element in 16 bits, moved into their range first.

A float16 ends at 65504 and its steps end at 2^-24, and gradients know neither bound. So the ranks agree on the largest
magnitude there is, one number in addition to the gradient, and each multiplies by one power of two: the largest
possible sum of P ranks is then just below 2^15. A power of two changes no digit. Nothing overflows, and what is lost at
the other end is less than 2^-38·P² of the largest element. With u = 2^-11 and the power of two c:

    |error| ≤ ((1 + u)^P − 1) · Σ_ranks |g| + P · 2^-25 / c

If a rank's gradient is not finite, nothing is moved: what is infinite or not a number stays so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.compression.base import DType, Group, Shape, Stateless, Tensor, all_reduce, joined, ring_bytes, split
from paceline.core.registry import register

# Sums stay below 2 to this power: roundings on the way then still end below 65504, with up to a thousand ranks.
LARGEST = 15


@final
@register("fp16")
@dataclass(frozen=True)
class Fp16(Stateless):
    """Two all-reduces: of the largest magnitude, then of the gradient in float16, 11 significant bits."""

    def all_reduce(self, state: None, gradient: Tensor, group: Group) -> int:
        import torch
        import torch.distributed as dist

        del state
        ranks, peak = group.size(), largest(gradient)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        exponent = scale(float(peak), ranks, torch.finfo(gradient.dtype).tiny)
        small = gradient.mul(2.0**exponent).to(torch.float16)
        sent_bytes = ring_bytes(peak, ranks) + all_reduce(small, group)
        gradient.copy_(small).mul_(2.0**-exponent)
        return sent_bytes

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        del dtype
        return 4 + 2 * sum(map(math.prod, shapes))

    def encode(self, state: None, gradient: Tensor) -> Tensor:
        import torch

        del state
        exponent = scale(float(largest(gradient)), 1, torch.finfo(gradient.dtype).tiny)
        small = gradient.mul(2.0**exponent).to(torch.float16)
        gradient.copy_(small).mul_(2.0**-exponent)
        return joined(torch.tensor([exponent], dtype=torch.int32), small)

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        import torch

        del shapes
        exponent, small = split(message, (1, torch.int32), (len(out), torch.float16))
        out.copy_(small).mul_(2.0 ** -int(exponent))


def largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude, one element; infinity where one is not finite."""
    import torch

    if not len(gradient):
        return gradient.new_zeros(1)
    low, high = torch.aminmax(gradient)
    return torch.maximum(-low, high).nan_to_num(nan=math.inf, posinf=math.inf).reshape(1)


def scale(peak: float, ranks: int, tiny: float) -> int:
    """Return the power of two that moves the largest possible sum just below 2^15; 0 if all is zero or not finite.

    >>> import torch
    >>> tiny = torch.finfo(torch.float32).tiny  # the smallest number of the gradient's type
    >>> scale(1.0, 4, tiny), scale(60000.0, 2, tiny)
    (12, -2)
    """
    if peak == 0.0 or not math.isfinite(peak):
        return 0
    # 2^exponent and its inverse have to be numbers of the gradient's own type.
    farthest = -math.frexp(tiny)[1] + 1
    exponent = LARGEST - math.frexp(peak)[1] - (ranks - 1).bit_length()
    return max(-farthest, min(farthest, exponent))
