"""The map of regimes and the adaptive threshold's regret: CSV files, figures and a page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import map_figure
import regimes
import sheets
from cells import Cell, Store
from map_figure import FIXED
from regimes import ADAPTIVE, ALL, CANDIDATES, Regime
from regret import FIXED as RECOMMENDED
from regret import TARGET, Contest, Regrets, contest, kept, sheet_rows
from sections import SCRIPT, grid

SHEET = "regimes.csv"

GROUPS = {
    "random tables": "configurations of tables 3 to 5",
    "image tables": "configurations of tables 1 and 2",
    "map": "the map",
    "held out": "digits, on which nothing was designed",
    "future work": "another model, loss or amount of data",
}
"""Group -> what it is."""

WHOLE = ("map", "future work")
"""Groups in which all strategies were run, not only the candidates."""


def groups(gradient_s: Mapping[str, float]) -> dict[str, list[Regime]]:
    """All regimes."""
    made = {
        "random tables": regimes.random_tables(gradient_s),
        "image tables": regimes.image_tables(gradient_s),
        "map": regimes.the_map(),
        "held out": regimes.held_out(),
        "future work": regimes.future_work(),
    }
    return {name: list(found) for name, found in made.items()}


def needed(found: Mapping[str, Sequence[Regime]], rounds: int) -> list[Cell]:
    """Their runs, round after round."""
    cells = []
    for number in range(rounds):
        for group, members in found.items():
            policies = ALL if group in WHOLE else CANDIDATES | ADAPTIVE
            cells += [regime.runs(policy, rounds)[number] for regime in members for policy in policies.values()]
    return cells


def rounds_kept(folder: Path) -> int | None:
    """Of the CSV file; None where there is none."""
    path = folder / SHEET
    return int(sheets.read(path)[0]["rounds"]) if path.exists() else None


def write(store: Store, gradient_s: Mapping[str, float], rounds: int, folder: Path) -> Path:
    """``regimes.md``, its figures and its CSV file, from what has been run, or else from that file."""
    folder.mkdir(parents=True, exist_ok=True)
    sheet, regimes = folder / SHEET, groups(gradient_s)
    before, found = kept(sheet, regimes), dict[str, list[Contest]]()
    for group, members in regimes.items():
        made = [contest(r, rounds, store) or before.get((group, r.label, rounds)) for r in members]
        found[group] = [one for one in made if one is not None]
    everything = [one for those in found.values() for one in those]
    sheets.write(sheet, [row for group, those in found.items() for row in sheet_rows(group, those, rounds)])
    if found["map"]:
        map_figure.draw(found["map"], folder)
    path = folder / "regimes.md"
    parts = [
        _head(rounds),
        _regrets(found, everything),
        _map(found["map"]),
        _future(found["future work"]),
        _worst(everything),
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def _head(rounds: int) -> str:
    return (
        "# Where which threshold wins\n\n"
        f"Virtual time, 25 workers of which half are delayed, 100 s, {rounds} "
        f"round{'s' if rounds > 1 else ''} for each strategy and regime; the same "
        "initial weights and data for all. On the map a gradient takes 0.1 s, and the server's times are fractions of "
        "it. Accuracies are test accuracies in points, averaged over the run. The time to target is that to "
        f"{100 * TARGET:g} % of the highest accuracy that any strategy reached in the regime.\n\n"
        f"Made by `{SCRIPT} --regimes --rounds {rounds}`; all numbers: [regimes.csv](regimes.csv)."
    )


def _regrets(found: Mapping[str, Sequence[Contest]], everything: Sequence[Contest]) -> str:
    rows = []
    for name, members in [*((GROUPS[g], m) for g, m in found.items()), ("all", everything)]:
        if members:
            made = Regrets.of(members)
            rows.append(
                (
                    name,
                    str(made.regimes),
                    *(f"{v:+.2f}" for v in (made.mean, made.percentile_95, made.worst, made.gain)),
                )
            )
    titles = ("where", "regimes", "mean regret", "95th percentile", "largest", f"ahead of {RECOMMENDED}, mean")
    return (
        "## The threshold that needs no tuning\n\n"
        "`smooth-switch:adaptive` against the best of synchronous, asynchronous and the paper's five step sizes, which "
        "is chosen afterwards for each regime by itself. Regret is how many points of time-averaged accuracy it is "
        f"behind; below 0 it is ahead.\n\n{grid(titles, rows)}"
    )


def _map(contests: Sequence[Contest]) -> str:
    if not contests:
        return f"## The map\n\nIts runs have not been made: `{SCRIPT} --regimes`."
    accuracy = Counter(made.winner(FIXED) for made in contests)
    times = Counter(made.first(FIXED) or "none" for made in contests)
    ahead = Counter(made.winner(ALL) for made in contests)
    names = sorted({*accuracy, *times, *ahead}, key=lambda name: -accuracy[name])
    rows = [(name, *(str(counts[name]) for counts in (accuracy, times, ahead))) for name in names]
    titles = ("strategy", "wins by accuracy", "wins by time to target", "wins by accuracy, adaptive among them")
    return (
        f"## The map\n\n{len(contests)} regimes: server time × learning rate and loss reduction × combine × delay.\n\n"
        "![Who wins by time-averaged accuracy](map_accuracy.png)\n\n[as SVG](map_accuracy.svg)\n\n"
        "![Who wins by time to the target](map_time.png)\n\n[as SVG](map_time.svg)\n\n" + grid(titles, rows)
    )


def _future(contests: Sequence[Contest]) -> str:
    if not contests:
        return ""
    rows = [(made.regime.label, *(_shown(made, name) for name in ALL)) for made in contests]
    return (
        "## What the paper names as future work\n\nUnder the assumptions of the tables. Time-averaged accuracy; the "
        f"best without the adaptive threshold is bold.\n\n{grid(('', *ALL), rows)}"
    )


def _shown(made: Contest, name: str) -> str:
    text = f"{made.standings[name].accuracy:.2f}" if name in made.standings else ""
    return f"**{text}**" if name == made.winner(FIXED) else text


def _worst(contests: Sequence[Contest]) -> str:
    worst = sorted(contests, key=lambda made: -made.regret)[:10]
    rows = [
        (c.regime.label.replace("|", ","), f"{c.regret:+.2f}", c.best, f"{c.standings[c.best].accuracy:.2f}")
        for c in worst
    ]
    return "## Where the adaptive threshold loses most\n\n" + grid(("regime", "regret", "best", "its accuracy"), rows)
