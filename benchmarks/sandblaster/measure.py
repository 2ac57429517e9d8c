"""Sandblaster L-BFGS beside Downpour and synchronous SGD, in virtual time (Dean et al. 2012, figures 3 and 4, small).

    python benchmarks/sandblaster/measure.py           # all rows, some twenty minutes on 2 cores
    python benchmarks/sandblaster/measure.py --page
    python benchmarks/sandblaster/measure.py --data FOLDER --out FOLDER     # MNIST instead of digits

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import contenders
from contenders import ALONE_S, CONTENDERS, WARM_REPLICAS, WARMED, Setting
from kit.machine import machine
from kit.sheet import Sheet
from page import BATCH_KEYS, KEYS, best, page

HERE = Path(__file__).parent
REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEEDS = range(3)
FEW_SERVERS, OF_FEW = 8, (64,)
"""Servers, where there are fewer than replicas, and the numbers of replicas for which that is measured."""
FINALISTS = 2
"""Settings that are run with all seeds: those that were fastest with the first one."""
CURVES = {8: 20.0, 64: 8.0}
"""Replicas of the curves over time, and their seconds."""
PORTIONS = (8, 16, 24, 32, 40, 48, 64, 96, 128)
ROUNDS = ((1, False), (8, False), (8, True), (64, False), (256, False))
"""Replicas of the seconds of a batch, and whether an eighth of them are slow."""


class Task(NamedTuple):
    """A run to make."""

    servers: str
    """``each``: one on the host of each replica; else their number."""
    replicas: int
    side: str
    setting: Setting
    alone_s: float
    seed: int
    seconds: float | None = None
    data: Path | None = None


def done(task: Task) -> dict[str, Any]:
    """Make a run; return its row."""
    servers = None if task.servers == "each" else int(task.servers)
    found = contenders.run(
        task.side, task.setting, task.replicas, task.seed,
        servers=servers, data=task.data, seconds=task.seconds, alone_s=task.alone_s,
    )  # fmt: skip
    row = {name: getattr(task, name) for name in KEYS}
    if task.seconds is not None:
        for name in ("time_s", "test_accuracy", "test_loss"):
            row[f"all_{name}"] = " ".join(f"{getattr(record, name):.4g}" for record in found.history)
        return row | machine()
    losses = [record.test_loss for record in found.history if record.test_loss is not None]
    figures = {
        "time_s": "" if found.time_s is None else f"{found.time_s:.4g}",
        "least_loss": f"{min(losses):.4f}" if losses else "",
        "updates": found.updates,
    }
    return row | figures | machine()


def make(tasks: Sequence[Task], sheet: Sheet, processes: int) -> None:
    """Make those runs of which there is no row."""
    missing = [task for task in dict.fromkeys(tasks) if sheet.find(*(getattr(task, name) for name in KEYS)) is None]
    if not missing:
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) if processes > 1 else nullcontext() as pool:
        rows = map(done, missing) if pool is None else pool.map(done, missing)
        for k, row in enumerate(rows, 1):
            sheet.put(row)
            told = " ".join(str(row[name]) for name in KEYS)
            print(f"{k} of {len(missing)}: {told}: {row.get('time_s', '')}", flush=True)


def cells() -> Iterator[tuple[str, int, str]]:
    """Yield servers, replicas and contender of each time."""
    for side in CONTENDERS:
        yield from (("each", replicas, side) for replicas in REPLICAS)
        yield from ((str(FEW_SERVERS), replicas, side) for replicas in OF_FEW)


def measure(folder: Path, data: Path | None, processes: int) -> None:
    """Measure what is not there: all settings with one seed, the fastest with all; curves; warm starts; backups."""
    sheet = Sheet(folder / "times.csv", KEYS)
    first = [Task(*cell, setting, 0.0, 0, data=data) for cell in cells() for setting in CONTENDERS[cell[2]].grid]
    make(first, sheet, processes)
    finals = list[Task]()
    for cell in cells():
        finals += [Task(*cell, setting, 0.0, seed, data=data) for setting in fastest(sheet, *cell) for seed in SEEDS]
    make(finals, sheet, processes)
    curves, warm = list[Task](), list[Task]()
    for side in CONTENDERS:
        for replicas, seconds in CURVES.items():
            if found := best(sheet.rows, "each", replicas, side):
                setting = setting_of(side, found[0])
                curves += [Task("each", replicas, side, setting, 0.0, seed, seconds, data) for seed in SEEDS]
    for side in WARMED:
        for replicas in WARM_REPLICAS:
            if found := best(sheet.rows, "each", replicas, side):
                size = setting_of(side, found[0]).size
                settings = [setting for setting in CONTENDERS[side].grid if setting.size == size]
                for alone_s in (0.0, ALONE_S):
                    cell = ("each", replicas, side)
                    warm += [Task(*cell, each, alone_s, seed, data=data) for each in settings for seed in SEEDS]
    make(curves, Sheet(folder / "curves.csv", KEYS), processes)
    make(warm, sheet, processes)


def fastest(sheet: Sheet, servers: str, replicas: int, side: str) -> list[Setting]:
    """Return the settings that reached the target first with the first seed."""
    rows = {setting: sheet.find(servers, replicas, side, setting, 0.0, 0) for setting in CONTENDERS[side].grid}
    times = {setting: float(row["time_s"]) for setting, row in rows.items() if row is not None and row["time_s"]}
    return sorted(times, key=times.__getitem__)[:FINALISTS]


def setting_of(side: str, text: str) -> Setting:
    """Return the setting that has this text."""
    return next(setting for setting in CONTENDERS[side].grid if str(setting) == text)


def backups(sheet: Sheet) -> None:
    """Measure what a slow replica costs, by portions."""
    policies = [(f"sandblaster:portions={n}{backup}", n) for n in PORTIONS for backup in ("", ",backups=false")]
    for policy, portions in [*policies, ("synchronous", 8)]:
        if sheet.find(policy) is None:
            over = f"{contenders.seconds_over_ideal(policy, portions):.4f}"
            sheet.put({"policy": policy, "portions": portions, "over_ideal": over} | machine())


def batches(sheet: Sheet) -> None:
    """Measure the seconds of a batch by portions, where A is sent for each of them, and where it is sent once."""
    for replicas, slow in ROUNDS:
        for network, backups in ((False, True), (True, True), (True, False)):
            for portions in contenders.PORTIONS:
                if sheet.find(*(key := (replicas, slow, network, backups, portions))) is None:
                    took = contenders.batch_s(portions, replicas, network=network, backups=backups, slow=slow)
                    sheet.put(dict(zip(BATCH_KEYS, key, strict=True)) | {"batch_s": f"{took:.4g}"} | machine())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write README.md alone")
    parser.add_argument("--data", type=Path, help="folder of MNIST; left out: digits")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    said = parser.parse_args(arguments)
    results = said.out / "results"
    if not said.page:
        backups(Sheet(results / "backups.csv", ("policy",)))
        batches(Sheet(results / "batches.csv", BATCH_KEYS))
        measure(results, said.data, said.processes)
    page(results, said.out)


if __name__ == "__main__":
    main()
