"""Predict a step's time from published measurements of others, and how far off the prediction may be.

::

    log measured = log computed(corrections) + effects of source, framework and device + ε
                       corrections.py                mixed_effects.py

Both are found together: the corrections by generalised least squares with the effects integrated out, pulled towards 1
by what is expected of them. A source may deviate from the corrections of all. Rows without a shape are computed from
their operations alone (rows.py). Intervals are so wide that nine of ten rows would have been within theirs, had they
been predicted as the requested row is::

    half the width = w · c_s · deviation of the row's effects

w says how far rows were off in those deviations: rows of a model that was seen, each left out alone; rows of an unseen
model, left out with all of their model; rows of an unseen source, left out with all of their source. c_s says how much
further off the rows of a source, or its models, are than others', where they disagree; it is 1 for an unseen source.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log2, sqrt

import numpy as np

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.calibration import row_shapes
from paceline.planner.calibration import rows as work
from paceline.planner.calibration.corrections import SPREADS, Case, Corrections, predicted
from paceline.planner.calibration.mixed_effects import Array, Effects, Mixed, Scales, Traits, linearised, sloped
from paceline.planner.calibration.rows import PublishedRow

COVERED = 0.9
"""The part of the measured rows that an interval is to contain."""

PRIOR_WEIGHT = 2.0
"""The prior of a source counts as much as so many of its rows or models."""


@dataclass(frozen=True)
class Disagreement:
    """The factor c of each source, from how far off its rows were in deviations; each kind of rows counts once.

    Args:
        squares: by source, the mean square of each kind.
    """

    squares: Mapping[str, Mapping[Hashable, float]]

    @classmethod
    def of(cls, scores: Array, traits: Sequence[Traits], kinds: Sequence[Hashable]) -> "Disagreement":
        """Average the squared scores of rows by source and kind."""
        scores_by_kind: dict[str, dict[Hashable, list[float]]] = {}
        for score, row, kind in zip(scores, traits, kinds, strict=True):
            scores_by_kind.setdefault(row.source, {}).setdefault(kind, []).append(float(score) ** 2)
        return cls(
            {
                source: {kind: float(np.mean(own)) for kind, own in each.items()}
                for source, each in scores_by_kind.items()
            }
        )

    def factor(self, source: str, without: Hashable = None) -> float:
        """Return c by all kinds but one; at least 1."""
        own = [square for kind, square in self.squares.get(source, {}).items() if kind != without]
        return sqrt(max(1.0, (PRIOR_WEIGHT + sum(own)) / (PRIOR_WEIGHT + len(own))))


@dataclass(frozen=True)
class Intervals:
    """Widths of the intervals of requested rows.

    Args:
        widths: w of a row whose model was seen, whose source was, and of any other.
        rows: how far rows of a source disagree.
        models: how far its models do.
        groups: models of sources that were seen.
    """

    widths: tuple[float, float, float]
    rows: Disagreement
    models: Disagreement
    groups: frozenset[Hashable]

    def width(self, row: Traits) -> float:
        """Return w · c_s of a row."""
        if row.group in self.groups:
            return self.widths[0] * self.rows.factor(row.source)
        seen = row.source in self.models.squares
        return self.widths[1] * self.models.factor(row.source) if seen else self.widths[2]


def intervals(effects: Effects) -> Intervals:
    """Return the intervals that follow from how far off the rows were."""
    traits = effects.traits
    alone, groups = range(len(traits)), [row.group for row in traits]
    by_row, by_group = _scores(effects, alone), _scores(effects, groups)
    by_source = _scores(effects, [row.source for row in traits])
    rows, models = Disagreement.of(by_row, traits, alone), Disagreement.of(by_group, traits, groups)
    widths = (
        _quantile(by_row / _factors(rows, traits, alone), traits),
        _quantile(by_group / _factors(models, traits, groups), traits),
        _quantile(by_source, traits),
    )
    return Intervals(widths, rows, models, frozenset(groups))


def _scores(effects: Effects, together: Sequence[Hashable]) -> Array:
    errors, deviations = effects.left_out(together)
    return np.asarray(np.abs(errors) / deviations)


def _factors(disagreement: Disagreement, traits: Sequence[Traits], kinds: Sequence[Hashable]) -> Array:
    return np.array([disagreement.factor(row.source, kind) for row, kind in zip(traits, kinds, strict=True)])


def _quantile(scores: Array, traits: Sequence[Traits]) -> float:
    """Return the score below which nine of ten are, each source counting alike, and one more that is above all.

    Conformal, with weights: R. J. Tibshirani and others, Conformal Prediction Under Covariate Shift, 2019.
    """
    rows_of = Counter(row.source for row in traits)
    weights = np.array([1.0 / rows_of[row.source] for row in traits])
    order = np.argsort(scores)
    reached = np.cumsum(weights[order]) / (weights.sum() + weights.min())
    return float(scores[order][min(int(np.searchsorted(reached, COVERED)), len(scores) - 1)])


SCALES = Scales(
    {
        "any": 0.2,
        "family": 0.5,
        "framework": 0.3,
        "source": 0.15,
        "framework, family and precision": 0.25,
        "model of a source": 0.1,
        "precision": 0.2,
        "with a shape or without": 0.3,
    },
    like=0.1,
    noise=0.05,
    own=1.0,
    device="family",
)
"""Standard deviations of logarithms of times: devices and frameworks differ most, models of one source least."""

DEVICE = [-(name in ("products", "bytes")) / spread for name, spread in zip(Corrections.names(), SPREADS, strict=True)]
"""For each slope: its weight in the share of a step in which a device computes and does not wait."""

REACHES = np.array([1.5, 1.0, 1.0, 1.0, 2.0, 2.0])
"""Doublings of words in a micro-batch, hidden, shards, stages, replicas and micro-batches, within which rows of a
source are alike."""

UTILISATION = 0.4
"""Of the data sheet's operations, for what has no shape: the median over rows of many frameworks."""

