"""A threshold that watches the loss."""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.aggregation.base import Arrival, Need
from paceline.aggregation.thresholds import Threshold
from paceline.core.errors import check_int, check_positive
from paceline.core.registry import register


class Losses(NamedTuple):
    """The memory of :class:`LossDriven`."""

    seen: int = 0
    """Δs with a loss."""
    mean: float = 0.0
    """F_t: over the first ``window`` Δs the plain mean, then the exponential one with that many Δs' worth of weight."""
    first: float = math.inf
    """F_0: the mean when the first window was full."""
    lowest: float = math.inf
    """The lowest F_t since."""


@final
@register("loss-driven")
@dataclass(frozen=True)
class LossDriven(Threshold[Losses]):
    """K = ⌊initial · √(F_0 / F_t)⌋, never decreasing: AdaSync (Dutta et al. 2018, arXiv 1803.01113).

    F_t is a smoothed mean of the losses that come with the Δs (theirs is the loss over the training set); until the
    first window is full, K stays at ``initial``.

    Args:
        initial: K_0.
        window: Δs of the smoothing of F_0 and F_t.
    """

    initial: float = 1
    window: int = 100

    def __post_init__(self) -> None:
        check_positive("loss-driven:initial", self.initial, instead=1)
        check_int("loss-driven:window", self.window, least=1)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"loss"})

    def start(self) -> Losses:
        return Losses()

    def observe(self, memory: Losses, arrival: Arrival) -> Losses:
        if arrival.loss is None or arrival.samples == 0:
            return memory
        seen = memory.seen + 1
        # The plain mean of the first window, then an exponential one: the weight of a loss is never below 1/window.
        mean = memory.mean + (arrival.loss - memory.mean) / min(seen, self.window)
        if seen < self.window:
            return Losses(seen, mean)
        first = mean if seen == self.window else memory.first
        return Losses(seen, mean, first, min(memory.lowest, mean))

    def at(self, memory: Losses, u: int) -> float:
        del u
        if memory.seen < self.window:
            return self.initial
        if memory.lowest <= 0:
            return math.inf if memory.first > 0 else self.initial
        return self.initial * math.sqrt(memory.first / memory.lowest)
