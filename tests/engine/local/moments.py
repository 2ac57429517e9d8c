"""What workers are made to do at chosen moments; they import this module, so it holds nothing that a test makes."""

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline import Program
from tests.engine import programs

SAMPLES = 48


def die() -> None:
    signal.raise_signal(signal.SIGKILL)


class Counter(nn.Module):
    """A weight for each sample. With :func:`counting`, each applied Δ moves a weight by how often its sample was in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def counting(**fields: Any) -> Program:
    """A program whose trained weights say how often each sample was applied, where Δs are combined by their sum."""
    inputs = torch.eye(SAMPLES, dtype=torch.float64)
    given: dict[str, Any] = {
        "model": Counter,
        "loss": minus_four_times_the_mean,
        "optimizer": functools.partial(SGD, lr=1.0),
        "train": (inputs, torch.zeros(SAMPLES, dtype=torch.float64)),
    }
    return programs.program(**given | fields)


def counting_any_batch() -> Program:
    """The same, whatever the sizes of batches."""
    return counting(loss=minus_the_sum)


def minus_the_sum(output: Tensor, target: Tensor) -> Tensor:
    return -output.sum() + 0 * target.sum()


def minus_four_times_the_mean(output: Tensor, target: Tensor) -> Tensor:
    """Batches have 4 samples: -1 for each."""
    return -4 * output.mean() + 0 * target.sum()


# ------------------------------------------------------------------------------------------------- moments in a worker


def loop(worker: Any, *, replica: int, step: int, prepare: Callable[[Any], None]) -> None:
    """The plain loop, but for one replica that prepares something before it makes one of its steps."""
    for made, batch in enumerate(worker.batches()):
        if (worker.replica, made + 1) == (replica, step):
            prepare(worker)
        worker.step(batch)


def before_computing(worker: Any) -> None:
    die()


def between_two_layers(worker: Any) -> None:
    model = worker._replica._inner._autograd.module
    model[-1].register_forward_pre_hook(lambda *_: die())


def in_the_backward_pass(worker: Any) -> None:
    model = worker._replica._inner._autograd.module
    next(model.parameters()).register_hook(lambda gradient: die())


def in_a_delay(worker: Any) -> None:
    """The delay must be the first that this replica meets."""

    def watch() -> None:
        while not worker._client._control.paused_until_ns[worker.replica]:
            os.sched_yield()
        die()

    threading.Thread(target=watch, daemon=True).start()


def having_written_delta(worker: Any) -> None:
    """What it has written is not told, so nobody may use it."""
    worker._client.push = lambda *_: die()


def having_told_but_not_rung(worker: Any) -> None:
    worker._client._main.notify = die


def having_pushed(worker: Any) -> None:
    worker._metrics.stepped = lambda **_: die()


def hang(worker: Any) -> None:
    while True:
        signal.pause()


def rest(args: Any, fds: Any) -> None:
    """The entry of a process that does nothing for ever."""
    hang(None)


# ------------------------------------------------------------------------------------- what is done elsewhere than main


def here() -> int:
    """This process; a function that carries it knows main from others."""
    return os.getpid()


def slow_to_build(main: int) -> nn.Module:
    if os.getpid() != main:
        hang(None)
    return programs.mlp()


def hanging_metric(main: int, output: Tensor, target: Tensor) -> float:
    if os.getpid() != main:
        hang(None)
    return 0.5


def enormous() -> nn.Module:
    """An ordinary model, and a parameter of 80 MB that it hardly looks at."""
    model = programs.mlp()
    model[0].register_parameter("idle", nn.Parameter(torch.zeros(10_000_000, dtype=torch.float64)))
    return model
