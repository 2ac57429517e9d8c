"""One small transformer under every mesh of 2, 4 and 8 workers: time of a step, bytes sent, memory of a worker.

    python benchmarks/hybrid/measure.py
    python benchmarks/hybrid/measure.py --beside
    python benchmarks/hybrid/measure.py --latency
    python benchmarks/hybrid/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import beside
from kit.crew import crew
from kit.sheet import Sheet
from kit.work import guarded, progress, record
from latency import MODELS, WAYS, rows
from meshes import LAYERS, WIDTH, Mesh, Size, meshes
from page import page
from sides import OURS
from steps import Pace, Runs, cores

from paceline.core.errors import InputError
from paceline.engine.local.engine import LocalEngine

HERE = Path(__file__).parent
ROUNDS, STEPS, TURN_S = 5, 40, 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    folder = said.out / "results"
    mesh = Mesh._fields
    steps, sides = Sheet(folder / "steps.csv", mesh), Sheet(folder / "beside.csv", (*mesh, "backend", "side"))
    calls = Sheet(folder / "latency.csv", ("model", "way"))

    def work() -> None:
        if said.page:
            write(said.out, steps, sides, calls)
        elif said.beside:
            fill_sides(said, sides)
        elif said.latency:
            fill_calls(said, calls)
        else:
            fill(said, steps)

    return guarded(work, str(folder))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--beside", action="store_true", help="steps of the distributed engine beside torch's")
    what.add_argument("--latency", action="store_true", help="a single sample through predict")
    what.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    some = [count for count in (2, 4, 8, 16) if count <= max(8, cores())]
    made.add_argument("--workers", type=int, nargs="+", help=f"{' '.join(map(str, some))} by default; --beside: 2 4")
    made.add_argument("--backends", nargs="+", choices=("shm", "gloo"), default=["shm", "gloo"], metavar="BACKEND")
    made.add_argument(
        "--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=f"--latency: {', '.join(MODELS)}"
    )
    made.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all sides by turns; {ROUNDS} by default")
    made.add_argument("--steps", type=int, default=STEPS, help=f"of a run of 2 workers; {STEPS} by default")
    made.add_argument(
        "--turn", type=float, default=TURN_S, metavar="S", help=f"--beside: a turn; {TURN_S:g} by default"
    )
    made.add_argument("--layers", type=int, default=LAYERS, help=f"of the transformer; {LAYERS} by default")
    made.add_argument("--width", type=int, default=WIDTH, help=f"of the transformer; {WIDTH} by default")
    made.add_argument("--without-prediction", action="store_true", help="don't ask virtual time for its prediction")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    said.workers = said.workers or ([2, 4] if said.beside else some)
    said.models = said.models or [name for name in MODELS if name != "tiny"]
    return said


def fill(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of meshes."""
    wanted = {
        count: [mesh for mesh in meshes(count) if said.again or sheet.find(*mesh) is None] for count in said.workers
    }
    size, pace = Size(said.layers, said.width), Pace(said.rounds, said.steps)
    with LocalEngine() as engine, progress(said.rounds * sum(map(len, wanted.values()))) as bar:
        runs = Runs(engine, size, pace, predicts=not said.without_prediction)
        for some in wanted.values():
            if some:
                runs.measure(some, sheet, bar)


def fill_sides(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table beside torch: all sides of a mesh by turns, in the same processes."""

    def missing(mesh: Mesh, backend: str) -> bool:
        return said.again or sheet.find(*mesh, backend, OURS) is None

    wanted = {
        count: [cell for cell in product(meshes(count), said.backends) if missing(*cell)] for count in said.workers
    }
    size, pace = Size(said.layers, said.width), beside.Pace(said.rounds, said.turn)
    with progress(sum(map(len, wanted.values()))) as bar:
        for count, some in wanted.items():
            if some:
                record(crew(beside.measure, count, some, size, pace), sheet, bar, shown)


def fill_calls(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of single samples."""
    wanted = [name for name in said.models if said.again or any(sheet.find(name, way) is None for way in WAYS)]
    with progress(len(wanted)) as bar:
        for name in wanted:
            bar.update(bar.task_ids[0], description=name)
            for row in rows(name, said.rounds):
                sheet.put(row)
            bar.advance(bar.task_ids[0])


def shown(row: dict[str, Any]) -> str:
    """A row beside torch as it comes."""
    mesh = " × ".join(str(row[name]) for name in Mesh._fields)
    return f"{mesh} {row['backend']:5} {row['side']:12} {float(row['step_ms']):8.2f} ms, {row['of_one']} of one process"


def write(folder: Path, steps: Sheet, sides: Sheet, calls: Sheet) -> None:
    """The page, of what there is."""
    if not (steps.rows or sides.rows or calls.rows):
        raise InputError(f"nothing has been measured into {steps.path.parent}; leave out --page first")
    path = folder / "README.md"
    path.write_text(page(steps.rows, sides.rows, calls.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
