"""Foretell a step's time and memory from published measurements of others.

::

    log measured = log computed(corrections) + effects of source, framework and device + ε
                       corrections.py                effects.py

Both are found together: the corrections by generalised least squares with the effects integrated out, and pulled
towards 1 by what is expected of them. Rows without a shape are computed from their operations alone (work.py). How far
off a forecast may lie comes from the rows themselves, each foretold by all the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log2

import numpy as np

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.plan.calibration import published, work
from paceline.plan.calibration.cases import Case
from paceline.plan.calibration.corrections import SPREADS, Corrections, predicted
from paceline.plan.calibration.effects import Array, Effects, Scales, Traits
from paceline.plan.calibration.mixed import Mixed, width
from paceline.plan.calibration.rows import Row

SCALES = Scales(
    {
        "any": 0.2,
        "family": 0.5,
        "framework": 0.3,
        "source": 0.15,
        "framework, family and precision": 0.25,
        "model of a source": 0.05,
        "precision": 0.2,
        "with a shape or without": 0.3,
    },
    like=0.1,
    noise=0.05,
)
"""Of logarithms of times: devices and frameworks differ most, models of one source least."""

REACHES = np.array([1.5, 1.0, 1.0, 1.0, 2.0, 2.0])
"""Doublings of words in a micro-batch, hidden, shards, stages, replicas and micro-batches, within which rows of a
source are alike."""

UTILISATION = 0.4
"""Of the data sheet's operations, for what has no shape: the middle of what rows of many frameworks tell."""


@dataclass(frozen=True)
class Forecast:
    """Of one row."""

    step_s: Seconds
    low_s: Seconds
    high_s: Seconds
    """Nine of ten measured steps are to lie between them."""
    why: str
    """Where the width of the interval comes from."""


def traits(row: Row) -> Traits:
    """What a row may have in common with others."""
    told = published.precision(row)
    kind = published.shape(row) is None
    keys = ("", row.family, row.framework, row.source, (row.framework, row.family, told), row.group, told, kind)
    arrangement = published.arrangement(row)
    words = arrangement.micro_batch * row.whole("seq", 1) / arrangement.context
    sizes = [words, row.whole("hidden", 1), arrangement.shards, arrangement.stages]
    sizes += [arrangement.replicas, arrangement.micro_batches]
    return Traits(keys, row.source, tuple(np.log2(sizes) / REACHES))


def by_operations(row: Row, told: dict[str, float]) -> Seconds:
    """Of a model without a shape: its operations over those of its devices."""
    arrangement = published.arrangement(row)
    batch = row.number("gbs") or arrangement.samples
    done = published.device(row).flops_per_s * arrangement.workers * UTILISATION
    return batch * work.flops(row, told) / done


def computed(row: Row, case: Case | None, corrections: Corrections, told: dict[str, float]) -> Seconds:
    """Before effects."""
    return predicted(case, corrections).step_s if case else by_operations(row, told)


@dataclass(frozen=True)
class Calibration:
    """What rows teach.

    Args:
        corrections: of what is computed.
        deviations: the same in standard deviations, to start another fit from.
        effects: of sources, frameworks and devices.
        told: operations by model, see :func:`paceline.plan.calibration.work.rates`.
        width: how many of an effect's standard deviations hold nine of ten rows.
        largest: devices of the largest row of each family.
    """

    corrections: Corrections
    deviations: tuple[float, ...]
    effects: Effects
    told: dict[str, float]
    width: float
    largest: dict[str, float]

    def forecast(self, row: Row) -> Forecast:
        """Of a row, whatever it tells."""
        off, deviation = self.effects.of(traits(row))
        middle = computed(row, Case.of(row), self.corrections, self.told) * exp(off)
        beyond = self.beyond(row)
        half = self.width * deviation * beyond
        return Forecast(middle, middle * exp(-half), middle * exp(half), self._why(beyond))

    def beyond(self, row: Row) -> float:
        """1 within eight times the largest devices that were seen; one more for each eight times beyond."""
        ratio = row.whole("n_devices", 1) / self.largest.get(row.family, row.whole("n_devices", 1))
        return max(1.0, log2(max(ratio, 1.0)) / log2(EXTRAPOLATED))

    def _why(self, beyond: float) -> str:
        rows = f"nine of ten of {len(self.effects.errors)} rows, each foretold by the others"
        return rows if beyond == 1.0 else f"{rows}; {beyond:.1f} times as wide, as no row has nearly as many devices"


DOUBTFUL = 0.5
"""Noise of a row whose source contradicts itself: a factor of 1.6 either way."""
EXTRAPOLATED = 8.0
"""Times the largest that was measured, from which on an interval is wider."""
FEWEST = 3
"""Rows: fewer say nothing of how far off they are."""


def calibrated(rows: Sequence[Row], start: Sequence[float] | None = None, *, steps: int = 5) -> Calibration:
    """From rows whose step times are told; others are left out.

    Args:
        rows: at least :data:`FEWEST`.
        start: deviations of a calibration with nearly the same rows.
        steps: see :meth:`paceline.plan.calibration.mixed.Mixed.fitted`.

    Raises:
        InputError: too few rows tell a step time.
    """
    used = [row for row in rows if row.step_s]
    if len(used) < FEWEST:
        raise InputError(f"{len(used)} rows tell step_time_s; write a calibration file with at least {FEWEST}.")
    told, cases = work.rates(used), [Case.of(row) for row in used]

    def logarithms(deviations: Array) -> Array:
        corrections = Corrections.of(list(deviations))
        return np.log([computed(row, case, corrections, told) for row, case in zip(used, cases, strict=True)])

    measured = np.log([row.step_s or 1.0 for row in used])
    expected = np.array([DOUBTFUL if row.doubtful else SCALES.noise for row in used])
    mixed = Mixed(logarithms, measured, [traits(row) for row in used], expected, SCALES)
    found, effects = mixed.fitted(np.zeros(len(SPREADS)) if start is None else np.array(start), steps)
    return Calibration(Corrections.of(list(found)), tuple(found), effects, told, width(effects), _largest(used))


def _largest(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        found[row.family] = max(found.get(row.family, 0.0), float(row.whole("n_devices", 1)))
    return found
