"""Predict a step's time and a worker's memory from published measurements of others, and how far off they may be.

::

    log measured = log computed(corrections) + effects of source, framework and device + ε
                       corrections.py                mixed_effects.py

Both are found together: the corrections by generalised least squares with the effects integrated out, pulled towards 1
by what is expected of them. A source may deviate from the corrections of all. Before, the rate of products of CPUs is
found, which is too far from what is expected for a linear fit (device_rates.py). Rows of mixtures of experts whose
sizes are known have a shape with experts (mixtures.py), and inform of effects alone; other rows without a shape are
computed from their operations alone (rows.py). Intervals are so wide that nine of ten rows would have been within
theirs, had they been predicted as the requested row is::

    half the width = w · c_s · deviation of the row's effects

w says how far rows were off in those deviations: rows of a model that was seen, each left out alone; rows of an unseen
model, left out with all of their model; rows of an unseen source, left out with all of their source. c_s says how much
further off the rows of a source, or its models, are than others', where they disagree; it is 1 for an unseen source.

Memory has two corrections of its own: what activations and buffers take compared with what is counted, and what the
runtime holds in addition (libraries, a device's context, buffers of collectives, what the allocator can't use).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, inf, log, log2

import numpy as np

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.calibration import mixed_effects, row_shapes, rows
from paceline.planner.calibration.corrections import SPREADS, Case, Corrections, predicted
from paceline.planner.calibration.device_rates import fitted_rates
from paceline.planner.calibration.mixed_effects import Array, Effects, Intervals, Scales, Traits
from paceline.planner.calibration.mixtures import mixture
from paceline.planner.calibration.rows import GIB, PublishedRow

# What rows may have in common.
KEYS = ("any", "family", "framework", "source", "framework, family and precision", "model of a source", "precision",
        "with a shape or without")  # fmt: skip

# For each slope: its weight in the share of a step in which a device computes and does not wait.
DEVICE_SLOPES = tuple(
    -(each.name in ("products", "bytes")) / spread
    for each, spread in zip(fields(Corrections)[: len(SPREADS)], SPREADS, strict=True)
)

# Standard deviations of logarithms of times: devices and frameworks differ most, models of one source least.
SCALES = Scales(
    dict(zip(KEYS, (0.2, 0.5, 0.3, 0.15, 0.25, 0.1, 0.2, 0.3), strict=True)),
    like=0.1, noise=0.05, own=1.0, device="family", device_slopes=DEVICE_SLOPES,
)  # fmt: skip

# Standard deviations of logarithms of memory: bytes can be counted, so sources differ less than in time.
MEMORY_SCALES = Scales(
    dict(zip(KEYS, (0.1, 0.1, 0.15, 0.15, 0.1, 0.05, 0.05, 0.1), strict=True)), like=0.1, noise=0.05, own=2.0
)

# Doublings of words in a micro-batch, hidden, shards, stages, replicas and micro-batches, within which rows of a
# source are alike.
REACHES = np.array([1.5, 1.0, 1.0, 1.0, 2.0, 2.0])

# Of the data sheet's operations, for what has no shape: the median over rows of many frameworks.
UTILISATION = 0.4

# The part of the time of a model without a shape, at 16 bits, that shrinks with fewer bits.
PRODUCTS = 0.5


# Noise of a row whose source contradicts itself: a factor of 1.6 either way.
DOUBTFUL = 0.5
# Noise of a row whose operations follow from active parameters (the root of the mean square of what seven mixtures'
# own numbers are off that), or from nothing: a factor of three.
GUESSED, UNSIZED = 0.15, 1.0
# Noise of a row with experts, of which nothing says how evenly tokens are sent to them.
MIXED = 0.1
# Times the largest that was measured, from which on an interval is wider.
EXTRAPOLATED = 8.0
# Rows: from fewer no interval follows.
FEWEST = 3


def traits(row: PublishedRow, noise: float) -> Traits:
    """Return what a row may have in common with others, without its slopes."""
    precision, shapeless = row_shapes.precision(row), row_shapes.shape(row) is None
    alike = row.framework, row.family, precision
    keys = "", row.family, row.framework, row.source, alike, row.group, precision, shapeless
    arrangement = row_shapes.arrangement(row)
    words = arrangement.micro_batch * row.whole("seq", 1) / arrangement.context
    sizes = [words, rows.hidden(row), arrangement.shards, arrangement.stages]
    sizes += [arrangement.replicas, arrangement.micro_batches]
    place = tuple(np.log2(sizes) / REACHES)
    return Traits(keys, row.source, place, noise, row.group, pulls=mixture(row) is None)


# ----------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class CalibratedPrediction:
    """The predicted step time of one row."""

    step_s: Seconds
    low_s: Seconds
    high_s: Seconds
    """Nine of ten measured steps are to be between them."""
    why: str
    """Where the width of the interval comes from."""


def computed(row: PublishedRow, case: Case | None, corrections: Corrections, flops_of: dict[str, float]) -> Seconds:
    """Return the time of a step before effects; of a model without a shape its operations over its devices'."""
    if case:
        return predicted(case, corrections).step_s
    arrangement = row_shapes.arrangement(row)
    batch = row.number("gbs") or arrangement.samples
    reduced = row_shapes.device(row).flops_per_s * arrangement.workers * UTILISATION
    plain = row_shapes.plain_flops_per_s(row) * arrangement.workers * UTILISATION
    return batch * rows.flops(row, flops_of) * (PRODUCTS / reduced + (1 - PRODUCTS) / plain)


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
        rates: of products, by device family, of CPUs alone: those of GPUs are near enough to what is expected for
            effects to be linear (device_rates.py).
    """

    corrections: Corrections
    deviations: tuple[float, ...]
    effects: Effects
    flops_of: dict[str, float]
    intervals: Intervals
    largest: dict[str, float]
    most_active: float
    rates: Mapping[str, float]

    def case(self, row: PublishedRow) -> Case | None:
        """Return the case of a row at the rate of its device's family; None if it has no shape."""
        return at_rate(Case.of(row), row, self.rates)

    def forecast(self, row: PublishedRow) -> CalibratedPrediction:
        """Predict the step time of a row; its own outcome, if there is one, is ignored."""
        case, own = self.case(row), traits(row, expected_noise(row, self.flops_of))
        logs, slopes = mixed_effects.linearised(
            lambda x: logarithms([row], [case], x, self.flops_of), np.array(self.deviations)
        )
        own = mixed_effects.sloped(own, slopes[0], SCALES)
        effect, deviation = self.effects.of(own)
        middle = exp(logs[0] + effect)
        beyond = self.beyond(row)
        half = self.intervals.width(own) * deviation * beyond
        why = f"nine of ten of {len(self.effects.errors)} rows, each predicted from the others"
        if beyond != 1.0:
            why += f"; {beyond:.1f} times as wide, as no row is nearly as large"
        return CalibratedPrediction(middle, middle * exp(-half), middle * exp(half), why)

    def beyond(self, row: PublishedRow) -> float:
        """Return how far a row is from the measured ones: 1 within eight times as many devices and as large a model,
        one more for each further factor of eight."""
        ratio = row.whole("n_devices", 1) / self.largest.get(row.family, row.whole("n_devices", 1))
        size_ratio = rows.active(row) / self.most_active if rows.sized(row) else 1.0
        return max(1.0, log2(max(ratio, size_ratio, 1.0)) / log2(EXTRAPOLATED))


