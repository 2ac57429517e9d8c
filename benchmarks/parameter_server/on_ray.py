"""Paceline on Ray with workers that compute nothing, so that the engine alone is measured.

The two sides differ in how a push travels: by a stream, with Δ and A in memory that worker and server share, or, as
where no stream can be made, by a call of the server's actor, with Δ and A in Ray's object store.
"""

from collections.abc import Callable
from typing import Any

import programs
from trivial import Trivial
from window import WARM_UP_S

from paceline.api.train import launch
from paceline.engine.ray.engine import RayEngine
from paceline.replica.base import Batch


def by_stream(worker: Any) -> None:
    """The loop of a worker whose Δ lies ready."""
    worker._replica = Trivial()
    while worker.going:
        worker.step(Batch(None, None, 1))


def by_calls(worker: Any) -> None:
    """The same without a stream."""
    worker._client._link._tries = 0
    by_stream(worker)


LOOPS: dict[str, Callable[[Any], None]] = {"stream": by_stream, "calls": by_calls}


def rates(*, workers: int, parameters: int, optimizer: str, seconds: float) -> dict[str, float]:
    """Updates a second of each side, the first second counted with the others.

    Nothing is scored meanwhile: of 25 million parameters that takes longer than a second.
    """
    program, found = programs.trivial(parameters, optimizer), dict[str, float]()
    strategy = f"replicas={workers} threads=1 aggregation=asynchronous"
    settings: dict[str, Any] = {"seconds": seconds + WARM_UP_S, "evaluate_every": 1e6, "progress": False}
    with RayEngine() as engine:
        for name, loop in LOOPS.items():
            summary = launch(loop, program, strategy, engine=engine, **settings).summary
            found[name] = summary["gradients"] / summary["seconds"]
    return found
