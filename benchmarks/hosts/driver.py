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
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from trivial import Trivial

from paceline import Program, launch
from paceline.engine.ray.engine import RayEngine
from paceline.replica.base import Batch


def stepping(worker: Any, *, folder: Path) -> None:
    """The loop of a replica whose Δ lies ready."""
    worker._replica = Trivial()
    ended = list[float]()
    while worker.going:
        worker.step(Batch(None, None, 1))
        ended.append(time.monotonic())
    (folder / f"worker-{worker.replica}.json").write_text(json.dumps(ended))


def training(worker: Any, *, folder: Path) -> None:
    """The loop of a replica that computes."""
    ended = list[float]()
    try:
        for batch in worker.batches():
            worker.step(batch)
            ended.append(time.monotonic())
    finally:
        (folder / f"worker-{worker.replica}.json").write_text(json.dumps(ended))


def layers() -> nn.Sequential:
    """Four layers of 500 × 500, a million parameters, which stages and shards divide evenly."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(500, 500), nn.ReLU())))


def layered() -> Program:
    """A program that trains them on noise, in batches of 8."""
    noise = torch.randn(1024, 500, generator=torch.Generator().manual_seed(0))
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    return Program(layers, nn.functional.mse_loss, optimizer, (noise, noise), batch_size=8)


def paceline(said: argparse.Namespace) -> None:
    """Replicas of Paceline: asynchronous ones without a model, or such as ``--more`` says with one."""
    sizes = f"replicas={said.workers} servers={said.servers} compression={said.compression}"
    strategy = f"{sizes} threads=1 {said.more or 'aggregation=asynchronous'}"
    settings: dict[str, Any] = {"seconds": said.seconds, "evaluate_every": 1e6, "progress": False, "timeout_s": 120.0}
    program = layered() if said.more else programs.trivial(said.parameters, "sgd")
    loop = functools.partial(training if said.more else stepping, folder=said.folder)
    with RayEngine(said.address) as engine:
        launch(loop, program, strategy, engine=engine, **settings)


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
    parser.add_argument("--compression", default="none")
    parser.add_argument("--more", default="", help="words of the strategy")
    parser.add_argument("--seconds", type=float, required=True)
    said = parser.parse_args()
    SIDES[said.side](said)


if __name__ == "__main__":
    main()