def at_rate(case: Case | None, row: PublishedRow, rates: Mapping[str, float]) -> Case | None:
    """Return a row's case at the rate of its device's family; as expected where no row has it."""
    return case and case.at_rate(rates.get(row.family, 1.0))


def calibrated(
    published: Sequence[PublishedRow], start: Sequence[float] | None = None, *, steps: int = 8
) -> Calibration:
    """Calibrate on the rows that have a step time; others are left out.

    Args:
        published: at least :data:`FEWEST`.
        start: deviations of a calibration with nearly the same rows.
        steps: see :func:`paceline.planner.calibration.mixed_effects.fitted`.

    Raises:
        InputError: too few rows have a step time.
    """
    used = [row for row in published if row.step_s]
    if len(used) < FEWEST:
        raise InputError(f"{len(used)} rows have step_time_s; write a calibration file with at least {FEWEST}.")
    flops_of, cases = rows.rates(used), [Case.of(row) for row in used]
    hosts = [(row, case) for row, case in zip(used, cases, strict=True) if row.family in row_shapes.HOSTS]
    rates = fitted_rates(hosts)
    cases = [at_rate(case, row, rates) for case, row in zip(cases, used, strict=True)]
    measured = np.log([row.step_s or 1.0 for row in used])
    common = [traits(row, expected_noise(row, flops_of)) for row in used]
    first = np.zeros(len(SPREADS)) if start is None else np.array(start)
    deviations, effects = mixed_effects.fitted(
        lambda x: logarithms(used, cases, x, flops_of), measured, common, SCALES, first, steps
    )
    largest: dict[str, float] = {}
    for row in used:
        largest[row.family] = max(largest.get(row.family, 0.0), float(row.whole("n_devices", 1)))
    most_active = max((rows.active(row) for row in used if rows.sized(row)), default=inf)
    corrections = Corrections.of(list(deviations))
    intervals = Intervals.of(effects)
    return Calibration(corrections, tuple(deviations), effects, flops_of, intervals, largest, most_active, rates)


def logarithms(
    published: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array, flops_of: dict[str, float]
) -> Array:
    """Return the logarithm of each row's computed time with these deviations of the corrections."""
    corrections = Corrections.of(list(deviations))
    return np.log([computed(row, case, corrections, flops_of) for row, case in zip(published, cases, strict=True)])


def expected_noise(row: PublishedRow, flops_of: dict[str, float]) -> float:
    """Return the noise n of a row: more if its source contradicts itself, or its operations are guessed."""
    noise = DOUBTFUL if row.doubtful else SCALES.noise
    if mixture(row):
        return max(noise, MIXED)
    if row_shapes.shape(row) or row.model.lower() in flops_of:
        return noise
    return max(noise, GUESSED if rows.sized(row) else UNSIZED)


