"""Runs on an accelerator, beside the same runs on the CPU."""

import functools
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

from paceline import Program, launch
from tests.accelerator.copied_bytes import Copied, counted
from tests.accelerator.target import SIMULATED
from tests.engine import programs

STEPS = 6
COUNTED = 4
"""Number of the step whose copies are counted: all that is made once is there."""

BATCH_BYTES = 4 * (6 * 8 + 8)
"""Of four samples of six float64, and their targets, int64."""


def single() -> nn.Module:
    """In float32."""
    return programs.mlp(torch.float32)


PROGRAMS: dict[str, Program] = {
    "momentum": programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9)),
    "clipped": programs.program(optimizer=functools.partial(Adam, lr=0.01), clip_norm=0.05),
    "groups": programs.program(optimizer=programs.half_decayed),
    "dropout": programs.program(model=programs.dropout),
    "batchnorm": programs.program(model=programs.batchnorm),
    "convolution": programs.program(model=programs.convolution),
    "tied": programs.program(model=programs.Tied),
    "float32": programs.program(model=single, train=programs.data(dtype=torch.float32)),
    "autocast": programs.program(model=single, train=programs.data(dtype=torch.float32), precision="bf16"),
}

DRAWING = ("dropout",)
"""Programs that draw numbers on the device, of which each type has its own."""

ALONE = ("replicas=1", "accumulate=2", "aggregation=local-steps:period=2", "compile=graph")
"""Strategies of one worker."""

POLICIES = (
    *("asynchronous", "smooth-switch:every=3", "stale-synchronous:bound=1", "buffered:k=2", "decoupled:period=2"),
    *("local-steps:period=2", "local-steps:period=2,over=asynchronous", "elastic-averaging:period=2,elasticity=0.2"),
)

OF_TWO = (
    *("replicas=2", "stages=2", "stages=2 schedule=zero-bubble", "shards=2"),
    *("replicas=2 shard_optimizer=true", "replicas=2 shard_parameters=true"),
    *(
        "replicas=2 aggregation=local-steps:period=2",
        "replicas=2 aggregation=local-steps:period=4,overlap=1,fragments=2",
    ),
    *(
        "replicas=2 compression=fp16",
        "replicas=2 compression=powersgd:rank=1",
        "replicas=2 compression=top-k:ratio=0.1",
    ),
)
UNFLUSHED = ("stages=2 schedule=pipedream", "stages=2 micro_batches=2 schedule=pipedream-2bw")
"""Of two ranks; they don't clip."""

NEVER_POLLED = ("stages=2", "stages=2 schedule=zero-bubble", "shards=2", "replicas=2 shard_parameters=true")
"""Strategies of which the device waits for all collectives and messages of a step, and the host for none."""

OF_FOUR = ("replicas=2 stages=2", "stages=2 shards=2", "replicas=2 shards=2 shard_optimizer=true")


ON_CPU = {"distributed:simshm_cpu": "distributed:shm", "distributed:nccl": "distributed:gloo"}
"""Engines of the CPU's run, where the device has a backend of its own; who sums in another order rounds otherwise."""


class Loop:
    """The plain loop; counts what the ``COUNTED``-th step copies of the replica that comes to it first.

    A loop of virtual time makes the steps of all replicas in turn, so that others are under way meanwhile.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._counts = kind, True
        self._begun = self._ended = 0
        self.copied, self.steps = Copied(), 0
        """What was copied, and how many steps were under way meanwhile."""

    def __call__(self, worker: Any) -> None:
        """Train."""
        for number, batch in enumerate(worker.batches(), 1):
            if number == COUNTED and self._counts:
                self._counts, before = False, self._ended
                with counted(self._kind) as self.copied:
                    self._step(worker, batch)
                self.steps = self._begun - before
            else:
                self._step(worker, batch)

    def _step(self, worker: Any, batch: Any) -> None:
        self._begun += 1
        worker.step(batch)
        self._ended += 1


def plain(worker: Any) -> None:
    """The same loop without the counting."""
    for batch in worker.batches():
        worker.step(batch)


def outcome(program: str, strategy: str, engine: str, kind: str) -> tuple[float, float, float]:
    """Return how far parameters and scores on the accelerator are from the CPU's, and the bytes that a step copies.

    These are to the host, and to the device.

    A program that draws numbers on the device is compared with virtual time on the device, if its numbers are not the
    CPU's.
    """
    settings: dict[str, Any] = {"steps": STEPS, "progress": False, "evaluate_every": 100}
    loop, on_device = Loop(kind), f"{strategy} device={kind}".strip()
    drawn = program in DRAWING and kind != SIMULATED
    reference = (on_device, "virtual") if drawn else (strategy, ON_CPU.get(engine, engine))
    one = launch(plain, PROGRAMS[program], reference[0], engine=reference[1], **settings)
    other = launch(loop, PROGRAMS[program], on_device, engine=engine, **settings)
    assert all(value.device.type == "cpu" for value in other.state.values())
    assert one.state.keys() == other.state.keys()
    if strategy in NEVER_POLLED and kind == SIMULATED:
        assert not loop.copied.polls, f"{strategy}: the host waits for {loop.copied.polls} collectives in a step"
    differences = [float((one.state[name] - other.state[name]).abs().max()) for name in one.state]
    differences.append(abs(one.history[-1].train_loss - other.history[-1].train_loss))
    return max(differences), loop.copied.to_host / loop.steps, loop.copied.to_device / loop.steps


def alone(engine: str, kind: str) -> dict[str, tuple[float, float, float]]:
    """Return the outcomes of one worker, or in virtual time of three replicas."""
    cases = [(name, strategy) for name in PROGRAMS for strategy in (ALONE if name == "momentum" else ALONE[:1])]
    if engine == "virtual":
        cases += [("momentum", f"replicas=3 aggregation={policy}") for policy in POLICIES]
        cases += [("clipped", f"replicas=3 aggregation={policy}") for policy in POLICIES[:2]]
    return {f"{name} {strategy}".strip(): outcome(name, strategy, engine, kind) for name, strategy in cases}
