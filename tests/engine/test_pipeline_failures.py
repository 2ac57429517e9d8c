"""A stage that is killed, raises or hangs: one error that says where, at once, and nothing is left behind."""

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.engine.base import Progress, Watcher
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs
from tests.engine.local import leaks

STAGES = 3
AT = 4
"""The step in which it happens."""


def deep() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def program() -> paceline.Program:
    return programs.program(model=deep, batch_size=8)


def loop(worker: Any, rank: int, do: Callable[[], None]) -> None:
    for made, batch in enumerate(worker.batches(), start=1):
        if made == AT and os.environ["RANK"] == str(rank):
            do()
        worker.step(batch)


def signalled(number: int) -> None:
    signal.raise_signal(number)


def failed(engine: LocalEngine, kind: type[PacelineError], what: Any, **settings: Any) -> str:
    """What a run raises, which takes no longer than it may, and leaves no process and no file behind."""
    before = leaks.files()
    with pytest.raises(kind) as raised:
        paceline.launch(
            what,
            settings.pop("program", program()),
            f"stages={STAGES}",
            engine=engine,
            steps=100,
            progress=False,
            **settings,
        )
    fork_server = engine._fork_server
    assert fork_server is not None
    assert not fork_server._children
    assert not leaks.since(before)
    return str(raised.value)


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_killed_stage(engine: LocalEngine, stage: int) -> None:
    said = failed(engine, WorkerError, functools.partial(loop, rank=stage, do=functools.partial(signalled, 9)))
    assert re.search(rf"rank {stage} \(process \d+ on .*\) ended while rank \d .* waited for ", said)
    assert re.search(r"micro-batch \d+, from stage \d for stage \d \(\d[FB]\d\)", said)


class Faulty(nn.Module):
    """Raises where numbers are too large."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) > 1e6:
            raise ValueError("too much of it")
        return x


def faulty() -> nn.Module:
    layers = [nn.Linear(6, 6) for _ in range(8)]
    return nn.Sequential(*layers[:4], Faulty(), *layers[4:], nn.Linear(6, 3)).double()


def growing(replica: int, replicas: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The fourth batch is what the model can't take."""
    del replica, replicas
    generator = torch.Generator().manual_seed(seed)
    for made in range(1, 200):
        size = 1e9 if made == AT else 1.0
        yield size * torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 3


def test_a_stage_that_raises(engine: LocalEngine) -> None:
    """Where, and with the traceback of the user's own code."""
    broken = replace(program(), model=faulty, train=growing, test=None)
    said = failed(engine, WorkerError, plain, program=broken)
    assert re.match(r"stage \d, micro-batch \d, \dF\d: ValueError: too much of it", said)
    assert "in forward\n    raise ValueError" in said


def plain(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)


def test_a_stage_that_hangs(engine: LocalEngine) -> None:
    stop = functools.partial(loop, rank=1, do=functools.partial(signalled, signal.SIGSTOP))
    said = failed(engine, WaitTimeoutError, stop, timeout_s=5)
    assert re.search(r"waited 5 s for rank 1 .* micro-batch \d+, from stage 1 for stage \d", said)


def test_ctrl_c_ends_a_run_with_what_there_is(engine: LocalEngine, watched: list[Watcher]) -> None:
    pressed: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.phase == "training" and not pressed:
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    watched.append(watch)
    run = paceline.train(program(), f"stages={STAGES}", engine=engine, steps=10**6)
    assert run.summary["interrupted"]
    assert run.summary["updates"] > 0
