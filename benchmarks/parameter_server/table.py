"""Sides that alternate, and the lines of a Markdown table of what came out."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, float]
"""Side -> steps a second."""

OURS = "paceline"
"""Our side's name."""


def alternate(rounds: int, *sides: Callable[[], Figures]) -> list[Figures]:
    """The figures of each round, in which all sides are measured one after the other."""
    return [{name: figure for side in sides for name, figure in side().items()} for _ in range(rounds)]


def middle(rounds: Sequence[Figures], side: str) -> str:
    """The median of a side."""
    return f"{median(figures[side] for figures in rounds):,.0f}"


def ratio(rounds: Sequence[Figures], side: str, ours: str = OURS) -> str:
    """Our side over another: the median of the rounds' ratios.

    >>> ratio([{OURS: 3, "other": 2}, {OURS: 9, "other": 1}, {OURS: 4, "other": 1}], "other")
    '4.00'
    """
    value = median(figures[ours] / figures[side] for figures in rounds)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def head(title: str, *columns: str) -> None:
    """Begin a table."""
    print(f"{title}\n")
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: object) -> None:
    """One line, shown at once."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
