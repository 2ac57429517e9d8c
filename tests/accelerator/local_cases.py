"""Worker processes, each of which has the accelerator since it is given a model of that device."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam

from paceline import Run, launch, predict, train
from paceline.device import count
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine
from paceline.engine.local.fault_injection import EventScript
from tests.accelerator.copied_bytes import Copied, counted
from tests.accelerator.engine_cases import Loop
from tests.accelerator.target import Target
from tests.engine import programs

STRATEGIES = (
    *("replicas=2", "aggregation=asynchronous"),
    *("stages=2 aggregation=asynchronous", "shards=2 aggregation=local-steps:period=2,over=asynchronous"),
)
"""Of which the bits do not depend on which replica is the first."""

IN_PLACE = "replicas=1 aggregation=hogwild"
"""Of more replicas the bits depend on which writes first."""

NOISY = ("replicas=2", "replicas=1")
"""Whose noise is measured: by all Δs of an update, and by pairs of updates."""

COUNTED_STRATEGIES = (
    *("replicas=2", "replicas=2 aggregation=asynchronous", "replicas=2 aggregation=smooth-switch:every=3"),
    *(
        "replicas=2 aggregation=local-steps:period=2,over=asynchronous",
        "replicas=2 aggregation=smooth-switch:threshold=adaptive",
    ),
    "replicas=2 aggregation=hogwild",
)


def possible(strategies: Sequence[str], kind: str) -> list[str]:
    """Return those that this host has devices for: replicas that write one A have one."""
    return [strategy for strategy in strategies if "hogwild" not in strategy or count(kind) == 1]


def differences(on: Mapping[str, str]) -> dict[str, float]:
    """Return how far the parameters are from the CPU's, by strategy; and the noise scale, relative to that."""
    target = Target(**on)

    def trained(strategy: str, kind: str, engine: Engine, data: Any = None, **options: Any) -> Run:
        model = programs.mlp if kind == "cpu" else target.model(programs.mlp)
        optimizer = functools.partial(SGD, lr=0.1, momentum=0.9)
        program = programs.program(model=model, optimizer=optimizer, train=data or programs.data())
        options = {"steps": 6, "progress": False} | options
        return train(program, f"{strategy} device={kind}", engine=engine, **options)

    found = dict[str, float]()
    with LocalEngine() as engine:
        for strategy in possible([*STRATEGIES, IN_PLACE], target.kind):
            one, other = (trained(strategy, kind, engine) for kind in ("cpu", target.kind))
            found[strategy] = difference(one, other)
        inputs, targets = programs.data()
        signal = inputs, torch.zeros_like(targets)  # one class
        for strategy in NOISY:
            one, other = (
                trained(strategy, kind, engine, signal, steps=15, noise_scale=True) for kind in ("cpu", target.kind)
            )
            scales = [run.summary["noise_scale_mean"] for run in (one, other)]
            assert scales[0], "it was not measured"
            found[f"{strategy}, noise"] = abs(scales[1] / scales[0] - 1.0)
    return found


def after_a_death(on: Mapping[str, str], folder: str) -> dict[str, float]:
    """Return what a device keeps, or loses, of a run of which a replica is killed and replaced, and of one resumed.

    ``difference`` of parameters from a run on the CPU without a death, and ``resumed``, of a run that goes on from the
    checkpoint of that; ``segments`` of the device's memory that this process still holds after them.
    """
    target = Target(**on)
    model = target.model(programs.dropout) if target.simulated else target.model(programs.mlp)
    program = programs.program(model=model, optimizer=functools.partial(Adam, lr=0.01), train=programs.data(samples=48))

    def trained(kind: str, steps: int, **options: Any) -> Run:
        strategy = f"replicas=2 device={kind}"
        return train(program, strategy, engine=engine, steps=steps, progress=False, **options)

    with LocalEngine() as engine:
        whole, more = trained("cpu", 6), trained("cpu", 8)
        engine.script = EventScript().kill(replica=1, step=3)
        saving: dict[str, Any] = {"checkpoint": folder, "checkpoint_every": "3 steps", "on_death": "replace"}
        killed = trained(target.kind, 6, **saving)
        engine.script = EventScript()
        resumed = trained(target.kind, 8, **saving, resume=True)
    assert [exit_.replica for exit_ in killed.left] == [1], killed.left
    assert resumed.left == killed.left, "nothing was resumed"
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "difference": difference(whole, killed),
        "resumed": difference(more, resumed),
        "segments": sum(f"paceline:{target.kind}" in line for line in maps.splitlines()),
    }


def difference(one: Run, other: Run) -> float:
    """Return how far the parameters of two runs are from each other."""
    return max(float((one.state[name] - other.state[name]).abs().max()) for name in one.state)


class WritingLoop(Loop):
    """Counts what a step copies in each worker's process, and writes it to ``folder``, if the worker comes to it."""

    def __init__(self, kind: str, folder: str) -> None:
        super().__init__(kind)
        self._folder = Path(folder)

    def __call__(self, worker: Any) -> None:
        super().__call__(worker)
        if not self.steps:
            return
        counts = json.dumps(asdict(self.copied))
        (self._folder / f"{worker.replica}.json").write_text(counts, encoding="utf-8")


def copied(on: Mapping[str, str], folder: str) -> dict[str, list[dict[str, int]]]:
    """Return what a step copies between host and device, by strategy: in each worker's process, then in main's.

    In main that is what a run of 40 steps more copies more, of each of them. A snapshot that waits to be scored is in
    the host's memory, and there may be one more of them.
    """
    target, found = Target(**on), dict[str, list[dict[str, int]]]()
    program = programs.program(model=target.model(programs.mlp), optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))
    with LocalEngine() as engine:
        for strategy in possible(COUNTED_STRATEGIES, target.kind):
            mains, words = list[Copied](), f"{strategy} device={target.kind}"
            for steps in (12, 52):
                place = Path(folder) / f"{strategy} {steps}"
                place.mkdir()
                loop = WritingLoop(target.kind, str(place))
                with counted(target.kind) as in_main:
                    settings: dict[str, Any] = {"steps": steps, "evaluate_every": 100, "progress": False}
                    launch(loop, program, words, engine=engine, **settings)
                mains.append(in_main)
            few, many = mains
            more = Copied((many.to_host - few.to_host) // 40, (many.to_device - few.to_device) // 40)
            workers = [json.loads(path.read_text(encoding="utf-8")) for path in place.iterdir()]
            found[strategy] = [*workers, asdict(more)]
    return found


def predictions(on: Mapping[str, str]) -> dict[str, float]:
    """Return how far a model's output is from the CPU's, by strategy."""
    target, inputs = Target(**on), torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def output(strategy: str, kind: str) -> Tensor:
        model = programs.batchnorm if kind == "cpu" else target.model(programs.batchnorm)
        found: Tensor = predict(programs.program(model=model), inputs, f"{strategy} device={kind}")
        assert found.device.type == "cpu"
        return found

    strategies = "replicas=1", "stages=2 micro_batches=2", "shards=2"
    return {each: float((output(each, target.kind) - output(each, "cpu")).abs().max()) for each in strategies}
