"""How wide an interval is: so that nine of ten rows would have been within theirs, foretold as the asked one is.

::

    half the width = w · c_s · deviation of the row's effects        effects.py

w says how far rows were off in those deviations: rows of a model that was seen each left out alone, those of a model
that was not with all of their model, those of a source that was not with all of their source. c_s says how much farther
off a source's rows, or its models, are than others', where they disagree; it is 1 for a source that was not seen.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from paceline.plan.calibration.effects import Array, Effects, Traits

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
