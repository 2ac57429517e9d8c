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
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log

import numpy as np

from paceline.core.types import Seconds
from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.rows import PublishedRow

# From a thirtieth of what is expected to twice as much, in steps of a twentieth.
RATES = tuple(float(rate) for rate in np.exp(np.linspace(-3.4, 0.7, 83)))


def computed_s(case: Case) -> Seconds:
    """Return the time of a step before any correction."""
    return predicted(case, Corrections()).step_s


def fitted_rates(
    pairs: Iterable[tuple[PublishedRow, Case | None]], computed: Callable[[Case], Seconds] = computed_s
) -> Mapping[str, float]:
    """Return the rate of each family that has rows with a shape, of which those that are doubtful don't count.

    Args:
        pairs: rows that have a step time, with the case of each; None: it has no shape.
        computed: time of a step of a case.
    """
    families = defaultdict[str, list[tuple[PublishedRow, Case]]](list)
    for row, case in pairs:
        if case is not None and not row.doubtful:
            families[row.family].append((row, case))
    return {family: _fitted(own, computed) for family, own in families.items()}


def _fitted(own: Sequence[tuple[PublishedRow, Case]], computed: Callable[[Case], Seconds]) -> float:
    many = Counter(row.source for row, _ in own)

    def off(rate: float) -> float:
        """Return the weighted sum of errors, with the smaller of two equal rates' changes preferred."""
        errors = (abs(log(computed(case.at_rate(rate)) / (row.step_s or 1.0))) / many[row.source] for row, case in own)
        return sum(errors) + 1e-6 * abs(log(rate))

    return min(RATES, key=off)
