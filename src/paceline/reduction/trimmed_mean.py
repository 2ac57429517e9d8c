"""The mean of each coordinate without its extremes."""

from dataclasses import dataclass
from typing import final

from paceline.core.errors import InputError, check_int
from paceline.core.registry import register
from paceline.core.text_form import text_of
from paceline.reduction.base import Reducer, Reduction, Tensor


@final
@register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """Mean of each coordinate without its ``trim`` smallest and largest values (Yin et al. 2018, 1803.01498).

    With too few Δs for that, as many are left out on each side as leave one. Weights are of no effect.

    Args:
        trim: values left out on each side: as many as replicas may err.
    """

    trim: int = 1

    def __post_init__(self) -> None:
        check_int("trimmed-mean:trim", self.trim, least=0)

    def check(self, deltas: int) -> None:
        if deltas <= 2 * self.trim:
            raise InputError(
                f"{text_of(self)} of {deltas} Δs leaves none; write trimmed-mean:trim={(deltas - 1) // 2}, or by=median"
            )

    def combine(self, given: Reduction, out: Tensor) -> None:
        import torch

        count = len(given.deltas)
        trim = min(self.trim, (count - 1) // 2)
        kept = torch.stack(list(given.deltas)).sort(dim=0).values[trim : count - trim]
        torch.mean(kept, dim=0, out=out)