PRODUCTS = 0.5
"""The part of the time of a model without a shape, at 16 bits, that shrinks with fewer bits."""


@dataclass(frozen=True)
class CalibratedPrediction:
    """The predicted step time of one row."""

    step_s: Seconds
    low_s: Seconds
    high_s: Seconds
    """Nine of ten measured steps are to be between them."""
    why: str
    """Where the width of the interval comes from."""


def traits(row: PublishedRow, noise: float) -> Traits:
    """Return what a row may have in common with others, without its slopes."""
    precision = row_shapes.precision(row)
    shapeless = row_shapes.shape(row) is None
    keys = (
        "",
        row.family,
        row.framework,
        row.source,
        (row.framework, row.family, precision),
        row.group,
        precision,
        shapeless,
    )
    arrangement = row_shapes.arrangement(row)
    words = arrangement.micro_batch * row.whole("seq", 1) / arrangement.context
    sizes = [words, work.hidden(row), arrangement.shards, arrangement.stages]
    sizes += [arrangement.replicas, arrangement.micro_batches]
    return Traits(keys, row.source, tuple(np.log2(sizes) / REACHES), noise, row.group)


def by_operations(row: PublishedRow, flops_of: dict[str, float]) -> Seconds:
    """Return the time of a model without a shape: its operations over those of its devices."""
    arrangement = row_shapes.arrangement(row)
    batch = row.number("gbs") or arrangement.samples
    reduced = row_shapes.device(row).flops_per_s * arrangement.workers * UTILISATION
    plain = row_shapes.plain_flops_per_s(row) * arrangement.workers * UTILISATION
    return batch * work.flops(row, flops_of) * (PRODUCTS / reduced + (1 - PRODUCTS) / plain)


def computed(row: PublishedRow, case: Case | None, corrections: Corrections, flops_of: dict[str, float]) -> Seconds:
    """Return the time of a step before effects."""
    return predicted(case, corrections).step_s if case else by_operations(row, flops_of)


