"""Tables and lists of the page, as HTML. All that a user may have written is escaped here."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from paceline.metrics.efficiency import verdict
from paceline.metrics.repeats import difference, mean_summary
from paceline.metrics.table_columns import PACE, REACHED, Column, Entry, figure, grid
from paceline.report.inputs import Section, StrategyRuns


def name(group: StrategyRuns) -> str:
    """A strategy's label beside its colour."""
    line = {"-": "solid", "--": "dashed", ":": "dotted"}[group.dash]
    swatch = f'<span class="swatch" style="border-top-color:{group.colour};border-top-style:{line}"></span>'
    return swatch + escape(group.label)


def legend(groups: Sequence[StrategyRuns]) -> str:
    """All strategies beside their colours, in one line."""
    return f'<div class="legend">{"".join(f"<span>{name(group)}</span>" for group in groups)}</div>'


def strategies(section: Section) -> str:
    """Each strategy in full, how much it was run and how fast it went."""
    columns, lines = grid(_RAN, [_entry(section, group) for group in section.groups])
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    rows = [
        f'<tr><td>{name(group)}</td><td class="text"><code>{escape(group.strategy)}</code></td>{_cells(line)}</tr>'
        for group, line in zip(section.groups, lines, strict=True)
    ]
    head = f'<thead><tr><th>strategy</th><th class="text">in full</th>{titles}</tr></thead>'
    caption = "Staleness: how many updates A had had since it was read for a gradient, when that was applied; the mean."
    return _table(head, rows, caption)


_RAN = (
    Column("", "rounds", lambda entry: str(entry.rounds)),
    Column("", "training time, s", figure("seconds", ",.1f")),
    *PACE,
)


def results(section: Section) -> str:
    """What each strategy reached, and its differences against the baseline."""
    columns, lines = grid(REACHED, [_entry(section, group) for group in section.groups])
    rows = [f"<tr><td>{name(g)}</td>{_cells(line)}</tr>" for g, line in zip(section.groups, lines, strict=True)]
    return _table(_head(columns), rows, _explain(section))


def _entry(section: Section, group: StrategyRuns) -> Entry:
    summaries = {g.strategy: [run.summary for run in g.runs] for g in section.groups}
    ours, theirs = summaries[group.strategy], summaries.get(section.baseline or "", [])
    found = None if group.strategy == section.baseline else difference(ours, theirs)
    return Entry(group.label, mean_summary(ours), found, len(group.runs))


def _head(columns: Sequence[Column]) -> str:
    groups = [(title, len(list(members))) for title, members in groupby(columns, key=lambda column: column.group)]
    top = "".join(f'<th class="group" colspan="{count}">{escape(title)}</th>' for title, count in groups)
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    return f'<thead><tr><th class="group"></th>{top}</tr><tr><th>strategy</th>{titles}</tr></thead>'


def _explain(section: Section) -> str:
    rounds = max(len(group.runs) for group in section.groups)
    said = ["End: at the end; mean: over time, averaged over the whole interval of training by the trapezoid rule."]
    if rounds > 1:
        said.append("All figures are means over the rounds.")
    if section.baseline is not None:
        against = next(group.label for group in section.groups if group.strategy == section.baseline)
        said.append(f"Difference: of that mean, strategy minus {against}, accuracy in percentage points.")
        said.append("Higher accuracy and lower loss are better.")
        if rounds > 1:
            said.append("±: half a 95 % interval (Student's t, paired by round).")
    return " ".join(said)


def notes(section: Section) -> str:
    """What a reader of the figures should know about single runs: deaths, interruptions, what was thrown away."""
    items = list(dict.fromkeys(item for group in section.groups for item in _group_notes(group)))
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _group_notes(group: StrategyRuns) -> Iterable[str]:
    for number, run in enumerate(group.runs):
        where = f"{escape(group.label)}, round {number + 1}: " if len(group.runs) > 1 else f"{escape(group.label)}: "
        for gone in run.left:
            yield f"{where}replica {gone.replica} left after {gone.time_s:.2f} s: {escape(gone.reason)}."
        if run.summary.get("interrupted"):
            yield f"{where}interrupted after {run.summary.get('seconds') or 0:.2f} s."
        if run.summary.get("nonfinite"):
            yield f"{where}{run.summary['nonfinite']:,} gradients were not finite and were discarded."
        if said := verdict(run.summary):
            yield f"{where}{escape(said)}."
        for key, said in (run.summary.get("notes") or {}).items():
            yield f"{escape(str(key))}: {escape(str(said))}"


def _cells(line: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in line)


def _table(head: str, rows: Sequence[str], caption: str) -> str:
    body = f"{head}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table><caption>{escape(caption)}</caption>{body}</table></div>'
