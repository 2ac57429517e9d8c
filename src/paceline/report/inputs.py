"""Contents of a report: runs, grouped by strategy, in sections that can be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.comparison import Comparison, load_comparison
from paceline.core.errors import InputError
from paceline.metrics.table_columns import labels
from paceline.plots.curves import Curve, look
from paceline.run import Run, load

# A run, a comparison, or the folder of a saved one.
Source: TypeAlias = str | Path | Run | Comparison


@dataclass(frozen=True, slots=True)
class StrategyRuns:
    """One strategy with all its rounds."""

    strategy: str
    label: str
    colour: str
    dash: str
    runs: Sequence[Run]

    @property
    def curve(self) -> Curve:
        """Records of its rounds, to be drawn."""
        return Curve(self.label, self.colour, self.dash, [run.history for run in self.runs])


@dataclass(frozen=True, slots=True)
class Section:
    """Strategies that trained one program on one engine."""

    program: str
    engine: str
    groups: Sequence[StrategyRuns]
    baseline: str | None
    """Strategy from which differences are taken; None: the runs come from no comparison of several."""


def sections(sources: Iterable[Source]) -> list[Section]:
    """Return one section for each comparison, and one for all single runs of a program on an engine.

    A strategy has the same colour in all sections.

    Raises:
        InputError: nothing is given, a comparison has no complete run, or a folder can't be read.
    """
    grouped: list[tuple[str | None, Mapping[str, Sequence[Run]]]] = []
    single: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for source in sources:
        loaded = source
        if not isinstance(loaded, (Run, Comparison)):
            saved_comparison = (Path(loaded) / "comparison.json").exists()
            loaded = load_comparison(loaded) if saved_comparison else load(loaded)
        if isinstance(loaded, Comparison):
            complete = {text: runs for text, runs in loaded.runs.items() if runs}
            if not complete:
                raise InputError("the comparison was interrupted before its first run was complete; run it again")
            grouped.append((loaded.baseline, complete))
            continue
        # Single runs can be compared if they trained one program on one engine.
        key = (loaded.program_name, loaded.engine)
        if key not in single:
            grouped.append((None, single.setdefault(key, {})))
        single[key].setdefault(str(loaded.strategy), []).append(loaded)
    if not grouped:
        raise InputError("a report needs at least one run; give the folder of a saved run or comparison")
    # Over all sections together, so that a strategy keeps its colour.
    distinct = dict.fromkeys(text for _, runs in grouped for text in runs)
    looks = {text: look(number) for number, text in enumerate(distinct)}
    result: list[Section] = []
    for baseline, runs in grouped:
        names = labels(list(runs))
        groups = [StrategyRuns(text, names[text], *looks[text], own) for text, own in runs.items()]
        first = groups[0].runs[0]
        result.append(
            Section(first.program_name, first.engine, groups, baseline if baseline in runs and len(runs) > 1 else None)
        )
    return result
