"""Parts of the page of published runs that are about devices: errors by family, and what named devices come with."""

from collections.abc import Mapping, Sequence
from math import exp
from statistics import median
from typing import Any, Protocol

import numpy as np
from kit.words import grid

from paceline.planner.calibration.device_rates import EXPECTED, Errors
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.devices import Taught

FAMILIES = """\
## By device family

The same runs. An error's *sign*: the median of predicted / measured - 1, below 0 where predictions are too fast.
"""
NAMED = """\
## Named devices

What `paceline plan` takes for a device with a name: the rate of its matrix products, as a factor of what is expected of
them (`paceline/planner/calibration/device_rates.py`), by runs of frameworks that run a module as it is written, where
there are ten or more. *Without* a rate nothing is learnt; *model* and *source* have it from other models or sources; it
is 1 where models that are left out are predicted no better by another.
"""


class Predicted(Protocol):
    """A run, and what was predicted of it."""

    row: PublishedRow
    cells: Mapping[str, Any]


def families(timed: Mapping[str, Sequence[Predicted]]) -> str:
    """A line for each device family, with each model and with each source left out."""
    names = dict.fromkeys(each.row.family for each in timed["model"] if each.row.step_s)
    head = ("family", "runs", "model: median", "mean", "sign", "source: median", "mean", "sign")
    lines = []
    for name in names:
        ratios = {way: [_ratio(each) for each in timed[way] if each.row.family == name] for way in ("model", "source")}
        figures = [figure for way in ("model", "source") for figure in _figures(np.log(ratios[way]))]
        lines.append((name, len(ratios["model"]), *figures))
    return grid(head, lines)


def _ratio(each: Predicted) -> float:
    return float(each.cells["step_s"]) / float(each.cells["measured_s"])


def named(found: Mapping[str, tuple[Taught, Errors]]) -> str:
    """A line for each architecture."""
    head = ("architecture", "runs", "sources", "rate", "without: median", "sign", "model: median", "sign",
            "source: median", "sign", "nine of ten")  # fmt: skip
    return grid(head, [_named(name, *each) for name, each in found.items()])


def _named(name: str, taught: Taught, errors: Errors) -> tuple[object, ...]:
    kinds = (
        errors.logarithms[:, EXPECTED],
        errors.left_out(lambda row: row.group),
        errors.left_out(lambda row: row.source),
    )
    figures = [_figures(each)[at] for each in kinds for at in (0, 2)]
    return (name, taught.rows, taught.sources, f"{taught.rate:.2f}", *figures, f"± {taught.spread:.0%}")


def _figures(logarithms: Sequence[float]) -> tuple[str, str, str]:
    """The median and the mean of errors, and the sign."""
    off = [abs(exp(each) - 1) for each in logarithms]
    return f"{median(off):.1%}", f"{sum(off) / len(off):.1%}", f"{exp(median(logarithms)) - 1:+.1%}"
