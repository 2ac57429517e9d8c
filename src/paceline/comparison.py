"""A comparison as plain text for a terminal.

Comparison: several strategies from the same starts under the same budget, and its saved form.

comparison.json              strategies, their rounds and means, baseline, differences
0-synchronous/round-0/       the run of the first strategy in the first round, as ``Run.save`` writes it
0-synchronous/round-1/
1-asynchronous/round-0/ …
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, unknown
from paceline.metrics.repeats import Estimate, difference, mean_summary
from paceline.metrics.table_columns import BRIEF, Column, Entry, grid, labels
from paceline.program import Program
from paceline.run import Run, load
from paceline.safe_files import new_folder, read_json, reading, write_json
from paceline.strategy import Strategy

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


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` returns.

    Args:
        runs: text of a strategy -> its runs, round by round; strategies in the order they were given.
        baseline: the text of the strategy that the others are held against.
        interrupted: whether Ctrl-C ended it; the round it hit is complete for the first strategies only.
    """

    runs: Mapping[str, Sequence[Run]]
    baseline: str
    interrupted: bool = False

    @property
    def strategies(self) -> list[str]:
        """The strategies' texts, in the order they were given."""
        return list(self.runs)

    @cached_property
    def mean(self) -> dict[str, dict[str, Any]]:
        """The mean over rounds of each strategy's summary."""
        return {text: mean_summary([run.summary for run in runs]) for text, runs in self.runs.items()}

    @cached_property
    def difference(self) -> dict[str, dict[str, Estimate | None]]:
        """Strategy minus baseline, for each strategy but the baseline."""
        return self.against(self.baseline)

    def against(self, baseline: str) -> dict[str, dict[str, Estimate | None]]:
        """Strategy minus ``baseline`` of test accuracy, test loss and training loss, each averaged over the whole
        interval (the paper's measure), mean over the rounds that both have made."""
        summaries = {text: [run.summary for run in runs] for text, runs in self.runs.items()}
        return {t: difference(s, summaries[baseline]) for t, s in summaries.items() if t != baseline}

    def table(self, baseline: str | None = None) -> str:
        """The results as text, one line a strategy.

        Args:
            baseline: hold the others against this strategy instead.

        Raises:
            InputError: the baseline is none of the strategies.
        """
        chosen = self.baseline if baseline is None else find_baseline(baseline, self.strategies)
        rounds = {text: len(runs) for text, runs in self.runs.items()}
        return table(self.mean, self.against(chosen), chosen, rounds)

    def to_json(self) -> dict[str, Any]:
        """What ``paceline compare --json`` prints."""
        return {
            "strategies": [
                {"strategy": text, "rounds": [run.results() for run in runs], "mean": self.mean[text]}
                for text, runs in self.runs.items()
            ],
            "baseline": self.baseline,
            "difference": {
                text: {measure: estimate and asdict(estimate) for measure, estimate in measures.items()}
                for text, measures in self.difference.items()
            },
        }

    def save(self, path: str | Path, *, tensorboard: bool = False) -> None:
        """Write the comparison as a new folder, which appears whole or not at all.

        Raises:
            InputError: the folder exists or can't be made, or tensorboard is not installed.
        """
        with new_folder(path) as folder:
            self.write(folder)
            for index, (text, runs) in enumerate(self.runs.items()):
                for number, run in enumerate(runs):
                    run.save(folder / run_folder(index, text, number), tensorboard=tensorboard)

    def write(self, folder: Path) -> None:
        """Write ``comparison.json`` into a folder, in the place of an older one."""
        write_json(folder / "comparison.json", self.to_json())


def load_comparison(path: str | Path, program: Program | None = None) -> Comparison:
    """Read a saved comparison; with its program, the runs have their models.

    Raises:
        InputError: a file is missing or damaged; names it.
    """
    file = Path(path) / "comparison.json"
    saved = read_json(file)
    with reading(file):
        rounds = [(str(entry["strategy"]), len(entry["rounds"])) for entry in saved["strategies"]]
        baseline = find_baseline(saved["baseline"], [text for text, _ in rounds])
    runs = {
        text: [load(Path(path) / run_folder(index, text, number), program) for number in range(count)]
        for index, (text, count) in enumerate(rounds)
    }
    return Comparison(runs, baseline)


def find_baseline(text: str, strategies: Sequence[str]) -> str:
    """The one of ``strategies`` that ``text`` means; raises InputError, with the nearest one, where there is none."""
    if text in strategies:
        return text
    with suppress(InputError):
        text = str(Strategy.parse(text))
    if text not in strategies:
        raise unknown("baseline", text, strategies)
    return text


def run_folder(index: int, text: str, number: int) -> str:
    """Where, in a comparison's folder, the run of a strategy in a round lies."""
    return f"{index}-{slug(text)}/round-{number}"


def slug(text: str) -> str:
    """A strategy as a short name for a folder.

    >>> slug("replicas=8 aggregation=smooth-switch:every=500")
    'replicas-8-aggregation-smooth-switch-every-500'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "strategy"
