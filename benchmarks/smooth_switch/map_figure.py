"""The map of regimes as a picture: who wins where, by how much over asynchronous training."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
from figures import LOOK
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from regimes import CANDIDATES, OTHERS, RATES, SERVERS, SMOOTH, STDS
from regret import Contest

FAMILIES = {
    "asynchronous": ("asynchronous",),
    "fixed Smooth Switch": (*SMOOTH, "linear", "exponential"),
    "loss-driven": ("loss-driven",),
    "buffered": ("buffered 12",),
    "synchronous": ("synchronous",),
}
"""Groups distinguished by colour."""

COLOURS = ("#d9d9d9", "#9fd3c7", "#f6d186", "#c3b1e1", "#f4a7a3", "#ffffff")

MEASURES = {"accuracy": "time-averaged test accuracy", "time": "time to the target"}

FIXED = (*CANDIDATES, *OTHERS)


def family(name: str | None) -> int:
    """Its place among :data:`FAMILIES`; the one after the last where none won."""
    return next((i for i, members in enumerate(FAMILIES.values()) if name in members), len(FAMILIES))


def draw(contests: Sequence[Contest], folder: Path) -> list[Path]:
    """``map_accuracy`` and ``map_time``, as PNG and SVG."""
    by_label = {contest.regime.label: contest for contest in contests}
    drawers: dict[str, Callable[[Contest], tuple[int, str]]] = {"accuracy": _by_accuracy, "time": _by_time}
    paths = []
    for measure, told in drawers.items():
        with mpl.rc_context(LOOK | {"axes.grid": False}):
            figure = _figure(by_label, told)
            figure.suptitle(f"Who wins by {MEASURES[measure]}", x=0.01, ha="left")
            for kind in ("png", "svg"):
                path = folder / f"map_{measure}.{kind}"
                figure.savefig(path, dpi=130, metadata={"Date": None} if kind == "svg" else None)
                paths.append(path)
    return paths


def _figure(contests: dict[str, Contest], told: Callable[[Contest], tuple[int, str]]) -> Figure:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    for combine, ax in zip(("sum", "mean"), axes, strict=True):
        _panel(ax, contests, combine, told)
    handles = [Patch(color=colour, label=name) for name, colour in zip(FAMILIES, COLOURS, strict=False)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _panel(ax: Axes, contests: dict[str, Contest], combine: str, told: Callable[[Contest], tuple[int, str]]) -> None:
    rows, columns = list(product(SERVERS, STDS)), list(RATES)
    places = [[len(FAMILIES)] * len(columns) for _ in rows]
    for (i, (server, std)), (j, rate) in product(enumerate(rows), enumerate(columns)):
        contest = contests.get(f"server {server} | lr {rate} | {combine} | N(0, {std:g})")
        if contest is not None:
            places[i][j], text = told(contest)
            ax.text(j, i, text, ha="center", va="center", fontsize=7.5)
    ax.imshow(places, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(FAMILIES), aspect="auto")
    ax.set_title(f"combine={combine}")
    ax.set_xticks(range(len(columns)), [f"lr {rate}" for rate in columns])
    ax.set_yticks(range(len(rows)), [f"server {server}, delay N(0, {std:g})" for server, std in rows])
    for i in range(len(STDS), len(rows), len(STDS)):
        ax.axhline(i - 0.5, color="white", linewidth=3)


def _by_accuracy(contest: Contest) -> tuple[int, str]:
    winner = contest.winner(FIXED)
    ahead = contest.standings[winner].accuracy - contest.standings["asynchronous"].accuracy
    return family(winner), f"{winner}\n{ahead:+.1f} points" if ahead else winner


def _by_time(contest: Contest) -> tuple[int, str]:
    winner = contest.first(FIXED)
    if winner is None:
        return family(None), "none"
    mine, theirs = (contest.standings[name].to_target_s for name in (winner, "asynchronous"))
    beside = f"{theirs:.0f} s" if math.isfinite(theirs) else "never"
    return family(winner), f"{winner}\n{mine:.0f} s" + (f" ({beside})" if mine != theirs else "")
