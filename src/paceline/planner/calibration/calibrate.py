"""How wide an interval is: so that nine of ten rows would have been within theirs, foretold as the asked one is.

::

    half the width = w · c_s · deviation of the row's effects        effects.py

w says how far rows were off in those deviations: rows of a model that was seen each left out alone, those of a model
that was not with all of their model, those of a source that was not with all of their source. c_s says how much farther
off a source's rows, or its models, are than others', where they disagree; it is 1 for a source that was not seen.

Foretell a step's time and memory from published measurements of others.

::

    log measured = log computed(corrections) + effects of source, framework and device + ε
                       corrections.py                effects.py

Both are found together: the corrections by generalised least squares with the effects integrated out, and pulled
towards 1 by what is expected of them. A source may deviate from the corrections of all (effects.py). Rows without a
shape are computed from their operations alone (work.py). How far off a forecast may lie comes from the rows themselves,
foretold by others (intervals.py).
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
from paceline.planner.calibration.mixed_effects import Array, Effects, Mixed, Scales, Traits, sloped, straight
from paceline.planner.calibration.rows import PublishedRow

HELD = 0.9
LIKELY = 2.0
"""What is expected of a source counts as much as so many of its rows or models."""


@dataclass(frozen=True)
class Disagreement:
    """c of each source, from how far off its rows were in deviations; each kind of rows counts once.

    Args:
        squares: of a source, the mean square of each kind.
    """

    squares: Mapping[str, Mapping[Hashable, float]]

    @classmethod
    def of(cls, scores: Array, traits: Sequence[Traits], kinds: Sequence[Hashable]) -> "Disagreement":
        """From scores of rows, and what kind each is of."""
        found: dict[str, dict[Hashable, list[float]]] = {}
        for score, row, kind in zip(scores, traits, kinds, strict=True):
            found.setdefault(row.source, {}).setdefault(kind, []).append(float(score) ** 2)
        return cls(
            {source: {kind: float(np.mean(own)) for kind, own in each.items()} for source, each in found.items()}
        )

    def factor(self, source: str, without: Hashable = None) -> float:
        """c, by all kinds but one; at least 1."""
        own = [square for kind, square in self.squares.get(source, {}).items() if kind != without]
        return sqrt(max(1.0, (LIKELY + sum(own)) / (LIKELY + len(own))))


@dataclass(frozen=True)
class Intervals:
    """Of rows that are asked for.

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
        """w · c_s."""
        if row.group in self.groups:
            return self.widths[0] * self.rows.factor(row.source)
        seen = row.source in self.models.squares
        return self.widths[1] * self.models.factor(row.source) if seen else self.widths[2]


def intervals(effects: Effects) -> Intervals:
    """From how far off the rows were."""
    traits = effects.traits
    alone, groups = range(len(traits)), [row.group for row in traits]
    by_row, by_group = _scores(effects, alone), _scores(effects, groups)
    by_source = _scores(effects, [row.source for row in traits])
    rows, models = Disagreement.of(by_row, traits, alone), Disagreement.of(by_group, traits, groups)
    widths = (
        _holding(by_row / _factors(rows, traits, alone), traits),
        _holding(by_group / _factors(models, traits, groups), traits),
        _holding(by_source, traits),
    )
    return Intervals(widths, rows, models, frozenset(groups))


def _scores(effects: Effects, together: Sequence[Hashable]) -> Array:
    errors, deviations = effects.left_out(together)
    return np.asarray(np.abs(errors) / deviations)


def _factors(found: Disagreement, traits: Sequence[Traits], kinds: Sequence[Hashable]) -> Array:
    return np.array([found.factor(row.source, kind) for row, kind in zip(traits, kinds, strict=True)])


def _holding(scores: Array, traits: Sequence[Traits]) -> float:
    """What nine of ten are below, where each source counts alike, and one more that is above all.

    Conformal, with weights: R. J. Tibshirani and others, Conformal Prediction Under Covariate Shift, 2019.
    """
    many = Counter(row.source for row in traits)
    weights = np.array([1.0 / many[row.source] for row in traits])
    order = np.argsort(scores)
    reached = np.cumsum(weights[order]) / (weights.sum() + weights.min())
    return float(scores[order][min(int(np.searchsorted(reached, HELD)), len(scores) - 1)])


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
"""Of logarithms of times: devices and frameworks differ most, models of one source least."""

DEVICE = [-(name in ("products", "bytes")) / spread for name, spread in zip(Corrections.names(), SPREADS, strict=True)]
"""Of each slope: what it says of the share of a step in which a device computes, and does not wait."""

REACHES = np.array([1.5, 1.0, 1.0, 1.0, 2.0, 2.0])
"""Doublings of words in a micro-batch, hidden, shards, stages, replicas and micro-batches, within which rows of a
source are alike."""

UTILISATION = 0.4
"""Of the data sheet's operations, for what has no shape: the middle of what rows of many frameworks tell."""

PRODUCTS = 0.5
"""Of the time of what has no shape at 16 bits: what takes less with fewer bits."""


@dataclass(frozen=True)
class CalibratedPrediction:
    """Of one row."""

    step_s: Seconds
    low_s: Seconds
    high_s: Seconds
    """Nine of ten measured steps are to lie between them."""
    why: str
    """Where the width of the interval comes from."""


def traits(row: PublishedRow, noise: float) -> Traits:
    """What a row may have in common with others, without its slopes."""
    told = row_shapes.precision(row)
    kind = row_shapes.shape(row) is None
    keys = ("", row.family, row.framework, row.source, (row.framework, row.family, told), row.group, told, kind)
    arrangement = row_shapes.arrangement(row)
    words = arrangement.micro_batch * row.whole("seq", 1) / arrangement.context
    sizes = [words, work.hidden(row), arrangement.shards, arrangement.stages]
    sizes += [arrangement.replicas, arrangement.micro_batches]
    return Traits(keys, row.source, tuple(np.log2(sizes) / REACHES), noise, row.group)


