"""Processes that have no server: some that communicate nothing, and PyTorch's own recipe for Hogwild.

Both are forked from one that has neither threads nor a gradient, so they start at once and the data lie in memory once.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, TypeAlias

import programs
import torch
import torch.multiprocessing as mp
from gradient import Gradient, shuffled
from window import WARM_UP_S, Window, counted

from paceline.program import Program

Step: TypeAlias = Callable[[], object]

READY_S = 60.0
"""How long processes may take to make their first steps; and to answer after the window."""


def gradients(*, data: str | None, workers: int, seconds: float) -> dict[str, float]:
    """Gradients a second of processes that communicate nothing, and do nothing with them: no model ever changes."""
    torch.set_num_threads(1)
    program = programs.images(data)
    return {"gradients": _rate(lambda worker: _gradient(program, program.build(), worker), workers, seconds)}


def alone(*, data: str | None, workers: int, seconds: float) -> dict[str, float]:
    """Steps a second of processes that communicate nothing: each trains a model of its own."""
    torch.set_num_threads(1)
    program = programs.images(data)
    return {"alone": _rate(lambda worker: _training(program, program.build(), worker), workers, seconds)}


def recipe(*, data: str | None, workers: int, seconds: float) -> dict[str, float]:
    """Updates a second of PyTorch's recipe: one model in shared memory, an optimizer in each process.

    As in pytorch/examples, mnist_hogwild, but batches are indexed from tensors, not fetched by a DataLoader.
    """
    torch.set_num_threads(1)
    program = programs.images(data)
    model = program.build().share_memory()
    return {"recipe": _rate(lambda worker: _training(program, model, worker), workers, seconds)}


def _training(program: Program, model: torch.nn.Module, worker: int) -> Step:
    gradient = _gradient(program, model, worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        gradient()
        optimizer.step()

    return step


def _gradient(program: Program, model: torch.nn.Module, worker: int) -> Gradient:
    data = programs.pair_of(program)
    return Gradient(model, program.loss, data, shuffled(len(data[0]), program.per_replica_batch(1), worker))


def _rate(work: Callable[[int], Step], workers: int, seconds: float) -> float:
    """Steps a second of all workers together, each making those of ``work(worker)``."""
    with ExitStack() as ending:
        links = [ending.enter_context(_started(work, worker)) for worker in range(workers)]
        for link in links:
            _hear(link, READY_S)
        window = Window.soon(seconds)
        for link in links:
            link.send(window)
        return float(sum(_hear(link, WARM_UP_S + seconds + READY_S) for link in links) / seconds)


@contextlib.contextmanager
def _started(work: Callable[[int], Step], worker: int) -> Iterator[Connection]:
    """The link to a process, which is ended with the context."""
    mine, theirs = mp.Pipe()
    process: ForkProcess = mp.get_context("fork").Process(target=_work, args=(work(worker), theirs), daemon=True)
    process.start()
    theirs.close()  # or a worker that dies would go unnoticed
    try:
        yield mine
    finally:
        process.kill()
        process.join(READY_S)


def _hear(link: Connection, timeout_s: float) -> Any:
    if not link.poll(timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s for the other side of a link")
    return link.recv()


def _work(step: Step, link: Connection) -> None:
    step()  # the first is slow
    link.send("ready")
    link.send(counted(step, _hear(link, READY_S)))
