"""Milliseconds of one synchronous step of two workers: Paceline, processes that only meet at a barrier, DDP on Gloo.

The three alternate. After each turn Paceline's parameters are compared with DDP's, by name.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.multiprocessing
from ranks import CASES, RANKS, TIMEOUT_S, Barrier, at_barrier, make_program, on_gloo
from torch import Tensor

from paceline import Worker, launch
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine

WARM_UP = 20
"""Steps that are made, but not timed."""

TOLERANCE = 1e-5
"""Parameters are below 1; float32 keeps 6e-8 of them at a step, and roundings add up over hundreds of steps."""


class Turn(NamedTuple):
    """One model on all three, once."""

    paceline_ms: float
    pair_ms: float
    ddp_ms: float
    difference: float
    """The largest between a parameter of Paceline's and DDP's."""
    where: str
    """Its name."""
    moved: float
    """How far the parameter that moved most is from A_0."""


def on_paceline(engine: Engine, name: str, steps: int, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """When replica 0 had made each of its steps, and the parameters at the end."""
    file = folder / "stamps"

    def timed(worker: Worker) -> None:
        stamps = []
        for batch in worker.batches():
            worker.step(batch)
            stamps.append(time.perf_counter())
        if worker.replica == 0:
            torch.save(stamps, file)

    strategy = f"replicas={RANKS} threads=1"
    program = make_program(name)
    run = launch(timed, program, strategy, engine=engine, steps=steps, evaluate_every=steps, progress=False)
    return torch.load(file), dict(run.state)


def on_ranks(
    work: Callable[[int, str, int, str], None], name: str, steps: int, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """The same of two processes that run ``work``."""
    context = torch.multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        work, (name, steps, str(folder)), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{work.__name__} did not make {steps} steps within {TIMEOUT_S:g} s")
    finally:
        for process in context.processes:
            process.kill()
    stamps, state = torch.load(folder / "seen")
    return stamps, state


def turn(engine: Engine, name: str, steps: int) -> Turn:
    """Measure all three once."""
    total = steps + WARM_UP
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        mine, state = on_paceline(engine, name, total, folder)
        Barrier.new(folder / "barrier")
        pair, _ = on_ranks(at_barrier, name, total, folder)
        ddp, theirs = on_ranks(on_gloo, name, total, folder)
    start = make_program(name).build().state_dict()
    differences = {key: _distance(state[key], theirs[key]) for key in start}
    where = max(differences, key=differences.__getitem__)
    moved = max(_distance(theirs[key], start[key]) for key in start)
    return Turn(_step_ms(mine), _step_ms(pair), _step_ms(ddp), differences[where], where, moved)


def _step_ms(stamps: list[float]) -> float:
    return 1e3 * median(after - before for before, after in itertools.pairwise(stamps[WARM_UP:]))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def tell(name: str, turns: list[Turn]) -> None:
    """Print the row of one model."""
    mine, pair, ddp = (median(ms) for ms in zip(*(t[:3] for t in turns), strict=True))
    to_pair = median(t.paceline_ms / t.pair_ms for t in turns)
    to_ddp = median(t.paceline_ms / t.ddp_ms for t in turns)
    case, worst = CASES[name], max(turns, key=lambda t: t.difference)
    parameters = sum(p.numel() for p in case.model().parameters())
    print(
        f"| {case.title} | {parameters:,} | {case.shape[0]} | {mine:.2f} | {pair:.2f} | {ddp:.2f} | {to_pair:.3f} | "
        f"{to_ddp:.3f} | {worst.difference:.1e} at `{worst.where}`, moved {worst.moved:.1e} |",
        flush=True,
    )
    if worst.difference > TOLERANCE:
        raise SystemExit(
            f"{name}: Paceline's `{worst.where}` is {worst.difference:g} from DDP's; allowed: {TOLERANCE:g}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=9, help="how often each of the three is measured")
    parser.add_argument("--steps", type=int, default=200, help="that are timed in one measurement")
    said = parser.parse_args()
    print(f"ms per step on rank 0: medians of {said.steps} steps, then of {said.pairs} turns, ratios too\n")
    print("| model | parameters | batch per rank | Paceline | barrier only | DDP on Gloo | ", end="")
    print("Paceline / barrier | Paceline / DDP | largest difference from DDP |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with LocalEngine() as engine:
        for name in said.models:
            tell(name, [turn(engine, name, said.steps) for _ in range(said.pairs)])


if __name__ == "__main__":
    main()
