"""``bf16``: every element in 16 bits with the exponents of float32, so nothing of a float32 gradient overflows.

Each of P ranks rounds its term once and the sum is rounded P-1 times, each time to 8 significant bits, u = 2^-8:

    |error| ≤ ((1 + u)^P − 1) · Σ_ranks |g|

A rounding is off by u/2 at most; the bound holds with u for backends that cut off instead of rounding to the nearest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.compression.base import DType, Group, Shape, Stateless, Tensor, all_reduce, joined, split
from paceline.core.registry import register


@final
@register("bf16")
@dataclass(frozen=True)
class Bf16(Stateless):
    """One all-reduce in bfloat16: 8 significant bits, half of float32's bytes."""

    def all_reduce(self, state: None, gradient: Tensor, group: Group) -> int:
        del state
        small = gradient.bfloat16()
        sent_bytes = all_reduce(small, group)
        gradient.copy_(small)
        return sent_bytes

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        del dtype
        return 2 * sum(map(math.prod, shapes))

    def encode(self, state: None, gradient: Tensor) -> Tensor:
        del state
        small = gradient.bfloat16()
        gradient.copy_(small)
        return joined(small)

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        import torch

        del shapes
        [small] = split(message, (len(out), torch.bfloat16))
        out.copy_(small)
