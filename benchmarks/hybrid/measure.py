"""One small transformer under every mesh of 2, 4 and 8 workers: time of a step, bytes sent, memory of a worker.

    python benchmarks/hybrid/measure.py
    python benchmarks/hybrid/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from meshes import LAYERS, WIDTH, Mesh, meshes, program
from page import page
from rich.progress import Progress

import paceline
from paceline.core.errors import InputError
from paceline.engine.local.engine import LocalEngine

HERE = Path(__file__).parent
ROUNDS, STEPS = 5, 40
CLOSE = 1e-2
"""How far a parameter may be from that of one process after a round, of its largest element: all add up the same
float32 products, in another order, and the biases of keys, whose gradient is 0, are nothing but that."""

ALONE = Mesh(1, 1, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    sheet = Sheet(said.out / "results" / "steps.csv", ("replicas", "stages", "shards"))
    return guarded(lambda: write(said.out, sheet) if said.page else fill(said, sheet), str(sheet.path.parent))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], help="2, 4 and 8 by default")
    made.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each mesh, by turns; {ROUNDS} by default")
    made.add_argument("--steps", type=int, default=STEPS, help=f"of a run; {STEPS} by default")
    made.add_argument("--layers", type=int, default=LAYERS, help=f"of the transformer; {LAYERS} by default")
    made.add_argument("--width", type=int, default=WIDTH, help=f"of the transformer; {WIDTH} by default")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    return made.parse_args(arguments)


def fill(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table: in each round, one process and then all meshes of so many workers."""
    wanted = {
        count: [mesh for mesh in meshes(count) if said.again or sheet.find(*mesh) is None] for count in said.workers
    }
    with LocalEngine() as engine, progress(said.rounds * sum(map(len, wanted.values()))) as bar:
        for some in wanted.values():
            if some:
                _measure(said, engine, some, sheet, bar)


def _measure(said: argparse.Namespace, engine: LocalEngine, some: Sequence[Mesh], sheet: Sheet, bar: Progress) -> None:
    run = partial(_run, program(said.layers, said.width), engine, said.steps)
    alone: list[float] = []
    found: dict[Mesh, list[paceline.Run]] = {mesh: [] for mesh in some}
    for turn in range(said.rounds):
        one = run(ALONE)
        alone.append(_step_s(one))
        for mesh in some[:: -1 if turn % 2 else 1]:
            found[mesh].append(run(mesh))
            _check(mesh, found[mesh][-1], one)
            bar.update(bar.task_ids[0], description=f"{mesh.strategy}, round {turn + 1} of {said.rounds}", advance=1)
    for mesh, runs in found.items():
        ratio = median(_step_s(run) / one for run, one in zip(runs, alone, strict=True))
        sheet.put(_row(mesh, runs, ratio, said) | machine())


def _run(what: paceline.Program, engine: LocalEngine, steps: int, mesh: Mesh) -> paceline.Run:
    return paceline.train(what, mesh.strategy, engine=engine, steps=steps, evaluate_every=steps, progress=False)


def _step_s(run: paceline.Run) -> float:
    return float(run.summary["step_time_s"])


def _check(mesh: Mesh, run: paceline.Run, one: paceline.Run) -> None:
    """Raise AssertionError where a mesh has not trained the same model."""
    for name, value in one.state.items():
        largest, apart = float(value.abs().max()), float((run.state[name] - value).abs().max())
        assert apart <= CLOSE * largest, f"{mesh.strategy}: {name} is {apart:g} from one process's, of {largest:g}"


def _row(mesh: Mesh, runs: Sequence[paceline.Run], ratio: float, said: argparse.Namespace) -> dict[str, Any]:
    def largest(name: str) -> int:
        return max((value for run in runs for value in run.summary.get(name, ()) if value is not None), default=0)

    return {
        **mesh._asdict(),
        "step_ms": f"{1e3 * median(map(_step_s, runs)):.3f}",
        "of_one": f"{ratio:.3f}",
        "sent_bytes": round(median(run.summary["payload_bytes_per_step"] or 0 for run in runs)),
        "parameter_bytes": largest("parameter_bytes"),
        "saved_bytes": largest("peak_saved_bytes"),
        "memory_bytes": largest("peak_memory_bytes"),
        "rounds": said.rounds,
        "layers": said.layers,
        "width": said.width,
    }


def write(folder: Path, sheet: Sheet) -> None:
    """The page, of what there is."""
    if not sheet.rows:
        raise InputError(f"nothing has been measured into {sheet.path.parent}; leave out --page first")
    path = folder / "README.md"
    path.write_text(page(sheet.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
