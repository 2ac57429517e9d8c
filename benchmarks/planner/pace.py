"""Simulated paces beside the equations of stragglers, at 10^5 updates.

    python benchmarks/planner/pace.py
    python benchmarks/planner/pace.py --page

The first simulates what is not yet in results/pace.csv, the second writes pace.md from it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import straggler_equations
from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from pace_page import page

from paceline.aggregation import parse
from paceline.clock import Distribution
from paceline.clock import parse as distribution
from paceline.clock.distributions import Exponential
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.policies import pace

HERE = Path(__file__).parent

REPLICAS = 8
KINDS = ("exponential:mean=1", "shifted-exponential:shift=1,mean=0.5", "pareto:scale=1,shape=3")


class Cell(NamedTuple):
    """A policy with its equations."""

    policy: str
    times: str
    update_s: Seconds
    staleness: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate what is not there yet, or write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write pace.md from what has been simulated")
    made.add_argument("--updates", type=int, default=100_000, help="of each simulation; 100000 by default")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and pace.md; this folder")
    said = made.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "pace.csv", ("policy", "times", "replicas", "updates"))
    return guarded(lambda: write(said.out, sheet) if said.page else fill(said.updates, sheet), str(said.out))


def fill(updates: int, sheet: Sheet) -> None:
    """A row for each cell."""
    found = list(cells())
    with progress(len(found)) as bar:
        for cell in found:
            bar.update(bar.task_ids[0], description=f"{cell.policy}, {cell.times}")
            if sheet.find(cell.policy, cell.times, REPLICAS, updates) is None:
                sheet.put(simulated(cell, updates))
            bar.advance(bar.task_ids[0])


def simulated(cell: Cell, updates: int) -> dict[str, Any]:
    """One row."""
    began = time.perf_counter()
    found = pace(parse(cell.policy), REPLICAS, distribution(cell.times), updates=updates)
    took_s = time.perf_counter() - began
    return {
        "policy": cell.policy,
        "times": cell.times,
        "replicas": REPLICAS,
        "updates": updates,
        "update_s": cell.update_s,
        "simulated_update_s": found.update_s,
        "staleness": "" if cell.staleness is None else cell.staleness,
        "simulated_staleness": found.staleness,
        "took_s": f"{took_s:.2f}",
        **machine(),
    }


Equation = Callable[[Distribution, int, int], Seconds]

BY_K: dict[str, tuple[Equation, Callable[[int, int], float], bool]] = {
    "buffered:k={k},cancel=true": (straggler_equations.k_sync_s, lambda k, replicas: 0.0, False),
    "buffered:k={k},hold=false,cancel=true": (straggler_equations.k_batch_sync_s, lambda k, replicas: 0.0, True),
    "buffered:k={k}": (straggler_equations.k_async_s, straggler_equations.k_async_staleness, True),
    "buffered:k={k},hold=false": (
        straggler_equations.k_batch_async_s,
        straggler_equations.k_batch_async_staleness,
        False,
    ),
}
"""Text -> seconds of an update, staleness, and whether the equation is of exponential times alone."""


def cells() -> Iterator[Cell]:
    """All that there is an equation for."""
    for text in KINDS:
        times, exponential = distribution(text), isinstance(distribution(text), Exponential)
        yield Cell("synchronous", text, straggler_equations.synchronous_s(times, REPLICAS), 0.0)
        yield Cell("asynchronous", text, straggler_equations.asynchronous_s(times, REPLICAS), REPLICAS - 1.0)
        lockstep_s = straggler_equations.synchronous_s(times, REPLICAS) / REPLICAS
        yield Cell("stale-synchronous:bound=0", text, lockstep_s, None)
        for policy, (update_s, staleness, only) in BY_K.items():
            for k in (2, 4) if exponential or not only else ():
                yield Cell(policy.format(k=k), text, update_s(times, k, REPLICAS), staleness(k, REPLICAS))
        if exponential:
            for backups in (1, 2):
                update_s = straggler_equations.backups_s(times, backups, REPLICAS)
                yield Cell(f"synchronous:backups={backups}", text, update_s, 0.0)
        if not text.startswith("pareto"):
            update_s = straggler_equations.local_steps_s(times, 4, REPLICAS)
            yield Cell("local-steps:period=4", text, update_s, 0.0)


def write(folder: Path, sheet: Sheet) -> None:
    """The page, of what there is."""
    if not sheet.rows:
        raise InputError(f"nothing has been simulated into {sheet.path}; leave out --page first")
    path = folder / "pace.md"
    path.write_text(page(sheet.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
