"""What planning takes: seconds and memory of ``paceline plan`` against the number of devices.

    python benchmarks/planner/search.py
    python benchmarks/planner/search.py --regret
    python benchmarks/planner/search.py --page

The first plans what is not yet in results/search.csv, each in its own process; the second simulates all that fit of
small clusters, into results/search_regret.csv; the third writes search.md from both.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import search_regret
from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from search_page import page

HERE = Path(__file__).parent

HOSTS = (1, 8, 64, 1280, 12500)
"""Of eight devices each."""

EACH = 2
"""Samples of a step for each device, but no fewer than 512."""

SHAPE = """\
[model]
layers = 128
hidden = 12288
heads = 96
vocab = 51200
sequence = 2048

[train]
global_batch = {batch}
precision = "bf16-mixed"
optimizer = "adam"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan what is not there yet, or write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write search.md from what has been planned")
    made.add_argument("--regret", action="store_true", help="simulate all that fit, beside what the search chooses")
    made.add_argument("--hosts", type=int, nargs="+", default=HOSTS, help="of eight devices each")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and search.md; this folder")
    said = made.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "search.csv", ("devices", "unbuilt"))
    every = Sheet(said.out / "results" / "search_regret.csv", ("model", "cluster", "unbuilt"))
    if said.page:
        return guarded(lambda: write(said.out, sheet, every), str(said.out))
    return guarded(lambda: search_regret.fill(every) if said.regret else fill(said.hosts, sheet), str(said.out))


def fill(hosts: Sequence[int], sheet: Sheet) -> None:
    """A row for each number of hosts, of what is carried on GPUs and of all."""
    cells = [(each, unbuilt) for each in hosts for unbuilt in (False, True)]
    with progress(len(cells)) as bar:
        for each, unbuilt in cells:
            bar.update(bar.task_ids[0], description=f"{8 * each:,} devices")
            if sheet.find(8 * each, unbuilt) is None:
                sheet.put(planned(each, unbuilt=unbuilt))
            bar.advance(bar.task_ids[0])


def planned(hosts: int, *, unbuilt: bool) -> dict[str, Any]:
    """One row: of the whole command, from starting Python to its last line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.toml"
        path.write_text(SHAPE.format(batch=max(512, EACH * 8 * hosts)), encoding="utf-8")
        words = ["plan", str(path), "--cluster", f"{hosts}x8 H100-80GB", "--json", *(["--unbuilt"] if unbuilt else [])]
        command = [sys.executable, "-c", "from paceline.cli.main import main; main()", *words]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        took_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(done.stdout)
    best = told["plans"][0]["strategy"] if told["plans"] else ""
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "devices": 8 * hosts,
        "unbuilt": unbuilt,
        "took_s": round(took_s, 3),
        "processor_s": round(processor_s, 3),
        "peak_bytes": after.ru_maxrss * 1024,
        "strategy": best,
        **machine(),
    }


def write(out: Path, sheet: Sheet, every: Sheet) -> None:
    """The page."""
    (out / "search.md").write_text(page(sheet.rows, every.rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
