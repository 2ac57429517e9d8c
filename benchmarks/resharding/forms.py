"""The program, and the ways to split it: every form of parallelism over 1, 2, 3, 4 and 8 workers."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import paceline

SIZES = (1, 2, 3, 4, 8)
BATCH = 24
"""Samples of an update, whatever the split: 24 can be divided by each of the sizes."""
SAMPLES = 200
"""An epoch is 8 whole updates and one of 8 samples."""
# Largest relative deviation of a loss. In float32 runs that were not cut are farther apart than 1e-6, too.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4}

SAVED_AT, STEPS = 6, 50
"""Updates before the run is cut, in the middle of an epoch, and after it."""


class Split(NamedTuple):
    """One way to split the program.

    Args:
        form: of parallelism.
        workers: how many.
        strategy: its text.
    """

    form: str
    workers: int
    strategy: str


ALONE = Split("one process", 1, "replicas=1")

FORMS: dict[str, Callable[[int], str]] = {
    "replicas": "replicas={0}".format,
    "stages": "stages={0} micro_batches=4".format,
    "shards": "shards={0}".format,
    "ZeRO-1": "replicas={0} shard_optimizer=true".format,
    "FSDP2": "replicas={0} shard_parameters=true".format,
}

HYBRIDS = (
    Split("hybrid", 3, "stages=[2,1] micro_batches=4"),
    Split("hybrid", 4, "replicas=2 stages=2 micro_batches=4 shard_optimizer=true"),
    Split("hybrid", 4, "replicas=2 shards=2"),
    Split("hybrid", 4, "stages=2 shards=2 micro_batches=4"),
    Split("hybrid", 8, "stages=[5,3] micro_batches=8"),
    Split("hybrid", 8, "replicas=4 shards=2 shard_optimizer=true"),
    Split("hybrid", 8, "replicas=2 stages=2 shards=2 micro_batches=4"),
    Split("hybrid", 8, "replicas=2 stages=2 shards=2 micro_batches=4 shard_optimizer=true"),
)

SPLITS = (ALONE, *(Split(form, n, text(n)) for form, text in FORMS.items() for n in SIZES[1:]), *HYBRIDS)
"""All of them; of one worker there is one."""

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}

# Eight layers, for eight stages. No two neighbours have the same width, and 11 and 9 can't be cut evenly.
_WIDTHS = (6, 24, 16, 11, 32, 13, 24, 9, 3)


def model(dtype: torch.dtype) -> nn.Module:
    """Return an MLP of eight layers."""
    layers: list[Any] = []
    for wide, next_wide in itertools.pairwise(_WIDTHS):
        layers += [nn.Linear(wide, next_wide), nn.Tanh()]
        nn.init.xavier_normal_(layers[-2].weight, gain=5 / 3)  # else eight layers let little through
    return nn.Sequential(*layers[:-1]).to(dtype)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler whose state a checkpoint has to bring back."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * (SAVED_AT + STEPS))


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that say which ones they are."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(SAMPLES, _WIDTHS[0], generator=generator, dtype=torch.float64).to(dtype)
        self.targets = self.inputs[:, : _WIDTHS[-1]].argmax(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.targets[index]


class Batches:
    """Makes batches of samples, and keeps the numbers of those that have one; in the test set they have none."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []

    def __call__(self, samples: Sequence[tuple[Any, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        *numbers, inputs, targets = zip(*samples, strict=True)
        if numbers and len(samples) <= BATCH:  # more of them are scored at once
            self.taken.append(list(numbers[0]))
        return torch.stack(inputs), torch.stack(targets)


def program(optimizer: str, dtype: torch.dtype, batches: Batches) -> paceline.Program:
    """Return the program: clipping and a schedule, so that a norm over all ranks and a clock have to be right too."""
    test = Numbered(dtype, 8)
    return paceline.Program(
        model=functools.partial(model, dtype),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=cosine,
        clip_norm=0.5,
        train=Numbered(dtype, 7),
        test=(test.inputs, test.targets),
        global_batch_size=BATCH,
        seed=3,
        loader={"collate_fn": batches},
    )