@dataclass(frozen=True)
class Calibration:
    """What was learnt from rows.

    Args:
        corrections: of computed times.
        deviations: the same in standard deviations, to start another fit from.
        effects: of sources, frameworks and devices.
        flops_of: operations by model, see :func:`paceline.planner.calibration.rows.rates`.
        intervals: widths of the intervals.
        largest: devices of the largest row of each family.
        most_active: parameters that a word goes through, of the largest model.
    """

    corrections: Corrections
    deviations: tuple[float, ...]
    effects: Effects
    flops_of: dict[str, float]
    intervals: Intervals
    largest: dict[str, float]
    most_active: float

    def forecast(self, row: PublishedRow) -> CalibratedPrediction:
        """Predict the step time of a row; its own outcome, if there is one, is ignored."""
        case, own = Case.of(row), traits(row, expected_noise(row, self.flops_of))
        logs, slopes = linearised(lambda x: logarithms([row], [case], x, self.flops_of), np.array(self.deviations))
        own = sloped(own, slopes[0], DEVICE)
        off, deviation = self.effects.of(own)
        middle = exp(logs[0] + off)
        beyond = self.beyond(row)
        half = self.intervals.width(own) * deviation * beyond
        return CalibratedPrediction(middle, middle * exp(-half), middle * exp(half), self._explanation(beyond))

    def beyond(self, row: PublishedRow) -> float:
        """Return how far a row is from the measured ones: 1 within eight times as many devices and as large a model,
        one more for each further factor of eight."""
        ratio = row.whole("n_devices", 1) / self.largest.get(row.family, row.whole("n_devices", 1))
        size_ratio = work.active(row) / self.most_active if work.sized(row) else 1.0
        return max(1.0, log2(max(ratio, size_ratio, 1.0)) / log2(EXTRAPOLATED))

    def _explanation(self, beyond: float) -> str:
        rows = f"nine of ten of {len(self.effects.errors)} rows, each predicted from the others"
        return rows if beyond == 1.0 else f"{rows}; {beyond:.1f} times as wide, as no row is nearly as large"


DOUBTFUL = 0.5
"""Noise of a row whose source contradicts itself: a factor of 1.6 either way."""
GUESSED, UNSIZED = 0.15, 1.0
"""Noise of a row whose operations follow from active parameters (the root of the mean square of what seven mixtures'
own numbers are off that), or from nothing: a factor of three."""
EXTRAPOLATED = 8.0
"""Times the largest that was measured, from which on an interval is wider."""
FEWEST = 3
"""Rows: from fewer no interval follows."""


def calibrated(rows: Sequence[PublishedRow], start: Sequence[float] | None = None, *, steps: int = 5) -> Calibration:
    """Calibrate on the rows that have a step time; others are left out.

    Args:
        rows: at least :data:`FEWEST`.
        start: deviations of a calibration with nearly the same rows.
        steps: see :meth:`paceline.planner.calibration.mixed_effects.Mixed.fitted`.

    Raises:
        InputError: too few rows have a step time.
    """
    used = [row for row in rows if row.step_s]
    if len(used) < FEWEST:
        raise InputError(f"{len(used)} rows have step_time_s; write a calibration file with at least {FEWEST}.")
    flops_of, cases = work.rates(used), [Case.of(row) for row in used]

    measured = np.log([row.step_s or 1.0 for row in used])
    common = [traits(row, expected_noise(row, flops_of)) for row in used]
    mixed = Mixed(lambda x: logarithms(used, cases, x, flops_of), measured, common, SCALES, DEVICE)
    deviations, effects = mixed.fitted(np.zeros(len(SPREADS)) if start is None else np.array(start), steps)
    largest: dict[str, float] = {}
    for row in used:
        largest[row.family] = max(largest.get(row.family, 0.0), float(row.whole("n_devices", 1)))
    most_active = max((work.active(row) for row in used if work.sized(row)), default=inf)
    corrections = Corrections.of(list(deviations))
    return Calibration(corrections, tuple(deviations), effects, flops_of, intervals(effects), largest, most_active)


def logarithms(
    rows: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array, flops_of: dict[str, float]
) -> Array:
    """Return the logarithm of each row's computed time with these deviations of the corrections."""
    corrections = Corrections.of(list(deviations))
    return np.log([computed(row, case, corrections, flops_of) for row, case in zip(rows, cases, strict=True)])


def expected_noise(row: PublishedRow, flops_of: dict[str, float]) -> float:
    """Return the noise n of a row: more if its source contradicts itself, or its operations are guessed."""
    noise = DOUBTFUL if row.doubtful else SCALES.noise
    if row_shapes.shape(row) or row.model.lower() in flops_of:
        return noise
    return max(noise, GUESSED if work.sized(row) else UNSIZED)
