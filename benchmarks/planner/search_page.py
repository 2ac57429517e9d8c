"""The page of what planning takes."""

from collections.abc import Sequence

from kit.machine import described
from kit.sheet import Row
from kit.words import grid
from search_regret import section

HEAD = """\
# What planning takes

    python benchmarks/planner/search.py
    python benchmarks/planner/search.py --page

A transformer of 128 layers and 232 billion parameters on H100s, eight a host: `paceline plan --json`, from starting
Python to the last line. That is the search, why others lost, what fits, and the curve from one worker to all.
*carried*: what Paceline carries on GPUs by now; *all*: with `--unbuilt`. Memory is the most of all runs up to that row.
"""


def page(rows: Sequence[Row], regrets: Sequence[Row]) -> str:
    """The whole text."""
    head = ("devices", "looked at", "seconds", "of a processor", "memory, MB", "best")
    lines = [_line(row) for row in sorted(rows, key=lambda row: (int(row["devices"]), row["unbuilt"]))]
    beside = [section(regrets), f"\nOn {described(regrets)}.\n"] if regrets else []
    return "\n".join([HEAD, grid(head, lines), f"\nOn {described(rows)}.\n", *beside])


def _line(row: Row) -> tuple[str, ...]:
    return (
        f"{int(row['devices']):,}",
        "all" if row["unbuilt"] == "True" else "carried",
        f"{float(row['took_s']):.1f}",
        f"{float(row['processor_s']):.1f}",
        f"{int(row['peak_bytes']) / 1e6:.0f}",
        f"`{row['strategy']}`" if row["strategy"] else "nothing fits",
    )
