"""A parameter server of Ray actors, as the Smooth Switch paper's: the baseline.

One actor holds A; each worker actor holds nothing but its loop: pull A, compute a Δ, push it, and go on when the server
has applied it. Gradients and parameters travel through Ray's object store. Plain SGD or Adam of torch on one flat
vector.
"""

import time
from typing import Any

import ray
import torch


@ray.remote(num_cpus=0)
class Server:
    """A, and the rule that updates it."""

    def __init__(self, parameters: int, optimizer: str) -> None:
        torch.set_num_threads(1)
        self._state = torch.nn.Parameter(torch.zeros(parameters))
        self._optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]([self._state], lr=0.01)
        self._updates = 0

    def pull(self) -> Any:
        """A."""
        return self._state.detach().numpy()

    def push(self, delta: Any) -> Any:
        """Apply a Δ, and answer with the new A."""
        self._state.grad = torch.from_numpy(delta.copy())
        self._optimizer.step()
        self._updates += 1
        return self._state.detach().numpy()

    def updates(self) -> int:
        """How many there have been."""
        return self._updates


@ray.remote(num_cpus=0)
class Worker:
    """Pushes a trivial Δ again and again."""

    def __init__(self, server: Any, parameters: int) -> None:
        torch.set_num_threads(1)
        self._server = server
        self._delta = torch.full((parameters,), 1e-6).numpy()

    def run(self, seconds: float) -> None:
        """For so long."""
        ray.get(self._server.pull.remote())
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ray.get(self._server.push.remote(self._delta))


def start(cores: int) -> None:
    """Start Ray on this host alone."""
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")


def rate(workers: int, parameters: int, optimizer: str, seconds: float) -> float:
    """Updates a second; Ray must have been started."""
    server = Server.remote(parameters, optimizer)
    crew = [Worker.remote(server, parameters) for _ in range(workers)]
    ray.get([w.run.remote(0.5) for w in crew])
    before, began = ray.get(server.updates.remote()), time.monotonic()
    ray.get([w.run.remote(seconds) for w in crew])
    count, took = ray.get(server.updates.remote()) - before, time.monotonic() - began
    for actor in (*crew, server):
        ray.kill(actor)
    return float(count / took)
