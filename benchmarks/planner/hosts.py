"""Updates a second that are predicted of servers on several hosts, beside what emulated hosts make (needs root).

    python benchmarks/planner/hosts.py
    python benchmarks/planner/hosts.py --page

The first measures what is not there yet into results/, the second writes hosts.md. Hosts are those of
benchmarks/hosts: namespaces of one machine with limited links, on which asynchronous replicas compute nothing.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "hosts"))

from hosts_page import page
from kit.hosts import why_not
from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from measure import INSIDE, KEYS, Case, measured

from paceline.core.errors import InputError

HERE = Path(__file__).parent

RATES, SIZES = (200, 1000), (22_000, 1_000_000, 5_000_000)
"""Mbit/s of each host's link in each direction, and parameters."""

LARGEST = 20_000_000
"""Parameters of all replicas together."""

COUNTS = ((4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 8, 2), (4, 8, 4), (2, 2, 1), (2, 2, 2))
"""Hosts, replicas and servers; as many replicas on each host, as which host Ray names first is not known."""


def cells() -> list[Case]:
    """Return all rows: what the links carry, what this machine does without them, and what is predicted."""
    links = [Case("sockets", mbit, 4, False, 4, 0, 0, 0) for mbit in RATES]
    limited = [
        Case("paceline", mbit, hosts, False, replicas, servers, size, 0)
        for hosts, replicas, servers in COUNTS
        for size in reversed(SIZES)
        for mbit in RATES
        if replicas * size <= LARGEST  # beyond, a run of seconds has too few Δs
    ]
    return [*links, *_unlimited(0), *limited, *_unlimited(1)]


def _unlimited(number: int) -> list[Case]:
    """Return a round of runs for what a Δ takes of the cores: before those that are predicted, and after them."""
    # One host: all slices in shared memory. Four, each with a server and a replica: all but one over TCP.
    alone = [Case("paceline", 0, 1, False, 2, 1, size, number) for size in SIZES]
    return alone + [Case("paceline", 0, 4, False, 4, 4, size, number) for size in SIZES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write hosts.md from what has been measured")
    made.add_argument("--seconds", type=float, default=10.0, help="that a run takes; 10 by default, large A twice that")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and hosts.md; this folder")
    said = made.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "hosts.csv", KEYS)
    if said.page:
        return guarded(lambda: write(said.out, sheet), str(sheet.path))
    if reason := why_not():
        raise SystemExit(reason)
    if INSIDE not in os.environ:
        # All processes of all hosts in a namespace of processes that ends with this one.
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv]
        return subprocess.run(apart, env=os.environ | {INSIDE: "1"}, check=False).returncode
    return guarded(lambda: fill(said.seconds, sheet), str(sheet.path))


def fill(seconds: float, sheet: Sheet) -> None:
    """A row for each cell, with how busy the machine was before it."""
    found = cells()
    with progress(len(found)) as bar:
        for case in found:
            key = dict(zip(KEYS, astuple(case), strict=True))
            bar.update(bar.task_ids[0], description=" ".join(map(str, astuple(case))))
            if sheet.find(*key.values()) is None:
                busy = f"{os.getloadavg()[0]:.2f}"
                times = 2 if case.parameters > 10**6 else 1
                sheet.put({**key, **measured(case, times * seconds), "load": busy, **machine()})
            bar.advance(bar.task_ids[0])


def write(folder: Path, sheet: Sheet) -> None:
    """The page, of what there is."""
    if not sheet.rows:
        raise InputError(f"nothing has been measured into {sheet.path}; leave out --page first")
    path = folder / "hosts.md"
    path.write_text(page(sheet.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
