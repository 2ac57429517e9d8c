"""Tables and lists of the page, as HTML. All text that a user may have written is escaped here."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from paceline.metrics.efficiency import verdict
from paceline.metrics.repeats import difference, mean_summary
from paceline.metrics.table_columns import PACE, REACHED, Column, Entry, figure, grid
from paceline.report.inputs import Section, StrategyRuns

_RUN_COLUMNS = (
    Column("", "rounds", lambda entry: str(entry.rounds)),
    Column("", "training time, s", figure("seconds", ",.1f")),
    *PACE,
)


def name(group: StrategyRuns) -> str:
    """Return a strategy's label next to its colour."""
    line = {"-": "solid", "--": "dashed", ":": "dotted"}[group.dash]
    swatch = f'<span class="swatch" style="border-top-color:{group.colour};border-top-style:{line}"></span>'
    return swatch + escape(group.label)


def legend(groups: Sequence[StrategyRuns]) -> str:
    """Return all strategies next to their colours, in one line."""
    return f'<div class="legend">{"".join(f"<span>{name(group)}</span>" for group in groups)}</div>'


def strategies(section: Section) -> str:
    """Return the table of strategies: their full text, number and length of runs, and rates."""
    columns, lines = grid(_RUN_COLUMNS, _entries(section))
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    rows = [
        f'<tr><td>{name(group)}</td><td class="text"><code>{escape(group.strategy)}</code></td>{_cells(line)}</tr>'
        for group, line in zip(section.groups, lines, strict=True)
    ]
    head = f'<thead><tr><th>strategy</th><th class="text">in full</th>{titles}</tr></thead>'
    caption = "Staleness: how many updates A had had since it was read for a gradient, when that was applied; the mean."
    return _table(head, rows, caption)


def results(section: Section) -> str:
    """Return the table of scores of each strategy, and of its differences from the baseline."""
    columns, lines = grid(REACHED, _entries(section))
    rows = [f"<tr><td>{name(g)}</td>{_cells(line)}</tr>" for g, line in zip(section.groups, lines, strict=True)]
    spans = [(title, len(list(members))) for title, members in groupby(columns, key=lambda column: column.group)]
    top = "".join(f'<th class="group" colspan="{count}">{escape(title)}</th>' for title, count in spans)
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    head = f'<thead><tr><th class="group"></th>{top}</tr><tr><th>strategy</th>{titles}</tr></thead>'
    rounds = max(len(group.runs) for group in section.groups)
    caption = ["End: at the end; mean: over time, averaged over the whole interval of training by the trapezoid rule."]
    if rounds > 1:
        caption.append("All figures are means over the rounds.")
    if section.baseline is not None:
        against = next(group.label for group in section.groups if group.strategy == section.baseline)
        caption.append(f"Difference: of that mean, strategy minus {against}, accuracy in percentage points.")
        caption.append("Higher accuracy and lower loss are better.")
        if rounds > 1:
            caption.append("±: half a 95 % interval (Student's t, paired by round).")
    return _table(head, rows, " ".join(caption))


def notes(section: Section) -> str:
    """Return a list of events in single runs: replicas that left, interruptions, discarded gradients."""
    items: list[str] = []
    for group in section.groups:
        for number, run in enumerate(group.runs):
            label = escape(group.label) + (f", round {number + 1}" if len(group.runs) > 1 else "")
            for gone in run.left:
                items.append(f"{label}: replica {gone.replica} left after {gone.time_s:.2f} s: {escape(gone.reason)}.")
            if run.summary.get("interrupted"):
                items.append(f"{label}: interrupted after {run.summary.get('seconds') or 0:.2f} s.")
            if run.summary.get("nonfinite"):
                count = run.summary["nonfinite"]
                items.append(f"{label}: {count:,} gradients were not finite and were discarded.")
            if sentence := verdict(run.summary):
                items.append(f"{label}: {escape(sentence)}.")
            for key, note in (run.summary.get("notes") or {}).items():
                items.append(f"{escape(str(key))}: {escape(str(note))}")
    return f"<ul>{''.join(f'<li>{item}</li>' for item in dict.fromkeys(items))}</ul>" if items else ""


def _entries(section: Section) -> list[Entry]:
    summaries = {group.strategy: [run.summary for run in group.runs] for group in section.groups}
    baseline = summaries.get(section.baseline or "", [])
    entries = []
    for group in section.groups:
        own = summaries[group.strategy]
        against = None if group.strategy == section.baseline else difference(own, baseline)
        entries.append(Entry(group.label, mean_summary(own), against, len(group.runs)))
    return entries


def _cells(line: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in line)


def _table(head: str, rows: Sequence[str], caption: str) -> str:
    body = f"{head}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table><caption>{escape(caption)}</caption>{body}</table></div>'
