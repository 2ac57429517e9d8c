"""Tables and lists of the page, as HTML. All that a user may have written is escaped here."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from paceline.metrics.columns import FULL, Column, Entry, grid
from paceline.metrics.rounds import difference, mean_summary
from paceline.report.sources import Group, Section


def name(group: Group) -> str:
    """A strategy's label beside its colour."""
    line = {"-": "solid", "--": "dashed", ":": "dotted"}[group.dash]
    swatch = f'<span class="swatch" style="border-top-color:{group.colour};border-top-style:{line}"></span>'
    return swatch + escape(group.label)


def legend(groups: Sequence[Group]) -> str:
    """All strategies beside their colours, in one line."""
    return f'<div class="legend">{"".join(f"<span>{name(group)}</span>" for group in groups)}</div>'


def strategies(section: Section) -> str:
    """Each strategy's label and full text."""
    titles = '<th>strategy</th><th class="text">in full</th><th>rounds</th><th>training time, s</th>'
    return _table(f"<thead><tr>{titles}</tr></thead>", "".join(map(_strategy_row, section.groups)))


def _strategy_row(group: Group) -> str:
    seconds = mean_summary([run.summary for run in group.runs]).get("seconds")
    cells = [str(len(group.runs)), "–" if seconds is None else f"{seconds:,.1f}"]
    text = f'<td class="text"><code>{escape(group.strategy)}</code></td>'
    return f"<tr><td>{name(group)}</td>{text}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def results(section: Section) -> str:
    """What each strategy reached, and its differences against the baseline."""
    columns, lines = grid(FULL, [_entry(section, group) for group in section.groups])
    rows = [
        f"<tr><td>{name(group)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>"
        for group, line in zip(section.groups, lines, strict=True)
    ]
    return _table(_head(columns), "".join(rows), _explain(section))


def _entry(section: Section, group: Group) -> Entry:
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
        said.append(f"Difference: of that mean, strategy minus {against}, accuracy in percentage points; "
                    "higher accuracy and lower loss are better.")  # fmt: skip
        if rounds > 1:
            said.append("±: half a 95 % interval (Student's t, paired by round).")
    said.append("Staleness: how many updates A had had since it was read for a gradient, when that was applied; its mean.")
    return " ".join(said)


def notes(section: Section) -> str:
    """What a reader of the figures should know about single runs: deaths, interruptions, what was thrown away."""
    items = list(dict.fromkeys(item for group in section.groups for item in _group_notes(group)))
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _group_notes(group: Group) -> Iterable[str]:
    for number, run in enumerate(group.runs):
        where = f"{escape(group.label)}, round {number + 1}: " if len(group.runs) > 1 else f"{escape(group.label)}: "
        for gone in run.left:
            yield f"{where}replica {gone.replica} left after {gone.time_s:.2f} s: {escape(gone.reason)}."
        if run.summary.get("interrupted"):
            yield f"{where}interrupted after {run.summary.get('seconds') or 0:.2f} s."
        if run.summary.get("nonfinite"):
            yield f"{where}{run.summary['nonfinite']:,} gradients were not finite and were discarded."
        for key, said in (run.summary.get("notes") or {}).items():
            yield f"{escape(str(key))}: {escape(str(said))}"


def _table(head: str, rows: str, caption: str = "") -> str:
    below = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{below}{head}<tbody>{rows}</tbody></table></div>'
