"""Actors of Ray, each of which has the accelerator since it is given a model of that device."""

import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from torch.optim import SGD

from paceline import Run, launch
from paceline.engine.ray.engine import RayEngine
from tests.accelerator.engine_cases import STEPS, Loop, plain
from tests.accelerator.target import Target
from tests.engine import programs

ORDERED = (
    *("replicas=2", "replicas=2 servers=2", "aggregation=asynchronous"),
    *("stages=2 aggregation=asynchronous", "shards=2 aggregation=local-steps:period=2,over=asynchronous"),
)
"""Strategies of which the bits do not depend on which replica is the first."""

OTHERS = ("replicas=2 aggregation=asynchronous",)
"""Strategies of which they do: two Δs from the same A, of which the first may be either's."""


class KeptLoop(Loop):
    """The loop that counts what a step copies, and leaves that in a folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind)
        self._folder = folder

    def __call__(self, worker: Any) -> None:
        """Train."""
        super().__call__(worker)
        found = self.copied.to_host, self.copied.to_device
        (self._folder / f"{worker.replica}.json").write_text(json.dumps(found), encoding="utf-8")


def outcomes(on: Mapping[str, str], folder: str) -> dict[str, tuple[float, int, list[tuple[int, int]]]]:
    """Return by strategy how far the parameters are from the CPU's, the Δs that were counted, and the bytes of a step.

    These are of each replica's first worker, to the host and to the device.
    """
    target, engine, found = Target(**on), RayEngine(), dict[str, tuple[float, int, list[tuple[int, int]]]]()

    def trained(strategy: str, kind: str, kept: Path) -> Run:
        model = programs.mlp if kind == "cpu" else target.model(programs.mlp)
        program = programs.program(model=model, optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))
        settings: dict[str, Any] = {"steps": STEPS, "progress": False, "evaluate_every": 10**6}
        loop = plain if kind == "cpu" else KeptLoop(kind, kept)
        return launch(loop, program, f"{strategy} device={kind}", engine=engine, **settings)

    with engine:
        for number, strategy in enumerate((*ORDERED, *OTHERS)):
            kept = Path(folder) / str(number)
            kept.mkdir()
            # Autograd makes its threads at an actor's first backward, one for each device that there is by then.
            other, one = (trained(strategy, kind, kept) for kind in (target.kind, "cpu"))
            gaps = [float((one.state[name] - other.state[name]).abs().max()) for name in one.state]
            difference = max(gaps) if strategy in ORDERED else 0.0
            copied = [tuple(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(kept.iterdir())]
            found[strategy] = difference, other.summary["gradients"], copied
    return found


def shared_gpus(on: Mapping[str, str], folder: str) -> list[Any]:
    """Return what three replicas see of a cluster that is said to have two GPUs: by CUDA, and by Ray."""
    target = Target(**on)
    about = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(num_cpus=2, num_gpus=2, object_store_memory=100 << 20, _node_ip_address="127.0.0.1", **about)
    try:
        with RayEngine("auto") as engine:
            program = programs.program(model=target.model(programs.mlp))
            loop = functools.partial(seeing, folder=Path(folder))
            strategy = f"replicas=3 device={target.kind}"
            launch(loop, program, strategy, engine=engine, steps=2, progress=False, evaluate_every=10**6)
    finally:
        ray.shutdown()
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).iterdir())]


def seeing(worker: Any, folder: Path) -> None:
    """The plain loop, which first leaves what its process sees of GPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_gpu_ids()
    (folder / f"{worker.replica}.json").write_text(json.dumps(seen), encoding="utf-8")
    plain(worker)
