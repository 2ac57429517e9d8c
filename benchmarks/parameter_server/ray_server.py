"""A parameter server of Ray actors, as the Smooth Switch paper's: the baseline.

One actor holds A, each worker is another. Gradients and parameters travel through Ray's object store. Two designs::

    separate   worker   pull A .. compute Δ .. push Δ .. pull A .. compute Δ .. push Δ     two calls for each Δ
    merged     worker   pull A .. compute Δ .. push Δ, which answers with A .. compute Δ   one call for each Δ

``separate`` is the paper's as a plain reading gives it; ``merged`` is the leanest that Ray allows a worker that waits
until its Δ has been applied.
"""

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

# Ray reads them as it is imported. Without the first it listens on all interfaces of a Linux host, whatever its name.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import programs
import ray
import torch
from gradient import Gradient, ordered
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from window import WARM_UP_S, Window, counted

from paceline.core.data_order import DataOrder

Vector: TypeAlias = NDArray[np.float32]
"""A or a Δ, flat."""

DESIGNS = ("separate", "merged")

WAIT_S = 120.0
"""How long actors may take to start, and how long to answer after the window has closed."""


@ray.remote(num_cpus=0)
class Server:
    """A, and the rule that updates it."""

    def __init__(self, start: Vector, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        torch.set_num_threads(1)
        self._state = nn.Parameter(torch.from_numpy(start.copy()))
        self._optimizer = optimizer([self._state])
        self._updates = 0

    def pull(self) -> Vector:
        """A."""
        return self._state.detach().numpy()

    def push(self, delta: Vector) -> None:
        """Apply a Δ."""
        self._state.grad = torch.from_numpy(delta)
        self._optimizer.step()
        self._updates += 1

    def exchange(self, delta: Vector) -> Vector:
        """Apply a Δ, and answer with the new A."""
        self.push(delta)
        return self.pull()

    def updates(self) -> int:
        """How many there have been."""
        return self._updates


@ray.remote(num_cpus=0)
class Worker:
    """Computes a Δ, pushes it and goes on when the server has applied it.

    Args:
        server: holds A.
        make: the training set's arrays, if it needs any -> (A -> Δ).
        data: those arrays.
    """

    def __init__(self, server: Any, make: Callable[..., Callable[[Vector], Vector]], *data: Any) -> None:
        torch.set_num_threads(1)
        self._server, self._delta = server, make(*data)
        self._pushed = 0

    def warm_up(self) -> None:
        """The first step, which is slow."""
        self._separate()

    def run(self, design: str, window: Window) -> int:
        """Work until the window has closed; how many Δs were applied within it."""
        self._state = self._pull()
        return counted({"separate": self._separate, "merged": self._merged}[design], window)

    def until(self, end_s: float) -> list[float]:
        """Work until then, by the monotonic clock; return when each step ended."""
        self._state, ended = self._pull(), list[float]()
        while time.monotonic() < end_s:
            self._merged()
            ended.append(time.monotonic())
        return ended

    def pushed(self) -> int:
        """How many Δs it has sent."""
        return self._pushed

    def _separate(self) -> None:
        ray.get(self._server.push.remote(self._delta(self._pull())))
        self._pushed += 1

    def _merged(self) -> None:
        self._state = ray.get(self._server.exchange.remote(self._delta(self._state)))
        self._pushed += 1

    def _pull(self) -> Vector:
        state: Vector = ray.get(self._server.pull.remote())
        return state


class Ready:
    """A Δ that is there already."""

    def __init__(self, parameters: int) -> None:
        self._delta = np.full(parameters, 1e-6, np.float32)

    def __call__(self, state: Vector) -> Vector:
        return self._delta


class Computed:
    """The gradient of a worker's next batch, at the A that it is given."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Callable[..., torch.Tensor],
        order: DataOrder,
        worker: int,
        inputs: NDArray[np.float32],
        targets: NDArray[np.int64],
    ) -> None:
        data = torch.from_numpy(inputs), torch.from_numpy(targets)
        self._gradient = Gradient(model(), loss, data, ordered(order, worker))

    def __call__(self, state: Vector) -> Vector:
        vector_to_parameters(torch.from_numpy(state), self._gradient.parameters)  # views: nothing is copied
        self._gradient()
        gradients: Vector = parameters_to_vector([p.grad for p in self._gradient.parameters]).numpy()
        return gradients


def trivial(*, workers: int, parameters: int, optimizer: str, seconds: float) -> dict[str, float]:
    """Updates a second of each design, where a Δ costs nothing."""
    with _started():
        server = Server.remote(np.zeros(parameters, np.float32), programs.optimizer_of(optimizer))
        crew = [Worker.remote(server, functools.partial(Ready, parameters)) for _ in range(workers)]
        return _rates(server, crew, seconds)


def cnn(*, data: str | None, workers: int, seconds: float) -> dict[str, float]:
    """Gradients a second of each design, of the CNN."""
    program = programs.images(data)
    inputs, targets = programs.pair_of(program)
    order = DataOrder(len(inputs), program.per_replica_batch(workers), workers, program.seed)
    start = parameters_to_vector(program.build().parameters()).detach().numpy()
    with _started():
        server = Server.remote(start, program.optimizer)
        arrays = ray.put(inputs.numpy()), ray.put(targets.numpy())
        makes = [functools.partial(Computed, program.model, program.loss, order, worker) for worker in range(workers)]
        return _rates(server, [Worker.remote(server, make, *arrays) for make in makes], seconds)


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Ray on this host alone, with a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def _rates(server: Any, crew: list[Any], seconds: float) -> dict[str, float]:
    ray.get([worker.warm_up.remote() for worker in crew], timeout=WAIT_S)
    rates = {design: _rate(crew, design, seconds) for design in DESIGNS}
    pushed = sum(ray.get([worker.pushed.remote() for worker in crew], timeout=WAIT_S))
    applied = ray.get(server.updates.remote(), timeout=WAIT_S)
    assert applied == pushed, f"{pushed} pushed, {applied} applied"
    return rates


def _rate(crew: list[Any], design: str, seconds: float) -> float:
    window = Window.soon(seconds)
    counts = ray.get([worker.run.remote(design, window) for worker in crew], timeout=WARM_UP_S + seconds + WAIT_S)
    return float(sum(counts) / seconds)
