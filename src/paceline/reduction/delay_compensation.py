"""A gradient of an old A, corrected for how far A has come since."""

from dataclasses import dataclass
from typing import final

from paceline.core.errors import check_positive
from paceline.core.registry import register
from paceline.reduction.base import Reducer, Reduction, Tensor


@final
@register("delay-compensation")
@dataclass(frozen=True)
class DelayCompensation(Reducer):
    """Σ weight·(Δ + λ·Δ⊙Δ⊙(A - A as it was read)): to first order, the gradient at A (Zheng et al. 2017, 1609.08326).

    λ·Δ⊙Δ stands for the diagonal of the Hessian. It is that paper's DC-ASGD-c, with a constant λ.

    Args:
        strength: λ; 0.04 in that paper.
    """

    strength: float = 0.04

    def __post_init__(self) -> None:
        check_positive("delay-compensation:strength", self.strength, instead=0.04)

    @property
    def reads(self) -> bool:
        return True

    def combine(self, given: Reduction, out: Tensor) -> None:
        out.zero_()
        for delta, weight, read in zip(given.deltas, given.weights, given.read, strict=True):
            moved = (given.current - read).mul_(delta).mul_(delta)
            out.add_(delta, alpha=weight).add_(moved, alpha=weight * self.strength)
