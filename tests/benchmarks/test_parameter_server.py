"""The benchmark of the parameter server: its worker that computes nothing is still one of the local engine's."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "parameter_server"


def test_a_worker_that_computes_nothing_makes_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import programs

    from paceline import train
    from paceline.engine.local.engine import LocalEngine

    with LocalEngine(entry="trivial:main") as engine:
        strategy = "replicas=2 threads=1 aggregation=asynchronous"
        run = train(programs.trivial(100, "sgd"), strategy, engine=engine, steps=5, progress=False)
    assert run.summary["updates"] == 10
    assert run.state["weights"].unique().numel() == 1
    assert float(run.state["weights"][0]) < 0  # each Δ is 1e-6
