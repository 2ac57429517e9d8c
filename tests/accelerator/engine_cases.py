"""Runs on the simulated accelerator, beside the same runs on the CPU."""

import functools
from typing import Any

import torch
from torch.optim import SGD, Adam

from paceline import Program, launch
from tests.engine import programs

STEPS = 6
COUNTED = 4
"""Number of the step whose copies are counted: all that is made once is there."""

BATCH_BYTES = 4 * (6 * 8 + 8)
"""Of four samples of six float64, and their targets, int64."""

PROGRAMS: dict[str, Program] = {
    "momentum": programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9)),
    "clipped": programs.program(optimizer=functools.partial(Adam, lr=0.01), clip_norm=0.05),
    "groups": programs.program(optimizer=programs.half_decayed),
    "dropout": programs.program(model=programs.dropout),
    "batchnorm": programs.program(model=programs.batchnorm),
    "convolution": programs.program(model=programs.convolution),
    "tied": programs.program(model=programs.Tied),
}

ALONE = ("", "accumulate=2", "aggregation=local-steps:period=2")
"""Strategies of one worker."""

POLICIES = (
    *("asynchronous", "smooth-switch:every=3", "stale-synchronous:bound=1", "buffered:k=2", "decoupled:period=2"),
    *("local-steps:period=2", "local-steps:period=2,over=asynchronous", "elastic-averaging:period=2,elasticity=0.2"),
)

OF_TWO = (
    *("replicas=2", "stages=2", "stages=2 schedule=zero-bubble", "shards=2"),
    *("replicas=2 shard_optimizer=true", "replicas=2 shard_parameters=true"),
    "replicas=2 aggregation=local-steps:period=2",
    *(
        "replicas=2 compression=fp16",
        "replicas=2 compression=powersgd:rank=1",
        "replicas=2 compression=top-k:ratio=0.1",
    ),
)
OF_FOUR = ("replicas=2 stages=2", "stages=2 shards=2", "replicas=2 shards=2 shard_optimizer=true")


class Copied:
    """The plain loop; counts what its ``COUNTED``-th step copies."""

    def __init__(self) -> None:
        self.to_host = self.to_device = 0

    def __call__(self, worker: Any) -> None:
        """Train."""
        for number, batch in enumerate(worker.batches(), 1):
            copies = torch.sim.copies
            copies.reset()
            worker.step(batch)
            if number == COUNTED:
                self.to_host, self.to_device = copies.to_host_bytes, copies.to_device_bytes


def outcome(program: str, strategy: str, engine: str) -> tuple[float, int, int]:
    """Return how far parameters and scores on the accelerator are from the CPU's, and the bytes that a step copies."""
    copied, states, scores = Copied(), list[dict[str, torch.Tensor]](), list[float]()
    settings: dict[str, Any] = {"steps": STEPS, "progress": False, "evaluate_every": 100}
    # Who sums in another order rounds otherwise.
    for device, runs in (("cpu", engine.replace("simshm_cpu", "shm")), ("sim", engine)):
        run = launch(copied, PROGRAMS[program], f"{strategy} device={device}".strip(), engine=runs, **settings)
        assert all(value.device.type == "cpu" for value in run.state.values())
        states.append(run.state)
        scores.append(run.history[-1].train_loss)
    one, other = states
    assert one.keys() == other.keys()
    differences = [*(float((one[name] - other[name]).abs().max()) for name in one), abs(scores[0] - scores[1])]
    return max(differences), copied.to_host, copied.to_device


def alone(engine: str) -> dict[str, tuple[float, int, int]]:
    """Return the outcomes of one worker, or in virtual time of three replicas."""
    cases = [(name, strategy) for name in PROGRAMS for strategy in (ALONE if name == "momentum" else ALONE[:1])]
    if engine == "virtual":
        cases += [("momentum", f"replicas=3 aggregation={policy}") for policy in POLICIES]
        cases += [("clipped", f"replicas=3 aggregation={policy}") for policy in POLICIES[:2]]
    return {f"{name} {strategy}".strip(): outcome(name, strategy, engine) for name, strategy in cases}
