"""The page: each figure beside its aim."""

from collections.abc import Iterator, Sequence

from kit.machine import described
from kit.sheet import Row
from kit.words import grid
from limits import LIMITS, PAIRS

HEAD = f"""\
# Limits

    python benchmarks/limits/measure.py
    python benchmarks/limits/measure.py --page

What speed on one host has come up against, beside what is aimed at. The first command runs the scripts of the last
column (they are explained on the pages of their folders) and keeps their figures in `results/limits.csv`, the second
writes this page. Sides alternate within one run; figures are medians of {PAIRS} turns, and aims are met or missed to
two places.

A bound is the same figure without what is communicated: the same shards, whose collectives return at once; ranks that
train by themselves. Where the bound itself is beyond the aim, that is out of reach on this machine; but ranks that
share A and divide its update may be better than ranks by themselves. Zero-bubble has to be quicker, or not to be
proposed by plans, as where a stage's forward passes take less than 10 ms. One replica's short steps are graphs by
themselves unless the model is not pure: here one that counts its calls.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole text."""
    met = sum(row["met"] == "True" for row in rows)
    table = grid(("what", "of", "measured", "bound", "aim", "", "by"), _lines(rows))
    absent = [LIMITS[name].what for name in LIMITS if name not in {row["row"] for row in rows}]
    rest = f"\nNot measured: {'; '.join(absent)}.\n" if absent else ""
    return f"{HEAD}\nMachine: {described(rows)}. {met} of {len(rows)} aims are met.\n\n{table}\n{rest}"


def _lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for name, limit in LIMITS.items():
        for number, row in enumerate(row for row in rows if row["row"] == name):
            what, command = (limit.what, f"`{' '.join(limit.command)}`") if not number else ("", "")
            bound = f"{float(row['bound']):.2f}" if row.get("bound") else ""
            missed = "out of reach" if _forbids(row) else "missed"
            said = (row.get("instead") or "") if row["met"] == "True" else missed
            yield what, row["label"], f"{float(row['value']):.2f}", bound, row["aim"], said, command


def _forbids(row: Row) -> bool:
    """Whether the bound is beyond the aim."""
    sign, aim = row["aim"].split()
    bound = float(row.get("bound") or aim)
    return bound < float(aim) if sign == "≥" else bound > float(aim)
