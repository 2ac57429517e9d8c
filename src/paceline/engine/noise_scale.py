"""The gradient noise scale of a run: estimated where gradients are applied, accumulated for records and the summary.

Looks at gradients where they are applied: each as it passes by, and what is made of them.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.noise_scale import DECAY, Averages, Observation, Part, differenced, efficiency, observation
from paceline.core.types import Seconds, Version
from paceline.replica.base import MicroStepNorms
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatState
from paceline.replica.noise_norms import Preconditioner, Scales, square


class NoiseAccumulator:
    """One run's.

    Args:
        reference: m₀, the batch against which efficiency is told; None: that of the first micro-step.
    """

    def __init__(self, reference: int | None) -> None:
        self._reference: float | None = reference
        self._lately, self._overall = Averages(DECAY), Averages()
        self._last: tuple[Seconds, int] = (0.0, 0)

    def heard(self, samples: float) -> None:
        """A Δ has come whose micro-steps had so many samples, in the mean."""
        self._reference = self._reference or samples

    def take(self, seen: Observation | None) -> None:
        """An update has told something, or nothing; nothing either where training has run away."""
        if seen is not None and math.isfinite(seen.noise * seen.noise + seen.signal * seen.signal):
            self._lately, self._overall = self._lately.add(seen), self._overall.add(seen)

    def now(self) -> dict[str, float | None]:
        """As things stand, goodput aside."""
        return self._told(self._lately)

    def since_last(self, time_s: Seconds, samples: int) -> dict[str, float | None]:
        """As things stand, with the goodput since this was last asked.

        Args:
            time_s: of training, so far.
            samples: applied so far.
        """
        (began_s, before), self._last = self._last, (time_s, samples)
        return _with_goodput(self.now(), time_s - began_s, samples - before)

    def whole(self, time_s: Seconds, samples: int) -> dict[str, float | None]:
        """Over the whole run: ``noise_scale`` as it stood at the end, all else from means over all updates."""
        overall = self._overall
        means = self._told(overall) | {"noise_scale": self._lately.noise_scale}
        means |= {"noise_scale_mean": overall.noise_scale, "noise_scale_error": overall.relative_error}
        return _with_goodput(means, time_s, samples)

    def _told(self, averages: Averages) -> dict[str, float | None]:
        return {
            "noise_scale": averages.noise_scale,
            "noise_scale_biased": averages.biased_share,
            "efficiency": self._efficiency(averages.noise_scale, averages.batch),
        }

    def _efficiency(self, noise_scale: float | None, batch: float | None) -> float | None:
        if noise_scale is None or batch is None or self._reference is None:
            return None
        return efficiency(noise_scale, batch, self._reference)


def _with_goodput(told: dict[str, float | None], seconds: Seconds, samples: int) -> dict[str, float | None]:
    share = told["efficiency"]
    return told | {"goodput_samples_per_s": None if share is None or seconds <= 0 else samples / seconds * share}


class Seen(NamedTuple):
    """One Δ of an update, and what is known of it."""

    delta: FlatState
    weight: float
    samples: int
    version: Version
    """Of the A it was made at."""
    micro: MicroStepNorms | None = None


class NoiseEstimator:
    """Of one run whose server sees all Δs.

    An update of several Δs is looked at by itself. Of one alone its micro-steps tell, and where there are none, two
    such updates in a row are taken together (:func:`~paceline.core.noise_scale.differenced`).

    Args:
        ledger: is told what was seen.
    """

    def __init__(self, ledger: NoiseAccumulator) -> None:
        self._ledger = ledger
        self._measure = Preconditioner(None)
        self._scales: Scales | None = None
        self._updates = 0
        self._parts: list[tuple[Part, Version]] = []
        self._square: float | None = None
        self._before: tuple[list[Tensor], Part, Version] | None = None

    def measure_by(self, stepper: FlatOptimizer) -> None:
        """The optimizer that steps on what is seen."""
        self._measure = Preconditioner(stepper)

    def through(self, seen: Iterable[Seen], count: int) -> Iterator[tuple[FlatState, float]]:
        """The Δs of one update and their weights, each looked at before it is handed on.

        Args:
            seen: may compute each as it is asked for.
            count: how many there are.
        """
        self._parts, self._square = [], None
        looks = self._measure.ready(self._updates)
        self._scales = self._measure.scales() if looks else None
        for each in seen:
            if looks:
                self._look(each, alone=count == 1)
            yield each.delta, each.weight

    def combined(self, total: list[Tensor]) -> None:
        """What the Δs of the update were combined to."""
        if len(self._parts) > 1:
            self._square = square(total, self._scales)

    def updated(self) -> None:
        """The update has been made."""
        self._updates += 1
        if self._square is not None:
            biased = len({version for _, version in self._parts}) > 1
            self._ledger.take(observation([part for part, _ in self._parts], self._square, biased=biased))
            self._before = None

    def _look(self, seen: Seen, *, alone: bool) -> None:
        whole = square(seen.delta.parameters, self._scales)
        pieces = seen.micro if self._measure.plain else None
        part = Part(seen.samples, seen.weight, *(pieces or (whole, 1)))
        self._parts.append((part, seen.version))
        if alone and part.pieces > 1:
            self._ledger.take(observation([part], whole * seen.weight**2))
        elif alone and part.samples:
            self._pair(seen, part)

    def _pair(self, seen: Seen, part: Part) -> None:
        """Every other one is kept until the next has come."""
        if self._before is None:
            self._before = [v.clone() for v in seen.delta.parameters], part, seen.version
            return
        (vectors, first, version), self._before = self._before, None
        first = first._replace(square=square(vectors, self._scales))
        share = first.samples / (first.samples + part.samples)
        mean = [torch.lerp(new, old, share) for new, old in zip(seen.delta.parameters, vectors, strict=True)]
        biased = version != seen.version
        self._ledger.take(differenced(first, part, square(mean, self._scales), biased=biased))
