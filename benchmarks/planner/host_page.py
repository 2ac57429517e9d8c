"""The page of this host: predicted beside measured, and what the plan's choice costs."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, sqrt

from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid

HEAD = """\
# Predicted and measured on this host

    python benchmarks/planner/host.py
    python benchmarks/planner/host.py --page

Six models, each by one process and by two workers as replicas, stages and shards: what `paceline.plan` predicts of
the best of each kind, beside runs of all four in turns. Plans are predicted from measured pieces and from a profile,
which has run the likely best strategy of each kind for less than a second, three to five times; *before* says whether
it was this one. A step is the median of a run's, then of the runs, with the 95 % interval of that median by order
statistics; memory is of the worker that holds most. The aim: each within 10 %, and a choice as good as the best
measured (within the intervals), or at most 5 % slower.
"""

NORMAL = 1.96
"""Of standard deviations: 95 % lie within."""


def page(predicted: Sequence[Row], measured: Sequence[Row]) -> str:
    """The whole text."""
    rounds = len({row["round"] for row in measured})
    cells = list(_cells(predicted, measured))
    head = (
        "model",
        "strategy",
        "predicted, ms",
        "measured, ms",
        "ratio",
        "closed form, ms",
        "before",
        "predicted, MiB",
        "measured, MiB",
        "ratio",
    )
    parts = [
        HEAD,
        f"Machine: {described(measured)}. {rounds} rounds.\n",
        grid(head, [_line(*cell) for cell in cells]),
        "\n## How far off\n",
        bullets(_errors(cells)),
        "\n## What the plan chooses\n",
        bullets(_choices(cells)),
        "",
    ]
    return "\n".join(parts)


Cell = tuple[Row, Sequence[float], float]
"""What was predicted, seconds of each run, bytes."""


def _cells(predicted: Sequence[Row], measured: Sequence[Row]) -> Iterator[Cell]:
    for row in predicted:
        own = [each for each in measured if (each["model"], each["side"]) == (row["model"], row["side"])]
        if own:
            yield (
                row,
                [float(each["step_s"]) for each in own],
                statistics.median(int(each["held_bytes"]) for each in own),
            )


def interval(runs: Sequence[float]) -> tuple[float, float]:
    """Of their median, at 95 %: the (n ∓ 1.96 √n) / 2-th of them in order; of fewer than six, all of them.

    >>> interval([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    (2.0, 8.0)
    """
    ordered, n = sorted(runs), len(runs)
    low = max(1, floor((n - NORMAL * sqrt(n)) / 2) + 1) if n > 5 else 1
    high = min(n, ceil((n + NORMAL * sqrt(n)) / 2)) if n > 5 else n
    return ordered[low - 1], ordered[high - 1]


def _line(row: Row, runs: Sequence[float], held: float) -> tuple[str, ...]:
    low, high = interval(runs)
    middle, predicted, bytes_ = statistics.median(runs), float(row["step_s"]), float(row["held_bytes"])
    return (
        row["model"],
        row["strategy"],
        f"{predicted * 1e3:.2f}",
        f"{middle * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})",
        f"{middle / predicted:.2f}",
        f"{float(row['closed_s']) * 1e3:.2f}",
        "yes" if row["ran"] == "1" else "no",
        f"{bytes_ / 2**20:.0f}",
        f"{held / 2**20:.0f}",
        f"{held / bytes_:.2f}",
    )


def _errors(cells: Sequence[Cell]) -> Iterator[str]:
    ways = {
        "step time, from pieces": [float(row["step_s"]) / statistics.median(runs) - 1 for row, runs, _ in cells],
        "step time, by closed forms alone": [
            float(row["closed_s"]) / statistics.median(runs) - 1 for row, runs, _ in cells
        ],
        "memory": [float(row["held_bytes"]) / held - 1 for row, _, held in cells],
    }
    others = [float(row["step_s"]) / statistics.median(runs) - 1 for row, runs, _ in cells if row["ran"] != "1"]
    ways |= {"step time of what had not been run before": others} if others else {}
    for what, errors in ways.items():
        off = [abs(error) for error in errors]
        within = sum(each <= 0.1 for each in off)
        mean, most = statistics.fmean(off), max(off)
        yield f"{what}: {mean:.1%} on average, {most:.1%} at the most, {within} of {len(off)} within 10 %"


def _choices(cells: Sequence[Cell]) -> Iterator[str]:
    models: Mapping[str, list[Cell]] = {cell[0]["model"]: [] for cell in cells}
    for cell in cells:
        models[cell[0]["model"]].append(cell)
    for model, some in models.items():
        chosen = next((cell for cell in some if cell[0]["chosen"] == "1"), None)
        if chosen is not None:
            yield f"{model}: {_choice(chosen, min(some, key=lambda cell: statistics.median(cell[1])))}"


def _choice(chosen: Cell, best: Cell) -> str:
    """All have the same samples in a step, so the shortest step is the best."""
    (row, runs, _), (other, theirs, _) = chosen, best
    if row is other:
        return f"{row['strategy']}, the best measured"
    slower = statistics.median(runs) / statistics.median(theirs) - 1
    meet = interval(runs)[0] <= interval(theirs)[1]
    told_ = "their intervals overlap" if meet else "their intervals don't overlap"
    return f"{row['strategy']}, {slower:.1%} slower than {other['strategy']}; {told_}"
