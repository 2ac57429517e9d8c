"""The benchmark of the parameter server: its worker that computes nothing is still one of the local engine's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import train
from paceline.engine.local.engine import LocalEngine

FOLDER = Path(__file__).parents[2] / "benchmarks" / "parameter_server"


def test_a_worker_that_computes_nothing_makes_updates(load: Callable[[str], Any]) -> None:
    program = load("programs").trivial(100, "sgd")
    with LocalEngine(entry="trivial:main") as engine:
        strategy = "replicas=2 threads=1 aggregation=asynchronous"
        run = train(program, strategy, engine=engine, steps=5, progress=False)
    assert run.summary["updates"] == 10
    assert run.state["weights"].unique().numel() == 1
    assert float(run.state["weights"][0]) < 0  # each Δ is 1e-6
