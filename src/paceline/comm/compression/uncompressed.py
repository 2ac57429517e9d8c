"""``none``: the gradient as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.compression.base import Compression, Shape, carries, ring_bytes
from paceline.compression import Whole


@carries(Whole)
@final
@dataclass(frozen=True)
class WholeReduction(Compression[None]):
    """One all-reduce of the gradient: the yardstick of all others."""

    method: Whole

    def start(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        del shapes, dtype, device

    def all_reduce(self, state: None, gradient: Tensor, group: dist.ProcessGroup) -> int:
        del state
        dist.all_reduce(gradient, group=group)
        return ring_bytes(gradient, group.size())
