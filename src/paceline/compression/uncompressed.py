"""``none``: the gradient as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from paceline.compression.base import Compression, Shape, ring_bytes
from paceline.core.registry import register

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


@final
@register("none")
@dataclass(frozen=True)
class Uncompressed(Compression[None]):
    """One all-reduce of the gradient: the yardstick of all others."""

    def start(self, shapes: Sequence[Shape], dtype: "torch.dtype", device: "torch.device | str" = "cpu") -> None:
        del shapes, dtype, device

    def all_reduce(self, state: None, gradient: "Tensor", group: "dist.ProcessGroup") -> int:
        import torch.distributed as dist

        del state
        dist.all_reduce(gradient, group=group)
        return ring_bytes(gradient, group.size())
