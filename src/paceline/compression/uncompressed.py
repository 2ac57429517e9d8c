"""``none``: the gradient as it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from paceline.compression.base import Stateless, all_reduce
from paceline.core.registry import register

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


@final
@register("none")
@dataclass(frozen=True)
class Uncompressed(Stateless):
    """One all-reduce of the gradient: the yardstick of all others."""

    def all_reduce(self, state: None, gradient: "Tensor", group: "dist.ProcessGroup") -> int:
        del state
        return all_reduce(gradient, group)
