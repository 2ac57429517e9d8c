"""Write README.md from results/."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.machine import described
from kit.words import grid
from rows import ROWS
from rows.contract import DDP, RAY_TRAIN, TORCHFT

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NUMBERS = range(1, 21)
"""Of the scorecard's tests; each is worth five points."""

HEAD = """# Reliability

Real processes are killed, stopped, slowed, cut off, or have their disk filled and their files damaged, by an injector
outside of them that logs what it does (`results/*.log`, seconds of the monotonic clock); what comes of it is compared
with a run that nothing happened to, by the SHA-256 of all parameters and the optimizer's state.

    python benchmarks/reliability/measure.py --keep --data DIR   # all rows and comparators: hours, on idle cores
    python benchmarks/reliability/measure.py kill --share 0.1    # a tenth of one row's trials; writes nothing

Workloads: W1 is an MLP 784-256-10 with dropout under Adam, batch 32 per replica, W2 a CNN on CIFAR-10, W3 a character
transformer of 0.8 M parameters, W4 25 M parameters under Adam; one thread for each process. Rows are of W1 where they
name none; data are random, of the sets' shapes, where no DIR is given. A trial fails where any of the numbers to pass
is missed; nothing is tried again. With k failures in n trials the upper bound of the rate is that of Clopper and
Pearson at 95 %, one-sided. "Back" is the time from the signal to the first step of the worker that has taken the place
of the one that was hit.
"""

SCORING = """
Points of a test: 3 where all of its rows met their numbers in all the trials that the scorecard asks for, 1 where
whatever failed was told in one message with process, step and cause, 1 where the same script drove a comparator.
"""


def bound(failures: int, trials: int) -> float:
    """Return the one-sided upper bound of a failure rate at 95 %, by bisection on the binomial distribution.

    >>> round(bound(0, 100), 4), round(bound(1, 100), 4)
    (0.0295, 0.0466)
    """
    from math import comb

    low, high = failures / trials if trials else 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(comb(trials, i) * middle**i * (1 - middle) ** (trials - i) for i in range(failures + 1))
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return high


def rows_of(number: str) -> list[str]:
    """Return the names of a test's rows; a row's docstring begins with the number of its test."""
    return [name for name, each in ROWS.items() if re.match(r"R\d+", str(each.run.__doc__))[0] == number]  # type: ignore[index]


def points(rows: Sequence[Mapping[str, Any]], many: int) -> tuple[int, int, int]:
    """Return the points of one test for its numbers, its messages and its comparators.

    Args:
        rows: results of its rows.
        many: how many rows it has; those that were not run met nothing.
    """
    if not rows:
        return 0, 0, 0
    passed = len(rows) == many and all(not row["failures"] and row["trials"] >= row["stated"] for row in rows)
    named = all(not row["unnamed"] for row in rows)
    compared = any(seen["trials"] for row in rows for seen in row.get("others", {}).values())
    return 3 * passed, int(named), int(compared)


def write_page() -> None:
    """Write the page."""
    found: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    found = sorted((each for each in found if "row" in each), key=lambda each: (int(each["row"][1:]), each["title"]))
    by_number = {f"R{i}": [each for each in found if each["row"] == f"R{i}"] for i in NUMBERS}
    score = {number: points(rows, len(rows_of(number))) for number, rows in by_number.items()}
    total = sum(map(sum, score.values()))
    tests = grid(
        ("test", "rows run", "numbers", "told", "compared", "points"),
        [
            (number, f"{len(by_number[number])} of {len(rows_of(number))}", *each, sum(each))
            for number, each in score.items()
        ],
    )  # fmt: skip
    loads = ", ".join(sorted({f"{each['load']:g}" for each in found}))
    machines = described([each["machine"] for each in found])
    parts = [
        HEAD,
        _rows(found),
        f"## What others do\n\n{_others(found)}",
        f"## Score: {total} of {5 * len(NUMBERS)}\n{SCORING}\n{tests}",
        f"Machine: {machines}. Load average before each row: {loads}.\n",
    ]
    (HERE / "README.md").write_text("\n\n".join(part.rstrip() for part in parts) + "\n", encoding="utf-8")


def _rows(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in found:
        k, n = len(each["failures"]), each["trials"]
        many = f"≤ {bound(k, n):.1%}" if n > 1 else "—"
        of = f"{n} of {each['stated']}" if n < each["stated"] else n
        rows.append((each["row"], each["title"], each["passes"], of, k, many, _figures(each["figures"])))
    return grid(("row", "what is done", "numbers to pass", "n", "failed", "rate at 95 %", "measured"), rows)


def _others(found: Sequence[Mapping[str, Any]]) -> str:
    names = (DDP, TORCHFT, RAY_TRAIN)
    rows = []
    for each in found:
        cells = [_seen(each.get("others", {}).get(name)) for name in names]
        if any(cell != "—" for cell in cells):
            rows.append((each["row"], each["title"], *cells))
    return grid(("row", "what is done", *names), rows)


def _seen(seen: Mapping[str, Any] | None) -> str:
    if seen is None:
        return "—"
    figures = _figures(seen["figures"])
    return f"{seen['told']}{f'; {figures}' if figures else ''} (n = {seen['trials']})"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in figures.items())
