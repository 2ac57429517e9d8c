"""Foretell what a worker holds from published measurements of others: as calibrate.py does for times.

Two corrections: what activations and buffers really take beside what is counted, and what the runtime holds beside all
else (libraries, a device's context, buffers of collectives, what the allocator can't use).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from paceline.planner.calibration import rows
from paceline.planner.calibration.calibrate import DOUBTFUL, Intervals, intervals, traits
from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.mixed_effects import Array, Effects, Mixed, Scales, straight
from paceline.planner.calibration.row_shapes import HOSTS, arrangement, numerics
from paceline.planner.calibration.rows import GIB, PublishedRow

SCALES = Scales(
    {
        "any": 0.1,
        "family": 0.1,
        "framework": 0.15,
        "source": 0.15,
        "framework, family and precision": 0.1,
        "model of a source": 0.05,
        "precision": 0.05,
        "with a shape or without": 0.1,
    },
    like=0.1,
    noise=0.05,
    own=2.0,
)
"""Of logarithms: what is held can be counted, so sources differ less than in time."""

DEVICE_CONTEXT_BYTES, HOST_CONTEXT_BYTES = 4 * GIB, 0.5 * GIB
"""Of CUDA with its libraries, NCCL's buffers and what the allocator can't use; of a process on a CPU."""
SPREADS = (0.25, 0.2)
"""Of the logarithms of the context and of what activations take."""


@dataclass(frozen=True)
class Room:
    """What a worker holds at the most."""

    bytes: float
    low_bytes: float
    high_bytes: float
    """Nine of ten are to lie between them."""


@dataclass(frozen=True)
class MemoryCalibration:
    """What rows teach; none of them told anything where ``effects`` is None.

    Args:
        deviations: of context and activations, in standard deviations.
        effects: of sources, frameworks and devices.
        intervals: how wide they are.
    """

    deviations: Array
    effects: Effects | None
    intervals: Intervals | None

    def forecast(self, row: PublishedRow) -> Room:
        """Of a row, whatever it tells."""
        case = Case.of(row)
        found, slopes = straight(lambda x: logarithms([row], [case], x), self.deviations)
        off, half = 0.0, _UNKNOWN
        if self.effects and self.intervals:
            own = traits(row, SCALES.noise)._replace(slopes=tuple(slopes[0]))
            off, deviation = self.effects.of(own)
            half = self.intervals.width(own) * deviation
        middle = exp(found[0] + off)
        return Room(middle, middle * exp(-half), middle * exp(half))


_UNKNOWN = 0.33
"""Where no row told: what counting alone is off in the rows that did (benchmarks/planner)."""


def corrections(row: PublishedRow, deviations: Array) -> tuple[float, float]:
    """Return the bytes of the runtime of a row's device, and the factor of activations and buffers."""
    context, activations = (exp(spread * each) for spread, each in zip(SPREADS, deviations, strict=True))
    return context * (HOST_CONTEXT_BYTES if row.family in HOSTS else DEVICE_CONTEXT_BYTES), activations


def held_bytes(row: PublishedRow, case: Case | None, deviations: Array) -> float:
    """Before effects."""
    context, activations = corrections(row, deviations)
    if case is None:
        return context + _states(row)
    held = predicted(case, Corrections()).peak
    counted = held.total - held.activations - held.buffers
    return counted + activations * (held.activations + held.buffers) + context


def _states(row: PublishedRow) -> float:
    """Of a model without a shape: bytes of its parameters, divided as far as its row says."""
    many, at = rows.whole(row), arrangement(row)
    of = numerics(row, replace(at, divided=0))
    among = at.shards * at.stages * max(at.experts, at.replicas if at.divided == 3 else 1)
    return many / among * (of.total if at.divided == 0 else of.parameter + of.gradient)


def told_bytes(row: PublishedRow) -> float | None:
    """What a row tells of memory: what was measured; or, where more is computed than there is room for although it
    ran, that it filled its device as far as others do."""
    room = row.number("gpu_mem_gb")
    if row.held_bytes or not room or not row.step_s or row.doubtful:
        return row.held_bytes
    bound = _FILLED * room * GIB
    return bound if held_bytes(row, Case.of(row), np.zeros(len(SPREADS))) > bound else None


_FILLED = 0.85
"""Of a device's memory: rows whose micro-batch was made as large as it could be hold about so much."""


def _noise(row: PublishedRow) -> float:
    if row.doubtful:
        return DOUBTFUL
    return SCALES.noise if row.held_bytes else _INFERRED


_INFERRED = 0.15
"""Noise of a row that only ran: between 0.73 and all of the room."""


def calibrated_memory(rows: Sequence[PublishedRow], *, steps: int = 5) -> MemoryCalibration:
    """From rows that tell of memory; from none, what is expected."""
    told = {row.name: told_bytes(row) for row in rows}
    used = [row for row in rows if told[row.name]]
    cases = [Case.of(row) for row in used]
    if not used:
        return MemoryCalibration(np.zeros(len(SPREADS)), None, None)
    measured = np.array([log(told[row.name] or 1.0) for row in used])
    common = [traits(row, _noise(row)) for row in used]
    mixed = Mixed(lambda x: logarithms(used, cases, x), measured, common, SCALES)
    found, effects = mixed.fitted(np.zeros(len(SPREADS)), steps)
    return MemoryCalibration(found, effects, intervals(effects))


def logarithms(rows: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array) -> Array:
    """Of what is counted of each row with these deviations of the corrections."""
    return np.log([held_bytes(row, case, deviations) for row, case in zip(rows, cases, strict=True)])
