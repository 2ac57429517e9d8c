"""How much of the expected rate of matrix products a family of devices reaches, by measured rows.

::

    rate of a family = argmin over r of Σ w_i |log computed_i(r) - log measured_i|        w_i = 1 / rows of its source

It is the median over rows, where each source counts alike: one that is far off moves it little. Data sheets say what a
device does at its highest clock, and what is expected of it is what one product alone reaches on an A100 or an H100
(gemm_time.py). In a training step that takes minutes an H100 slows down to hold its power, older devices lack kernels,
and on CPUs libraries reach a fifth. That is too far for a step that is linearised, as those of mixed_effects.py are: so
rates are found first, and effects of devices are what is left.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from paceline.core.types import Seconds
from paceline.planner.base import OverlapModel
from paceline.planner.calibration import row_shapes
from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.mixed_effects import COVERED, Array
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.cluster import Described
from paceline.planner.cluster_file import EFFICIENCY
from paceline.planner.devices import ROUND_S, Taught

# From a thirtieth of what is expected to twice as much, in steps of a twentieth.
RATES = tuple(float(rate) for rate in np.exp(0.05 * np.arange(-68, 15)))
EXPECTED = RATES.index(1.0)


def computed_s(case: Case) -> Seconds:
    """Return the time of a step before any correction."""
    return predicted(case, Corrections()).step_s


def data_sheet_s(case: Case) -> Seconds:
    """Return the time of a step as ``paceline plan`` has it of a shape: usual links and latencies, nothing overlaps."""
    assert isinstance(case.cluster.messages, Described), "a row's cluster is described"
    links = replace(case.cluster.messages.links, latency_s=ROUND_S, between_latency_s=2 * ROUND_S)
    cluster = replace(case.cluster, messages=replace(case.cluster.messages, links=links, efficiency=EFFICIENCY))
    return case.cost(case.corrected_workload(case.kernels, cluster), cluster, OverlapModel()).step_s


@dataclass(frozen=True)
class Errors:
    """How far off rows of one kind of device are at each rate.

    Args:
        rows: that were measured.
        logarithms: log computed - log measured, by row and rate.
    """

    rows: Sequence[PublishedRow]
    logarithms: Array

    @classmethod
    def of(cls, pairs: Sequence[tuple[PublishedRow, Case]], computed: Callable[[Case], Seconds]) -> "Errors":
        """Compute each row at each rate."""
        found = [[log(computed(case.at_rate(rate)) / (row.step_s or 1.0)) for rate in RATES] for row, case in pairs]
        return cls([row for row, _ in pairs], np.array(found))

    def best(self, used: Sequence[bool] | None = None) -> int:
        """Return the place of the rate at which some rows, or all, are least off; each source counts alike."""
        counted = np.ones(len(self.rows), dtype=np.bool_) if used is None else np.array(used)
        many = Counter(row.source for row, use in zip(self.rows, counted, strict=True) if use)
        weights = np.array([use / max(1, many[row.source]) for row, use in zip(self.rows, counted, strict=True)])
        # Of equal rates the one that changes least.
        return int(np.argmin(weights @ np.abs(self.logarithms) + 1e-6 * np.abs(np.log(RATES))))

    def left_out(self, key: Callable[[PublishedRow], Hashable]) -> Array:
        """Return the logarithm of each row at the rate of those of other keys; as expected where there are none."""
        keys, result = [key(row) for row in self.rows], np.zeros(len(self.rows))
        for each in set(keys):
            others = [other != each for other in keys]
            at = self.best(others) if any(others) else EXPECTED
            own = np.logical_not(others)
            result[own] = self.logarithms[own, at]
        return result


def fitted_rates(
    pairs: Iterable[tuple[PublishedRow, Case | None]], computed: Callable[[Case], Seconds] = computed_s
) -> Mapping[str, float]:
    """Return the rate of each family that has rows with a shape, of which those that are doubtful don't count.

    Args:
        pairs: rows that have a step time, with the case of each; None: it has no shape.
        computed: time of a step of a case.
    """
    families = _by(pairs, lambda row: row.family)
    return {family: RATES[Errors.of(own, computed).best()] for family, own in families.items()}


def taught(rows: Iterable[PublishedRow]) -> Mapping[str, tuple[Taught, Errors]]:
    """Return what rows say of each architecture, with their errors.

    Of rows without experts, those count whose framework runs a module as it is written, as Paceline does; all, where
    these are few. A rate is taken if it predicts models better that were left out.
    """
    found = dict[str, tuple[Taught, Errors]]()
    pairs = [(row, Case.of(row)) for row in rows if row.step_s]
    dense = [(row, case) for row, case in pairs if case and case.experts is None]
    for architecture, own in _by(dense, lambda row: row_shapes.sheet(row).architecture).items():
        plain = [(row, case) for row, case in own if row_shapes.plain_modules(row)]
        used = own if len(plain) < FEW else plain
        errors = Errors.of(used, data_sheet_s)
        off, expected = np.abs(errors.left_out(lambda row: row.group)), np.abs(errors.logarithms[:, EXPECTED])
        rate, off = (RATES[errors.best()], off) if off.mean() < expected.mean() else (1.0, expected)
        sources, spread = len({row.source for row, _ in used}), float(np.exp(np.quantile(off, COVERED))) - 1
        found[architecture] = Taught(round(rate, 2), len(used), sources, round(spread, 2)), errors
    return found


# Rows.
FEW = 10


def _by(
    pairs: Iterable[tuple[PublishedRow, Case | None]], key: Callable[[PublishedRow], str]
) -> Mapping[str, Sequence[tuple[PublishedRow, Case]]]:
    result = defaultdict[str, list[tuple[PublishedRow, Case]]](list)
    for row, case in pairs:
        if case is not None and not row.doubtful:
            result[key(row)].append((row, case))
    return result
