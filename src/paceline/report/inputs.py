"""What a report is about: runs, grouped by strategy, in sections that can be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.comparison import Comparison, load_comparison
from paceline.core.errors import InputError
from paceline.metrics.table_columns import labels
from paceline.run import Run, load

Source: TypeAlias = str | Path | Run | Comparison
"""A run, a comparison, or the folder that either was saved to."""

# Okabe and Ito's colours, for readers who see few: blue, vermilion, green, purple, orange, sky blue, black.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9", "#333333")
DASHES = ("-", "--", ":")
"""Where there are more strategies than colours, they come again with broken lines."""


@dataclass(frozen=True, slots=True)
class StrategyRuns:
    """One strategy with all its rounds."""

    strategy: str
    label: str
    colour: str
    dash: str
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Section:
    """Strategies that trained one program on one engine."""

    program: str
    engine: str
    groups: Sequence[StrategyRuns]
    baseline: str | None
    """The strategy that the others are held against; None: the runs come from no comparison."""


def sections(sources: Iterable[Source]) -> list[Section]:
    """One section for each comparison, one for all single runs of a program on an engine.

    A strategy has one colour throughout.

    Raises:
        InputError: nothing is given, a comparison has no complete run, or a folder can't be read.
    """
    found = _collect(sources)
    if not found:
        raise InputError("a report needs at least one run; give the folder of a saved run or comparison")
    looks = _looks(text for _, runs in found for text in runs)
    return [_section(runs, baseline, looks) for baseline, runs in found]


_Found: TypeAlias = tuple[str | None, Mapping[str, Sequence[Run]]]


def _collect(sources: Iterable[Source]) -> list[_Found]:
    found: list[_Found] = []
    single: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for each in map(_opened, sources):
        if isinstance(each, Comparison):
            found.append((each.baseline, _complete(each)))
            continue
        place = (each.program_name, each.engine)
        if place not in single:
            found.append((None, single.setdefault(place, {})))
        single[place].setdefault(str(each.strategy), []).append(each)
    return found


def _opened(source: Source) -> Run | Comparison:
    if isinstance(source, (Run, Comparison)):
        return source
    return load_comparison(source) if (Path(source) / "comparison.json").exists() else load(source)


def _complete(comparison: Comparison) -> dict[str, Sequence[Run]]:
    runs = {text: made for text, made in comparison.runs.items() if made}
    if not runs:
        raise InputError("the comparison was interrupted before its first run was complete; run it again")
    return runs


def _looks(strategies: Iterable[str]) -> dict[str, tuple[str, str]]:
    distinct = list(dict.fromkeys(strategies))
    colours = len(PALETTE)
    return {t: (PALETTE[i % colours], DASHES[i // colours % len(DASHES)]) for i, t in enumerate(distinct)}


def _section(runs: Mapping[str, Sequence[Run]], baseline: str | None, looks: Mapping[str, tuple[str, str]]) -> Section:
    names = labels(list(runs))
    groups = [StrategyRuns(text, names[text], *looks[text], made) for text, made in runs.items()]
    first = groups[0].runs[0]
    return Section(first.program_name, first.engine, groups, baseline if baseline in runs else None)
