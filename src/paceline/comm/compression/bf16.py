"""``bf16``: every element in 16 bits with the exponents of float32, so nothing of a float32 gradient overflows.

Each of P ranks rounds its share once and the sum is rounded P-1 times, each time to 8 significant bits, u = 2^-8:

    |error| ≤ ((1 + u)^P − 1) · Σ_ranks |g|

A rounding is off by u/2 at most; the bound holds with u for backends that cut off instead of rounding to the nearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.compression.base import Compression, Shape, carries, ring_bytes
from paceline.compression import Bf16


@carries(Bf16)
@final
@dataclass(frozen=True)
class Bf16Reduction(Compression[None]):
    """One all-reduce in bfloat16: half of float32's bytes."""

    method: Bf16

    def start(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        del shapes, dtype, device

    def all_reduce(self, state: None, gradient: Tensor, group: dist.ProcessGroup) -> int:
        del state
        small = gradient.to(torch.bfloat16)
        dist.all_reduce(small, group=group)
        gradient.copy_(small)
        return ring_bytes(small, group.size())