def by_operations(row: PublishedRow, told: dict[str, float]) -> Seconds:
    """Of a model without a shape: its operations over those of its devices."""
    arrangement = row_shapes.arrangement(row)
    batch = row.number("gbs") or arrangement.samples
    done = row_shapes.device(row).flops_per_s * arrangement.workers * UTILISATION
    plain = row_shapes.plain_flops_per_s(row) * arrangement.workers * UTILISATION
    return batch * work.flops(row, told) * (PRODUCTS / done + (1 - PRODUCTS) / plain)


def computed(row: PublishedRow, case: Case | None, corrections: Corrections, told: dict[str, float]) -> Seconds:
    """Before effects."""
    return predicted(case, corrections).step_s if case else by_operations(row, told)


@dataclass(frozen=True)
class Calibration:
    """What rows teach.

    Args:
        corrections: of what is computed.
        deviations: the same in standard deviations, to start another fit from.
        effects: of sources, frameworks and devices.
        told: operations by model, see :func:`paceline.planner.calibration.rows.rates`.
        intervals: how wide they are.
        largest: devices of the largest row of each family.
        most_active: parameters that a word goes through, of the largest model.
    """

    corrections: Corrections
    deviations: tuple[float, ...]
    effects: Effects
    told: dict[str, float]
    intervals: Intervals
    largest: dict[str, float]
    most_active: float

    def forecast(self, row: PublishedRow) -> CalibratedPrediction:
        """Of a row, whatever it tells."""
        case, own = Case.of(row), traits(row, expected_noise(row, self.told))
        found, slopes = straight(lambda x: logarithms([row], [case], x, self.told), np.array(self.deviations))
        own = sloped(own, slopes[0], DEVICE)
        off, deviation = self.effects.of(own)
        middle = exp(found[0] + off)
        beyond = self.beyond(row)
        half = self.intervals.width(own) * deviation * beyond
        return CalibratedPrediction(middle, middle * exp(-half), middle * exp(half), self._why(beyond))

    def beyond(self, row: PublishedRow) -> float:
        """1 within eight times as many devices, and eight times as large a model, as were seen; one more for each
        eight times beyond."""
        ratio = row.whole("n_devices", 1) / self.largest.get(row.family, row.whole("n_devices", 1))
        larger = work.active(row) / self.most_active if work.sized(row) else 1.0
        return max(1.0, log2(max(ratio, larger, 1.0)) / log2(EXTRAPOLATED))

    def _why(self, beyond: float) -> str:
        rows = f"nine of ten of {len(self.effects.errors)} rows, each predicted by the others"
        return rows if beyond == 1.0 else f"{rows}; {beyond:.1f} times as wide, as no row is nearly as large"


DOUBTFUL = 0.5
"""Noise of a row whose source contradicts itself: a factor of 1.6 either way."""
GUESSED, UNSIZED = 0.15, 1.0
"""Noise of a row whose operations follow from active parameters (the root of the mean square of what seven mixtures'
own numbers are off that), or from nothing: a factor of three."""
EXTRAPOLATED = 8.0
"""Times the largest that was measured, from which on an interval is wider."""
FEWEST = 3
"""Rows: fewer say nothing of how far off they are."""


def calibrated(rows: Sequence[PublishedRow], start: Sequence[float] | None = None, *, steps: int = 5) -> Calibration:
    """From rows whose step times are told; others are left out.

    Args:
        rows: at least :data:`FEWEST`.
        start: deviations of a calibration with nearly the same rows.
        steps: see :meth:`paceline.planner.calibration.mixed_effects.Mixed.fitted`.

    Raises:
        InputError: too few rows tell a step time.
    """
    used = [row for row in rows if row.step_s]
    if len(used) < FEWEST:
        raise InputError(f"{len(used)} rows tell step_time_s; write a calibration file with at least {FEWEST}.")
    told, cases = work.rates(used), [Case.of(row) for row in used]

    measured = np.log([row.step_s or 1.0 for row in used])
    common = [traits(row, expected_noise(row, told)) for row in used]
    mixed = Mixed(lambda x: logarithms(used, cases, x, told), measured, common, SCALES, DEVICE)
    found, effects = mixed.fitted(np.zeros(len(SPREADS)) if start is None else np.array(start), steps)
    return Calibration(
        Corrections.of(list(found)), tuple(found), effects, told, intervals(effects), _largest(used), _most(used)
    )


def logarithms(
    rows: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array, told: dict[str, float]
) -> Array:
    """Of what is computed of each row with these deviations of the corrections."""
    corrections = Corrections.of(list(deviations))
    return np.log([computed(row, case, corrections, told) for row, case in zip(rows, cases, strict=True)])


def expected_noise(row: PublishedRow, told: dict[str, float]) -> float:
    """n of a row: more where its source contradicts itself, or its operations are guessed."""
    found = DOUBTFUL if row.doubtful else SCALES.noise
    if row_shapes.shape(row) or row.model.lower() in told:
        return found
    return max(found, GUESSED if work.sized(row) else UNSIZED)


def _largest(rows: Sequence[PublishedRow]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        found[row.family] = max(found.get(row.family, 0.0), float(row.whole("n_devices", 1)))
    return found


def _most(rows: Sequence[PublishedRow]) -> float:
    return max((work.active(row) for row in rows if work.sized(row)), default=inf)
