"""A program whose model is made in torch's default dtype, and a loop that logs torch's settings where it runs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline import Program, Run, launch
from paceline.engine.base import Engine
from paceline.engine.torch_settings import TorchSettings
from tests.engine.own_loops import LogKeeper

CHANGED = TorchSettings(torch.float64, "medium", deterministic=True, warn_only=True)

EXPECTED = {"bits": 64.0, "medium": 1.0, "deterministic": 1.0, "warns": 1.0}

ROUNDING = 1e-14
"""Of float64, over four steps on values of about 1, where an engine adds gradients up in another order."""


@contextmanager
def changed() -> Iterator[None]:
    """Context manager: torch is set so in this process."""
    before = TorchSettings()
    CHANGED.apply()
    try:
        yield
    finally:
        before.apply()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def program() -> Program:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    train = inputs, torch.randint(3, (32,), generator=generator)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return Program(
        model=model, loss=nn.functional.cross_entropy, optimizer=optimizer, train=train, test=train, batch_size=4
    )


def loop(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)
        here = TorchSettings()
        worker.log(
            {
                "bits": torch.finfo(here.default_dtype).bits,
                "medium": here.matmul_precision == "medium",
                "deterministic": here.deterministic,
                "warns": here.warn_only,
            }
        )


def check(engine: str | Engine, strategy: str = "replicas=2") -> None:
    """Require that a run's processes are set as this one, and that it equals one in virtual time."""
    kept = LogKeeper()
    with changed():
        run = launch(loop, program(), strategy, engine=engine, steps=4, callbacks=[kept], progress=False)
        assert TorchSettings() == CHANGED
        expected = launch(loop, program(), "replicas=2", engine="virtual", steps=4)
    assert kept.logged
    assert all(values == EXPECTED for _, _, values in kept.logged)
    equal(run, expected)


def equal(run: Run, expected: Run) -> None:
    for name, tensor in expected.state.items():
        assert run.state[name].dtype == torch.float64
        torch.testing.assert_close(run.state[name], tensor, rtol=0, atol=ROUNDING)
