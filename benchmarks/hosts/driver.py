"""One side of the comparison, on the first host of a Ray cluster: says how many Δs were applied in a second.

Workers compute nothing, so that what carries Δ and A alone is measured: each writes down when its steps ended, by the
clock that all of these hosts share, for they are one machine's namespaces.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trivial import Trivial

from paceline import launch
from paceline.engine.ray.engine import RayEngine
from paceline.replica.base import Batch

FIRST_STEPS = 3
"""Steps of each worker before those that count."""


def stepping(worker: Any, *, folder: Path) -> None:
    """The loop of a replica whose Δ lies ready."""
    worker._replica = Trivial()
    ended = list[float]()
    while worker.going:
        worker.step(Batch(None, None, 1))
        ended.append(time.monotonic())
    (folder / f"worker-{worker.replica}.json").write_text(json.dumps(ended))


def paceline(said: argparse.Namespace) -> None:
    """Asynchronous replicas of Paceline."""
    strategy = f"replicas={said.workers} servers={said.servers} threads=1 aggregation=asynchronous"
    settings: dict[str, Any] = {"seconds": said.seconds, "evaluate_every": 1e6, "progress": False, "timeout_s": 120.0}
    loop = functools.partial(stepping, folder=said.folder)
    with RayEngine(said.address) as engine:
        launch(loop, programs.trivial(said.parameters, "sgd"), strategy, engine=engine, **settings)


def ray_pattern(said: argparse.Namespace) -> None:
    """Ray's own parameter server, one actor that answers each push with A."""
    import numpy as np
    from ray_server import Ready, Server, Worker

    ray.init(said.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted((n["NodeManagerAddress"], n["NodeID"], n["Resources"].get("CPU", 0)) for n in ray.nodes())
    computing = [node for _, node, cores in nodes if cores] or [here]
    server = Server.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote(
        np.zeros(said.parameters, np.float32), programs.optimizer_of("sgd")
    )
    crew = [
        Worker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            server, functools.partial(Ready, said.parameters)
        )
        for node in (computing * said.workers)[: said.workers]
    ]
    ray.get([worker.warm_up.remote() for worker in crew])
    ends = ray.get([worker.until.remote(time.monotonic() + said.seconds) for worker in crew])
    for number, ended in enumerate(ends):
        (said.folder / f"worker-{number}.json").write_text(json.dumps(ended))
    ray.shutdown()


SIDES: dict[str, Callable[[argparse.Namespace], None]] = {"paceline": paceline, "ray": ray_pattern}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--address", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("workers", "servers", "parameters"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    said = parser.parse_args()
    SIDES[said.side](said)


if __name__ == "__main__":
    main()
