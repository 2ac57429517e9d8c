"""Predict the memory of a worker from published measurements of others, as calibrate.py does for times.

Two corrections: what activations and buffers take compared with what is counted, and what the runtime holds in addition
(libraries, a device's context, buffers of collectives, what the allocator can't use).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from paceline.planner.calibration import rows
from paceline.planner.calibration.calibrate import DOUBTFUL, Intervals, intervals, traits
from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.mixed_effects import Array, Effects, Mixed, Scales, linearised
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
"""Standard deviations of logarithms: bytes can be counted, so sources differ less than in time."""

DEVICE_CONTEXT_BYTES, HOST_CONTEXT_BYTES = 4 * GIB, 0.5 * GIB
"""The context of CUDA with its libraries, NCCL's buffers and what the allocator can't use; of a process on a CPU."""
SPREADS = (0.25, 0.2)
"""Standard deviations of the logarithms of the context and of activations."""


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
        logs, slopes = linearised(lambda x: logarithms([row], [case], x), self.deviations)
        off, half = 0.0, _UNKNOWN
        if self.effects and self.intervals:
            own = traits(row, SCALES.noise)._replace(slopes=tuple(slopes[0]))
            off, deviation = self.effects.of(own)
            half = self.intervals.width(own) * deviation
        middle = exp(logs[0] + off)
        return MemoryPrediction(middle, middle * exp(-half), middle * exp(half))


_UNKNOWN = 0.33
"""Half the width if no row has memory: what counting alone is off in the rows that have it (benchmarks/planner)."""


def corrections(row: PublishedRow, deviations: Array) -> tuple[float, float]:
    """Return the bytes of the runtime of a row's device, and the factor of activations and buffers."""
    context, activations = (exp(spread * each) for spread, each in zip(SPREADS, deviations, strict=True))
    return context * (HOST_CONTEXT_BYTES if row.family in HOSTS else DEVICE_CONTEXT_BYTES), activations


def held_bytes(row: PublishedRow, case: Case | None, deviations: Array) -> float:
    """Return the bytes that a worker holds, before effects."""
    context, activations = corrections(row, deviations)
    if case is None:
        return context + _states(row)
    held = predicted(case, Corrections()).peak
    counted = held.total - held.activations - held.buffers
    return counted + activations * (held.activations + held.buffers) + context


def _states(row: PublishedRow) -> float:
    """Return the bytes of a shapeless model's states, divided as far as its row says."""
    parameters, at = rows.whole(row), arrangement(row)
    of = numerics(row, replace(at, divided=0))
    among = at.shards * at.stages * max(at.experts, at.replicas if at.divided == 3 else 1)
    return parameters / among * (of.total if at.divided == 0 else of.parameter + of.gradient)


def measured_bytes(row: PublishedRow) -> float | None:
    """Return the memory of a row as measured; if it ran although more is computed than its device has, the part of the
    device that others fill."""
    room = row.number("gpu_mem_gb")
    if row.held_bytes or not room or not row.step_s or row.doubtful:
        return row.held_bytes
    bound = _FILLED * room * GIB  # the row ran, so it held no more than this
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
    """Calibrate on the rows that have memory; without any, return what is expected."""
    held = {row.name: measured_bytes(row) for row in rows}
    used = [row for row in rows if held[row.name]]
    cases = [Case.of(row) for row in used]
    if not used:
        return MemoryCalibration(np.zeros(len(SPREADS)), None, None)
    measured = np.array([log(held[row.name] or 1.0) for row in used])
    common = [traits(row, _noise(row)) for row in used]
    mixed = Mixed(lambda x: logarithms(used, cases, x), measured, common, SCALES)
    deviations, effects = mixed.fitted(np.zeros(len(SPREADS)), steps)
    return MemoryCalibration(deviations, effects, intervals(effects))


def logarithms(rows: Sequence[PublishedRow], cases: Sequence[Case | None], deviations: Array) -> Array:
    """Return the logarithm of each row's counted bytes with these deviations of the corrections."""
    return np.log([held_bytes(row, case, deviations) for row, case in zip(rows, cases, strict=True)])
