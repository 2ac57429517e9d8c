"""Comparison: several strategies from the same start under the same budget, its table, and its saved form.

comparison.json            strategies, their rounds and means, baseline, differences
0-replicas-8/round-0/      run of the first strategy in the first round, as ``Run.save`` writes it
0-replicas-8/round-1/
1-replicas-8-aggregation-asynchronous/round-0/ …
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import InputError, unknown
from paceline.core.safe_files import new_folder, read_json, reading, write_json
from paceline.metrics.repeats import Estimate, difference, mean_summary
from paceline.metrics.short_forms import html_table, sentence
from paceline.metrics.table_columns import BRIEF, Entry, grid, labels
from paceline.plots import plot, plot_svg
from paceline.program import Program
from paceline.run import Run, load, require_package
from paceline.strategy import Strategy

if TYPE_CHECKING:
    from paceline.core.records import Record
    from paceline.plots.curves import Plot

_GAP = "  "


@dataclass(frozen=True, repr=False)
class Comparison:
    """Result of ``compare``; at a prompt a line for each strategy, in a notebook the table with the curves.

    Args:
        runs: text of a strategy -> its runs, round by round; strategies in the order in which they were given.
        baseline: text of the strategy from which differences are taken.
        signal: name of the signal that ended the comparison, ``SIGINT`` after Ctrl-C.
    """

    runs: Mapping[str, Sequence[Run]]
    baseline: str
    signal: str | None = None

    def __repr__(self) -> str:
        lines = [
            f"  {text}: {sentence(self.mean[text])}" + (f" (mean of {len(runs)} rounds)" if len(runs) > 1 else "")
            for text, runs in self.runs.items()
        ]
        return "\n".join([f"<Comparison {self._title()}, {len(self.runs)} strategies", *lines]) + ">"

    def _repr_html_(self) -> str:
        names, entries = labels(self.strategies), self._entries(self.baseline)
        columns, cells = grid(BRIEF, entries)
        titles = ["strategy", *(f"{each.group}: {each.title}" if each.group else each.title for each in columns)]
        rows = [[entry.label, *line] for entry, line in zip(entries, cells, strict=True)]
        caption = f"{self._title()}; {self._head(self.baseline, names)}"
        drawing = plot_svg(self._histories(), virtual=self._virtual)
        return html_table(caption, rows, titles=titles, drawing=drawing)

    def plot(self) -> "Plot":
        """Return accuracy and losses of each strategy over training time and over updates, as a figure of matplotlib.

        A line is the mean over the rounds, in a band from the least to the largest of them.
        ``comparison.plot().savefig("comparison.png")`` writes it; a notebook shows it.

        Raises:
            InputError: matplotlib is not installed.
        """
        require_package("matplotlib", "comparison.plot()", extra="plots")
        return plot(self._histories(), self._title(), virtual=self._virtual)

    @property
    def interrupted(self) -> bool:
        """Return whether a signal ended it; its last round is then complete for the first strategies only."""
        return self.signal is not None

    @property
    def strategies(self) -> list[str]:
        """Texts of the strategies, in the order in which they were given."""
        return list(self.runs)

    @cached_property
    def mean(self) -> dict[str, dict[str, Any]]:
        """Mean over rounds of each strategy's summary."""
        return {text: mean_summary([run.summary for run in runs]) for text, runs in self.runs.items()}

    @cached_property
    def difference(self) -> dict[str, dict[str, Estimate | None]]:
        """Strategy minus baseline, for each strategy but the baseline."""
        return self.against(self.baseline)

    def against(self, baseline: str) -> dict[str, dict[str, Estimate | None]]:
        """Return strategy minus ``baseline`` for each other strategy.

        Differences are those of test accuracy (a fraction), test loss and training loss, each averaged over the whole
        interval of training (the measure of the Smooth Switch paper), then over the rounds that both have completed.

        Args:
            baseline: text of one of the strategies.
        """
        summaries = {text: [run.summary for run in runs] for text, runs in self.runs.items()}
        return {t: difference(s, summaries[baseline]) for t, s in summaries.items() if t != baseline}

    def table(self, baseline: str | None = None) -> str:
        """Return the results as text, one line per strategy.

        Args:
            baseline: take differences from this strategy instead.

        Raises:
            InputError: the baseline is none of the strategies.
        """
        baseline = self.baseline if baseline is None else find_baseline(baseline, self.strategies)
        entries = self._entries(baseline)
        columns, cells = grid(BRIEF, entries)
        rows = [["strategy", *(column.title for column in columns)]]
        rows += [[entry.label, *line] for entry, line in zip(entries, cells, strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # A group's name stands over its columns; the last of them is widened if the name is longer.
        groups, start = [" " * widths[0]], 1
        for name, members in groupby(columns, key=lambda column: column.group):
            count = len(list(members))
            width = sum(widths[start : start + count]) + len(_GAP) * (count - 1)
            widths[start + count - 1] += max(0, len(name) - width)
            groups.append(name.center(max(width, len(name)), "─") if name else " " * width)
            start += count
        lines = [_GAP.join(groups)]
        for label, *figures in rows:
            aligned = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
            lines.append(_GAP.join([label.ljust(widths[0]), *aligned]))
        head = self._head(baseline, labels(self.strategies))
        return "\n".join([head, "", *(line.rstrip() for line in lines)])

    def _entries(self, baseline: str) -> list[Entry]:
        names, differences = labels(self.strategies), self.against(baseline)
        alone: dict[str, Estimate | None] | None = None if differences else {}
        return [
            Entry(names[text], self.mean[text], differences.get(text, alone), len(runs))
            for text, runs in self.runs.items()
        ]

    def _head(self, baseline: str, names: Mapping[str, str]) -> str:
        """Return how many rounds there were, and what the differences are."""
        fewest, most = (bound(map(len, self.runs.values())) for bound in (min, max))
        count_text = f"{most} round{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} rounds"
        if len(self.runs) == 1:
            return f"{count_text} of one strategy: there is nothing to compare it with"
        spread = ", ± half a 95 % interval" if most > 1 else ""
        return f"{count_text}; difference: of the mean over time, in points, against {names[baseline]}{spread}"

    @property
    def _first(self) -> Run | None:
        return next((run for runs in self.runs.values() for run in runs), None)

    @property
    def _virtual(self) -> bool:
        return self._first is not None and self._first.engine == "virtual"

    def _title(self) -> str:
        if self._first is None:
            return "without a complete run"
        return f"{self._first.program_name} on the {self._first.engine} engine"

    def _histories(self) -> "dict[str, list[Sequence[Record]]]":
        names = labels(self.strategies)
        return {names[text]: [run.history for run in runs] for text, runs in self.runs.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``paceline compare --json`` prints."""
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

        Args:
            path: path of the folder; it must not exist.
            tensorboard: also write each history as TensorBoard events.

        Raises:
            InputError: the folder exists or can't be made, or tensorboard is not installed.
        """
        with new_folder(path) as folder:
            self.write(folder)
            for index, (text, runs) in enumerate(self.runs.items()):
                for number, run in enumerate(runs):
                    run.save(folder / run_folder(index, text, number), tensorboard=tensorboard)

    def write(self, folder: Path) -> None:
        """Write ``comparison.json`` into a folder, replacing an older one."""
        write_json(folder / "comparison.json", self.to_json())


def load_comparison(path: str | Path, program: Program | None = None) -> Comparison:
    """Read a saved comparison.

    Args:
        path: the folder that :meth:`Comparison.save` wrote.
        program: the program of its runs; with it, the runs have their models.

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
    """Return the strategy that ``text`` means; raise InputError, with the nearest one, if it is none of them."""
    if text in strategies:
        return text
    with suppress(InputError):
        text = str(Strategy.parse(text))
    if text not in strategies:
        raise unknown("baseline", text, strategies)
    return text


def run_folder(index: int, text: str, number: int) -> str:
    """Return the path, within a comparison's folder, of round ``number`` of a strategy.

    >>> run_folder(1, "replicas=8 aggregation=smooth-switch:every=500", 0)
    '1-replicas-8-aggregation-smooth-switch-every-500/round-0'
    """
    # At most 80 characters: file systems bound a name at 255 bytes.
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "strategy"
    return f"{index}-{name}/round-{number}"
