"""Runs of worker processes, each of which has the simulated accelerator since it loads a module that installs it."""

import functools

from torch import nn
from torch.optim import SGD

from paceline import train
from paceline.engine.local.engine import LocalEngine
from tests.accelerator import python_device
from tests.engine import programs

assert python_device.NAME == "sim"

STRATEGIES = (
    *("replicas=2", "aggregation=asynchronous"),
    *("stages=2 aggregation=asynchronous", "shards=2 aggregation=local-steps:period=2,over=asynchronous"),
)
"""Of which the bits do not depend on which replica is the first."""


def mlp() -> nn.Module:
    return programs.mlp()


def differences() -> dict[str, float]:
    """Return how far the parameters are from the CPU's, by strategy."""
    optimizer = functools.partial(SGD, lr=0.1, momentum=0.9)
    on = {"cpu": programs.program(optimizer=optimizer), "sim": programs.program(model=mlp, optimizer=optimizer)}
    found = dict[str, float]()
    with LocalEngine() as engine:
        for strategy in STRATEGIES:
            one, other = (
                train(program, f"{strategy} device={device}", engine=engine, steps=6, progress=False)
                for device, program in on.items()
            )
            found[strategy] = max(float((one.state[name] - other.state[name]).abs().max()) for name in one.state)
    return found