# --------------------------------------------------------------------------------------------------------------- memory

# The context of CUDA with its libraries, NCCL's buffers and what the allocator can't use; of a process on a CPU.
DEVICE_CONTEXT_BYTES, HOST_CONTEXT_BYTES = 4 * GIB, 0.5 * GIB
# Standard deviations of the logarithms of the context and of activations.
MEMORY_SPREADS = (0.25, 0.2)

# Half the width if no row has memory: what counting alone is off in the rows that have it (benchmarks/planner).
_UNKNOWN = 0.33

# Of a device's memory: rows whose micro-batch was made as large as it could be hold about so much.
_FILLED = 0.85

# Noise of a row that only ran: between 0.73 and all of the room.
_INFERRED = 0.15


@dataclass(frozen=True)
class MemoryPrediction:
    """The most that a worker is predicted to hold."""

    bytes: float
    low_bytes: float
    high_bytes: float
    """Nine of ten are to be between them."""


@dataclass(frozen=True)
class MemoryCalibration:
    """What was learnt from rows; nothing where ``effects`` is None.

    Args:
        deviations: of context and activations, in standard deviations.
        effects: of sources, frameworks and devices.
        intervals: how wide they are.
    """

    deviations: Array
    effects: Effects | None
    intervals: Intervals | None

    def forecast(self, row: PublishedRow) -> MemoryPrediction:
        """Predict the memory of a row; its own outcome, if there is one, is ignored."""
        case = Case.of(row)
        logs, slopes = mixed_effects.linearised(lambda x: memory_logarithms([row], [case], x), self.deviations)
        effect, half = 0.0, _UNKNOWN
        if self.effects and self.intervals:
            own = mixed_effects.sloped(traits(row, MEMORY_SCALES.noise), slopes[0], MEMORY_SCALES)
            effect, deviation = self.effects.of(own)
            half = self.intervals.width(own) * deviation
        middle = exp(logs[0] + effect)
        return MemoryPrediction(middle, middle * exp(-half), middle * exp(half))


def memory_corrections(row: PublishedRow, deviations: Array) -> tuple[float, float]:
    """Return the bytes of the runtime of a row's device, and the factor of activations and buffers."""
    context, activations = (exp(spread * each) for spread, each in zip(MEMORY_SPREADS, deviations, strict=True))
    return context * (HOST_CONTEXT_BYTES if row.family in row_shapes.HOSTS else DEVICE_CONTEXT_BYTES), activations


def computed_bytes(row: PublishedRow, case: Case | None, deviations: Array) -> float:
    """Return the bytes that a worker holds, before effects; of a model without a shape its states alone, divided as far
    as its row says."""
    context, activations = memory_corrections(row, deviations)
    if case is None:
        at = row_shapes.arrangement(row)
        states = row_shapes.numerics(row, replace(at, divided=0))
        among = at.shards * at.stages * max(at.experts, at.replicas if at.divided == 3 else 1)
        each = states.total if at.divided == 0 else states.parameter + states.gradient
        return context + rows.whole(row) / among * each
    peak = predicted(case, Corrections()).peak
    counted = peak.total - peak.activations - peak.buffers + case.experts_optimizer_bytes
    return counted + activations * (peak.activations + peak.buffers) + context


def measured_bytes(row: PublishedRow) -> float | None:
    """Return the memory of a row as measured; if it ran although more is computed than its device has, the part of the
    device that others fill."""
    room = row.number("gpu_mem_gb")
    if row.peak_bytes or not room or not row.step_s or row.doubtful:
        return row.peak_bytes
    bound = _FILLED * room * GIB  # the row ran, so it held no more than this
    return bound if computed_bytes(row, Case.of(row), np.zeros(len(MEMORY_SPREADS))) > bound else None


def calibrated_memory(published: Sequence[PublishedRow], *, steps: int = 8) -> MemoryCalibration:
    """Calibrate on the rows that have memory; without any, return what is expected."""
    held = {row.name: measured_bytes(row) for row in published}
    used = [row for row in published if held[row.name]]
    start = np.zeros(len(MEMORY_SPREADS))
    if not used:
        return MemoryCalibration(start, None, None)
    cases, measured = [Case.of(row) for row in used], np.array([log(held[row.name] or 1.0) for row in used])
    noises = [DOUBTFUL if row.doubtful else MEMORY_SCALES.noise if row.peak_bytes else _INFERRED for row in used]
    common = [traits(row, noise) for row, noise in zip(used, noises, strict=True)]
    deviations, effects = mixed_effects.fitted(
        lambda x: memory_logarithms(used, cases, x), measured, common, MEMORY_SCALES, start, steps
    )
    return MemoryCalibration(deviations, effects, Intervals.of(effects))


def memory_logarithms(published: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array) -> Array:
    """Return the logarithm of each row's counted bytes with these deviations of the corrections."""
    return np.log([computed_bytes(row, case, deviations) for row, case in zip(published, cases, strict=True)])
