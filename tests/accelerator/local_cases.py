"""Worker processes, each of which has the accelerator since it is given a model of that device."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import SGD

from paceline import Run, predict, train
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine
from tests.accelerator.target import Target
from tests.engine import programs

STRATEGIES = (
    *("replicas=2", "aggregation=asynchronous"),
    *("stages=2 aggregation=asynchronous", "shards=2 aggregation=local-steps:period=2,over=asynchronous"),
)
"""Of which the bits do not depend on which replica is the first."""


def differences(on: Mapping[str, str]) -> dict[str, float]:
    """Return how far the parameters are from the CPU's, by strategy."""
    target = Target(**on)

    def trained(strategy: str, kind: str, engine: Engine) -> Run:
        model = programs.mlp if kind == "cpu" else target.model(programs.mlp)
        program = programs.program(model=model, optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))
        return train(program, f"{strategy} device={kind}", engine=engine, steps=6, progress=False)

    found = dict[str, float]()
    with LocalEngine() as engine:
        for strategy in STRATEGIES:
            one, other = (trained(strategy, kind, engine) for kind in ("cpu", target.kind))
            found[strategy] = max(float((one.state[name] - other.state[name]).abs().max()) for name in one.state)
    return found


def predictions(on: Mapping[str, str]) -> dict[str, float]:
    """Return how far a model's output is from the CPU's, by strategy."""
    target, inputs = Target(**on), torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def output(strategy: str, kind: str) -> Tensor:
        model = programs.batchnorm if kind == "cpu" else target.model(programs.batchnorm)
        found: Tensor = predict(programs.program(model=model), inputs, f"{strategy} device={kind}")
        assert found.device.type == "cpu"
        return found

    strategies = "replicas=1", "stages=2 micro_batches=2", "shards=2"
    return {each: float((output(each, target.kind) - output(each, "cpu")).abs().max()) for each in strategies}
