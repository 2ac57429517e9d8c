"""The page of simulated paces."""

from collections.abc import Sequence
from statistics import fmean

from kit.machine import described
from kit.sheet import Row
from kit.words import grid

HEAD = """\
# Simulated paces beside their equations

    python benchmarks/planner/pace.py
    python benchmarks/planner/pace.py --page

`paceline.planner.policies` lets the engines' coordinator decide while a virtual clock runs;
`straggler_equations.py` has an equation for each row below.
{replicas} replicas, {updates} updates, of which the first tenth does not count. The aim is
1 %. Of these times exponential ones vary most: the mean of 90,000 has a standard error of 0.33 %. Under
`stale-synchronous:bound=0` 90,000 updates are no more than 11,250 rounds, and it is 0.43 %.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole text."""
    errors = [abs(_error(row)) for row in rows]
    took = [float(row["took_s"]) for row in rows]
    head = ("policy", "times", "equation, s", "simulated, s", "off", "staleness", "simulated")
    updates, replicas = (" or ".join(sorted({row[name] for row in rows}, key=int)) for name in ("updates", "replicas"))
    parts = [
        HEAD.format(replicas=replicas, updates=f"{int(updates):,}" if updates.isdigit() else updates),
        grid(head, map(_line, rows)),
        f"\nOff by {fmean(errors):.2%} on average and {max(errors):.2%} at the most. A simulation took {min(took):.1f} "
        f"to {max(took):.1f} s on {described(rows)}.\n",
    ]
    return "\n".join(parts)


def _error(row: Row) -> float:
    return float(row["simulated_update_s"]) / float(row["update_s"]) - 1


def _line(row: Row) -> tuple[str, ...]:
    known = f"{float(row['staleness']):.3f}" if row["staleness"] else ""
    return (
        f"`{row['policy']}`",
        row["times"],
        f"{float(row['update_s']):.4f}",
        f"{float(row['simulated_update_s']):.4f}",
        f"{_error(row):+.2%}",
        known,
        f"{float(row['simulated_staleness']):.3f}",
    )
