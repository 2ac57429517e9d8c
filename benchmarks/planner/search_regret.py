"""How much better the best plan would be if every arrangement that fits were simulated."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from kit.machine import machine
from kit.sheet import Row, Sheet
from kit.words import grid
from kit.work import progress

from paceline.planner import cluster_file
from paceline.planner.cluster_file import assumed
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import OF_EACH_KIND, CostCache, Ranking, key, search
from paceline.planner.shapes import shape_file

ALL, MOST = 10**9, 2000
"""How many are simulated on small clusters, and on large ones."""

SIZES = {
    "124M": (12, 768, 12, 1024),
    "1.3B": (24, 2048, 16, 2048),
    "6.7B": (32, 4096, 32, 2048),
    "232B": (128, 12288, 96, 2048),
}
"""Layers, hidden, heads, sequence."""

BATCH, EACH = 48, 2
"""Samples of a step on small clusters, and of each device on large ones."""

CLUSTERS = ("1x8 A100-80GB", "3x8 A100-80GB", "6x4 A100-40GB")
LARGE = ("64x8 H100-80GB", "1280x8 H100-80GB", "12500x8 H100-80GB")

SHAPE = """\
[model]
layers = {}
hidden = {}
heads = {}
sequence = {}

[train]
global_batch = {}
precision = "bf16-mixed"
optimizer = "adam"
"""

HEAD = f"""\
## What simulating only the best leaves out

    python benchmarks/planner/search.py --regret

Of all arrangements that fit, closed forms choose which are simulated: the fifty best, and {OF_EACH_KIND} of each
kind. Here all of them are, of batches of {BATCH} samples, and of the largest model, {EACH} samples a device, the
best {MOST:,}. *found*: what the search tells, without those that another of their sizes beats in time and memory.
*place*: where closed forms have the best of all. *regret*: how much longer a step takes with the plan that the search
calls best. Seconds are of a processor: of the search, and of simulating all.
"""


def fill(sheet: Sheet) -> None:
    """A row for each model on each cluster, of what is carried on GPUs and of all."""
    *small, large = SIZES
    pairs = [*product(small, CLUSTERS), *((large, cluster) for cluster in LARGE)]
    cells = [(*pair, unbuilt) for pair in pairs for unbuilt in (False, True)]
    with progress(len(cells)) as bar:
        for model, cluster, unbuilt in cells:
            bar.update(bar.task_ids[0], description=f"{model} on {cluster}")
            if sheet.find(model, cluster, unbuilt) is None:
                sheet.put(measured(model, cluster, unbuilt=unbuilt))
            bar.advance(bar.task_ids[0])


def measured(model: str, on: str, *, unbuilt: bool) -> dict[str, Any]:
    """One row."""
    known, asked = _known(model, on), Objectives(unbuilt=unbuilt)
    workload, cluster = known.workload, known.cluster
    began = time.process_time()
    found = search(workload, cluster, asked, cost_cache=known, of_each_kind=OF_EACH_KIND)
    searched_s = time.process_time() - began
    ranking = Ranking(known, replace(asked, simulated=MOST if on in LARGE else ALL))
    ranking.take(asked.batches(workload))
    every = [key(known.plan(arrangement), workload, asked)[0] for arrangement in ranking.best()]
    best = min(every)
    return {
        "model": model,
        "cluster": on,
        "unbuilt": unbuilt,
        "all": len(every),
        "found": len(found.plans),
        "place": every.index(best) + 1,
        "regret": key(found.plans[0], workload, asked)[0] / best - 1,
        "searched_s": round(searched_s, 3),
        "all_s": round(time.process_time() - began - searched_s, 3),
        **machine(),
    }


def _known(model: str, on: str) -> CostCache:
    cluster, overlap_model = assumed(cluster_file.read(on, "bf16-mixed"))
    batch = EACH * cluster.workers if on in LARGE else BATCH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.toml"
        path.write_text(SHAPE.format(*SIZES[model], batch), encoding="utf-8")
        shape = shape_file.read(path)
    return CostCache(shape.workload(cluster.device), cluster, overlap_model)


def section(rows: Sequence[Row]) -> str:
    """Of the page."""
    head = ("model", "cluster", "looked at", "found", "of", "place", "regret", "seconds", "of all")
    return "\n".join([HEAD, grid(head, [_line(row) for row in rows])])


def _line(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        row["cluster"],
        "all" if row["unbuilt"] == "True" else "carried",
        row["found"],
        f"{int(row['all']):,}",
        f"{int(row['place']):,}",
        f"{float(row['regret']):.2%}",
        f"{float(row['searched_s']):.1f}",
        f"{float(row['all_s']):.1f}",
    )
