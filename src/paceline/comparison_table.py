"""A comparison as plain text for a terminal."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from paceline.metrics.columns import BRIEF, Column, Entry, grid, labels
from paceline.metrics.rounds import Estimate

_GAP = "  "


def table(
    mean: Mapping[str, Mapping[str, Any]],
    difference: Mapping[str, Mapping[str, Estimate | None]],
    baseline: str,
    rounds: Mapping[str, int],
) -> str:
    """One line a strategy, under a head that says what the figures are.

    Args:
        mean: strategy -> mean over rounds of its summary.
        difference: strategy -> its differences against the baseline.
        baseline: which strategy that is.
        rounds: strategy -> how many rounds it has made.
    """
    names = labels(list(mean))
    entries = [Entry(names[t], mean[t], None if t == baseline else difference[t], rounds[t]) for t in mean]
    columns, cells = grid(BRIEF, entries)
    lines = [[entry.label, *line] for entry, line in zip(entries, cells, strict=True)]
    head = _explain(names[baseline], sorted(set(rounds.values())))
    return "\n".join([head, "", *_align(columns, lines)])


def _explain(baseline: str, rounds: Sequence[int]) -> str:
    many = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    spread = ", ± half a 95 % interval" if rounds[-1] > 1 else ""
    plural = "" if rounds[-1] == 1 else "s"
    return f"{many} round{plural}; difference: of the mean over time, in points, against {baseline}{spread}"


def _align(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[str]:
    titles = ["strategy", *(column.title for column in columns)]
    widths = [max(len(cell) for cell in cells) for cells in zip(titles, *lines, strict=True)]
    groups = _groups(columns, widths)
    return [groups, *(_line(cells, widths) for cells in (titles, *lines))]


def _groups(columns: Sequence[Column], widths: list[int]) -> str:
    """The line of group names; widens a group's last column where its name is longer than its columns."""
    parts, at = [" " * widths[0]], 1
    for name, members in groupby(columns, key=lambda column: column.group):
        count = len(list(members))
        width = sum(widths[at : at + count]) + len(_GAP) * (count - 1)
        widths[at + count - 1] += max(0, len(name) - width)
        parts.append(name.center(max(width, len(name)), "─") if name else " " * width)
        at += count
    return _GAP.join(parts).rstrip()


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join([first, *rest]).rstrip()
