"""The median of each coordinate."""

from dataclasses import dataclass
from typing import final

from paceline.core.registry import register
from paceline.reduction.base import Reducer, Reduction, Tensor


@final
@register("median")
@dataclass(frozen=True)
class Median(Reducer):
    """Median of each coordinate, of an even number the mean of the two in the middle (Yin et al. 2018, 1803.01498).

    Fewer than half of the replicas can't move it beyond what the others sent. Weights are of no effect.
    """

    def combine(self, given: Reduction, out: Tensor) -> None:
        import torch

        ordered = torch.stack(list(given.deltas)).sort(dim=0).values
        middle = len(given.deltas) // 2
        if len(given.deltas) % 2:
            out.copy_(ordered[middle])
        else:
            torch.add(ordered[middle - 1], ordered[middle], out=out).mul_(0.5)
