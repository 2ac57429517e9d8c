"""The gradient noise scale, estimated from gradients of few samples and of many.

With the mean gradient G of all data and the covariance Σ of one sample's, a gradient of b samples has

    E|g_b|² = |G|² + tr(Σ)/b

so two batch sizes give both (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), and φ = tr(Σ)/|G|² is the noise
scale: from about φ samples in an update on, further ones add little. Here the small batches are those of the gradients
that an update is made of, and the large one is theirs together::

    Δ of replica 0, b_0 samples, |g_0|² --+
    Δ of replica 1, b_1 samples, |g_1|² --+--> Σ w_i·Δ_i, B samples, |ḡ|²
    Δ of replica 2, b_2 samples, |g_2|² --+
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.types import Seconds

# Decay of the moving averages per observation: they cover some hundred updates. Our choice; AdaptDL's is nearer to 1,
# for runs of more updates.
DECAY = 0.99


class Part(NamedTuple):
    """One of the gradients that an update is made of."""

    samples: int
    weight: float
    """Weight in the update."""
    square: float
    """|g|²; of several pieces their mean by samples."""
    pieces: int = 1
    """Number of gradients measured one by one: 1, or its micro-steps."""


class Observation(NamedTuple):
    """Estimates from one update, very noisy by themselves: average these, then divide."""

    noise: float
    """An estimate of tr(Σ)."""
    signal: float
    """An estimate of |G|²; may be negative."""
    samples: float
    """Samples of the update."""
    biased: bool = False
    """Whether the gradients were not all made at one A."""


def observation(parts: Sequence[Part], square: float, *, biased: bool = False) -> Observation | None:
    """Estimate noise and signal from an update Σ w_i·Δ_i, whatever the weights and the batches.

    With v_i = w_i / Σ w: E Σ v_i·|g_i|² = |G|² + tr(Σ)·Σ v_i/b_i, and E|ḡ|² = |G|² + tr(Σ)·Σ v_i²/b_i.

    Args:
        parts: the gradients; those without samples are ignored.
        square: |Σ w_i·Δ_i|².
        biased: whether they were made at different A.

    Returns:
        None if only one gradient counts, from which noise can't be estimated.

    >>> observation([Part(1, 0.5, 4.0), Part(1, 0.5, 0.0)], 1.0)
    Observation(noise=2.0, signal=0.0, samples=2, biased=False)
    >>> observation([Part(1, 1.0, 4.0), Part(1, 0.0, 0.0)], 4.0)
    """
    parts = [part for part in parts if part.samples]
    total = math.fsum(part.weight for part in parts)
    if not total:
        return None
    shares = [part.weight / total for part in parts]
    small = sum(share * part.square for share, part in zip(shares, parts, strict=True))
    of_small = math.fsum(share * part.pieces / part.samples for share, part in zip(shares, parts, strict=True))
    of_large = math.fsum(share**2 / part.samples for share, part in zip(shares, parts, strict=True))
    # Equal if but one gradient has weight: then small and large batch are the same.
    if of_small <= of_large:
        return None
    large = square / total**2
    noise = (small - large) / (of_small - of_large)
    return Observation(noise, large - noise * of_large, sum(p.samples for p in parts), biased)


def differenced(first: Part, second: Part, mean_square: float, *, biased: bool = True) -> Observation | None:
    """Estimate from two consecutive updates of one gradient each, as if both gradients were made at one A.

    They were not, unless nothing moved between them: what G has changed by counts as noise, so φ comes out too large
    while A moves far. An update has the samples of one.

    Args:
        first: of the two.
        second: of the two; their weights don't count.
        mean_square: the square of the norm of their mean by samples.
        biased: whether A has moved between them.

    >>> differenced(Part(2, 1.0, 4.0), Part(2, 1.0, 0.0), 1.0)
    Observation(noise=4.0, signal=0.0, samples=2.0, biased=True)
    """
    total = first.samples + second.samples
    if not (first.samples and second.samples):
        return None
    parts = [part._replace(weight=part.samples / total) for part in (first, second)]
    both = observation(parts, mean_square, biased=biased)
    return both and both._replace(samples=total / 2)


@dataclass(frozen=True, slots=True)
class Averages:
    """Means of observations, of equal weight or, with ``decay`` below 1, exponential ones without a bias to the start.

    The ratio is of means, never a mean of ratios: of one update neither part is known well enough to divide.

    Args:
        decay: factor on an observation's weight when the next one comes.
    """

    decay: float = 1.0
    count: int = 0
    weight: float = 0.0
    squared_weight: float = 0.0
    noise: float = 0.0
    """Weighted sums over the observations."""
    signal: float = 0.0
    noise_noise: float = 0.0
    noise_signal: float = 0.0
    signal_signal: float = 0.0
    samples: float = 0.0
    biased: float = 0.0

    def add(self, new: Observation) -> "Averages":
        """Return the averages with one more observation."""
        keep = self.decay
        return replace(
            self,
            count=self.count + 1,
            weight=keep * self.weight + 1,
            squared_weight=keep**2 * self.squared_weight + 1,
            noise=keep * self.noise + new.noise,
            signal=keep * self.signal + new.signal,
            noise_noise=keep * self.noise_noise + new.noise * new.noise,
            noise_signal=keep * self.noise_signal + new.noise * new.signal,
            signal_signal=keep * self.signal_signal + new.signal * new.signal,
            samples=keep * self.samples + new.samples,
            biased=keep * self.biased + new.biased,
        )

    @property
    def noise_scale(self) -> float | None:
        """φ, in samples; None without observations, or as long as the gradient is indistinguishable from noise.

        >>> Averages().add(Observation(2.0, 0.5, 8)).add(Observation(4.0, -0.2, 8)).noise_scale
        20.0
        """
        return max(0.0, self.noise) / self.signal if self.signal > 0 else None

    @property
    def relative_error(self) -> float | None:
        """The standard error of φ divided by φ, as if observations were independent (delta method); None if unknown.

        Reliable if well below 1.
        """
        if self.count < 2 or self.noise <= 0 or self.signal <= 0:
            return None
        noise, signal = self.noise / self.weight, self.signal / self.weight
        spread = (
            (self.noise_noise / self.weight - noise**2) / noise**2
            + (self.signal_signal / self.weight - signal**2) / signal**2
            - 2 * (self.noise_signal / self.weight - noise * signal) / (noise * signal)
        )
        share = self.squared_weight / self.weight**2
        return math.sqrt(max(0.0, spread) * share / (1 - share))

    @property
    def batch(self) -> float | None:
        """Mean samples of an update."""
        return self.samples / self.weight if self.weight else None

    @property
    def biased_share(self) -> float | None:
        """Return how much of the averages comes from gradients that were made at different A, 0 to 1."""
        return self.biased / self.weight if self.weight else None


def efficiency(noise_scale: float, batch: float, reference: float) -> float:
    """Return how much a sample of such a batch advances training, relative to one in a batch of ``reference`` samples.

    (φ + m₀)/(φ + m): Pollux's statistical efficiency (Qiao et al. 2021, arXiv 2008.12260).

    Args:
        noise_scale: φ, in samples.
        batch: m, samples of one update.
        reference: m₀, in samples.

    >>> efficiency(100.0, batch=100, reference=0), efficiency(96.0, batch=32, reference=32)
    (0.5, 1.0)
    """
    return (noise_scale + reference) / (noise_scale + batch)


class NoiseState(NamedTuple):
    """What a :class:`NoiseAccumulator` has accumulated."""

    reference: float | None
    lately: Averages
    overall: Averages
    last_s: Seconds
    """Training time of the last record."""
    last_samples: int


class NoiseAccumulator:
    """The noise scale of one run: lately, overall, and what follows from it for efficiency.

    Args:
        reference: m₀, the batch that efficiency is relative to; None: that of the first micro-step.
    """

    def __init__(self, reference: int | None) -> None:
        self._reference: float | None = reference
        self._lately, self._overall = Averages(DECAY), Averages()
        self._last: tuple[Seconds, int] = (0.0, 0)

    def state(self) -> "NoiseState":
        """Return what it has accumulated."""
        return NoiseState(self._reference, self._lately, self._overall, *self._last)

    def restore(self, state: "NoiseState") -> None:
        """Go on with what was accumulated before."""
        self._reference, self._lately, self._overall = state.reference, state.lately, state.overall
        self._last = state.last_s, state.last_samples

    def add_batch(self, samples: float) -> None:
        """Note the mean samples of a Δ's micro-steps."""
        self._reference = self._reference or samples

    def add(self, seen: Observation | None) -> None:
        """Add the observation of an update, unless there is none or training has diverged."""
        if seen is not None and math.isfinite(seen.noise * seen.noise + seen.signal * seen.signal):
            self._lately, self._overall = self._lately.add(seen), self._overall.add(seen)

    def now(self) -> dict[str, float | None]:
        """Return the statistics lately, without goodput."""
        return self._statistics(self._lately)

    def since_last(self, time_s: Seconds, samples: int) -> dict[str, float | None]:
        """Return the statistics lately, with the goodput since the last call.

        Args:
            time_s: of training, so far.
            samples: applied so far.
        """
        (began_s, before), self._last = self._last, (time_s, samples)
        return _with_goodput(self.now(), time_s - began_s, samples - before)

    def overall(self, time_s: Seconds, samples: int) -> dict[str, float | None]:
        """Return ``noise_scale`` as it stood at the end, all else from means over all updates of the run."""
        overall = self._overall
        means = self._statistics(overall) | {"noise_scale": self._lately.noise_scale}
        means |= {"noise_scale_mean": overall.noise_scale, "noise_scale_error": overall.relative_error}
        return _with_goodput(means, time_s, samples)

    def _statistics(self, averages: Averages) -> dict[str, float | None]:
        scale, batch = averages.noise_scale, averages.batch
        known = scale is not None and batch is not None and self._reference is not None
        return {
            "noise_scale": scale,
            "noise_scale_biased": averages.biased_share,
            "efficiency": efficiency(scale, batch, self._reference) if known else None,  # type: ignore[arg-type]
        }


def _with_goodput(statistics: dict[str, float | None], seconds: Seconds, samples: int) -> dict[str, float | None]:
    share = statistics["efficiency"]
    goodput = None if share is None or seconds <= 0 else samples / seconds * share
    return statistics | {"goodput_samples_per_s": goodput}
