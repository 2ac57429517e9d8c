"""Steps as graphs in real workers: the result is the plain run's, bit by bit."""

from typing import Any

import pytest
import torch

from paceline import train
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs

RUNS: dict[str, dict[str, Any]] = {
    "replicas=2": {"model": programs.convolution},
    "replicas=2 accumulate=2": {"model": programs.dropout},
    "replicas=1 aggregation=hogwild": {"model": programs.mlp},
    "replicas=2 aggregation=local-steps:period=3": {"model": programs.dropout},
    # Gradients are written where Δ is, by turns in two places while one of them waits for the update.
    "replicas=1 aggregation=asynchronous": {"model": programs.wide},
    "replicas=1 aggregation=buffered:k=2,hold=false": {"model": programs.wide},
}


@pytest.mark.parametrize(("strategy", "fields"), RUNS.items(), ids=list(RUNS))
def test_workers_train_what_plain_ones_do(engine: LocalEngine, strategy: str, fields: dict[str, Any]) -> None:
    """Workers that have one place to write to, so that nothing depends on who is first."""
    program = programs.program(**fields)
    settings: dict[str, Any] = {"engine": engine, "steps": 14, "progress": False}
    plain, graph = (train(program, f"{strategy}{words}", **settings) for words in ("", " compile=graph"))
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], tensor), name
