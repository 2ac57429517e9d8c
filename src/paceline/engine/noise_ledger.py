"""What a run's gradients have told of their noise so far: what records, the display and the summary say of it."""

import math

from paceline.core.noise_scale import DECAY, Averages, Observation, efficiency
from paceline.core.types import Seconds


class NoiseLedger:
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
