"""Programs whose memory on an accelerator is measured, so large that what a loss or a status takes doesn't count."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from paceline import Program, launch
from paceline.datasets.models import cnn, mlp
from paceline.datasets.shakespeare import LENGTH, next_character_loss, transformer
from paceline.planner.base import Arrangement

STEPS = 4
WARM = 2
"""Steps after which the peak is counted anew: gradients and the optimizer's state are there."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def classes(samples: int, count: int, *shape: int) -> Tensor:
    return torch.randint(count, (samples, *shape), generator=torch.Generator().manual_seed(2))


TEXT = classes(64, 256, LENGTH + 1)

PROGRAMS: dict[str, Program] = {
    "mlp": Program(
        functools.partial(mlp, 512, 1024, 1024, 64),
        nn.functional.cross_entropy,
        functools.partial(Adam, lr=1e-3),
        (random(256, 512), classes(256, 64)),
        batch_size=64,
    ),
    "transformer": Program(
        functools.partial(transformer, 256, 128, 4, 4),
        next_character_loss,
        functools.partial(Adam, lr=1e-3),
        (TEXT[:, :-1], TEXT[:, 1:]),
        batch_size=8,
    ),
    "cnn": Program(
        functools.partial(cnn, 3, 64),
        nn.functional.cross_entropy,
        functools.partial(SGD, lr=0.01, momentum=0.9),
        (random(64, 3, 64, 64), classes(64, 10)),
        batch_size=16,
    ),
}


STRATEGIES: dict[int, dict[str, Arrangement]] = {
    1: {"replicas=1": Arrangement()},
    2: {
        "replicas=2": Arrangement(replicas=2),
        "replicas=2 shard_optimizer=true": Arrangement(replicas=2, divided=1),
        "stages=2 micro_batches=2": Arrangement(stages=2, micro_batches=2),
        "shards=2": Arrangement(shards=2),
    },
}
"""By the number of ranks, and what the planner calls them."""

CUTS = {"mlp": "2", "transformer": "3.norm1", "cnn": "7"}
"""Where stages are cut, for the plan and the run to do it alike."""


class Watched:
    """The plain loop; measures the peak of the steps after the first ones."""

    def __init__(self) -> None:
        self.peak = self.before = 0

    def __call__(self, worker: Any) -> None:
        """Train."""
        for number, batch in enumerate(worker.batches(), 1):
            if number == WARM + 1:
                torch.accelerator.reset_peak_memory_stats()
                self.before = torch.accelerator.memory_allocated()
            worker.step(batch)
        self.peak = torch.accelerator.max_memory_allocated()


def allocated(name: str, strategy: str, engine: str, kind: str) -> tuple[int, int]:
    """Return the bytes that are allocated between two steps, and the most in one."""
    loop = Watched()
    cut = f" cuts={CUTS[name]}" if "stages" in strategy else ""
    settings: dict[str, Any] = {"steps": STEPS, "progress": False, "evaluate_every": 10**6}
    launch(loop, PROGRAMS[name], f"{strategy}{cut} device={kind}", engine=engine, **settings)
    return loop.before, loop.peak
