"""On one of several ranks: runs that were cut in two equal whole ones; ranks that diverge; one script, other words."""

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import PacelineError, Program, Run, train
from paceline.checkpoint.reader import Checkpoint
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator
from tests.engine import programs
from tests.engine.late_copies import copy_late

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRAIN = functools.partial(train, engine="distributed:gloo", evaluate_every=5, progress=False)
WHOLE, PART = 11, 6

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
}


def model() -> nn.Module:
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def layers() -> nn.Module:
    return nn.Sequential(*(layer for layer in model() if not isinstance(layer, nn.BatchNorm1d)))


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def program(optimizer: str, *, plain: bool = False) -> Program:
    """With what a checkpoint has to bring back: running buffers, random numbers, a schedule, clipping."""
    it = programs.program(optimizer=OPTIMIZERS[optimizer], scheduler=cosine, clip_norm=0.5)
    # BatchNorm wants two samples, which the last batches of an epoch may not have.
    return it if plain else replace(it, model=model, train=programs.data(samples=200))


# Cuts are named, since a dropout draws by the stage that it is in, and measured times may put it into another.
CASES = {
    2: [
        ("replicas=2", "sgd"),
        ("replicas=2 shard_optimizer=true", "nadam"),
        ("replicas=2 shard_optimizer=true", "adafactor"),
        ("replicas=2 shard_parameters=true", "adamw"),
        ("stages=2 cuts=4 micro_batches=2", "nadam"),
        ("shards=2", "adamw"),
        ("replicas=2 compression=top-k:ratio=0.2", "sgd"),
        ("replicas=2 compression=powersgd:rank=1", "adamw"),
        ("replicas=2 aggregation=local-steps:period=2,outer=nesterov", "adamw"),
        ("replicas=2 aggregation=local-steps:period=4,fragments=2,overlap=1,outer=nesterov", "adamw"),
    ],
    4: [
        ("replicas=2 stages=2 cuts=4 micro_batches=2", "nadam"),
        ("replicas=2 shards=2", "adamw"),
        ("stages=2 shards=2 cuts=4 micro_batches=2", "sgd"),
        ("replicas=2 shards=2 shard_optimizer=true", "adamw"),
        ("replicas=2 stages=2 cuts=4 micro_batches=2 shard_optimizer=true", "adafactor"),
        ("stages=[3,1] cuts=2 micro_batches=3", "adamw"),
        ("replicas=2 shards=2 aggregation=local-steps:period=2,outer=nesterov", "adamw"),
        ("replicas=2 stages=2 cuts=4 micro_batches=2 aggregation=local-steps:period=2", "nadam"),
    ],
}


def assert_equal(one: Run, other: Run, what: str) -> None:
    differing = [name for name, value in one.state.items() if not torch.equal(value, other.state[name])]
    assert not differing, f"{what}: {differing}"
    for key in ("updates", "gradients", "samples", "steps", "staleness", "start_digest", "test_loss"):
        assert one.summary.get(key) == other.summary.get(key), f"{what}: {key}"
    rows = [[(r.updates, r.gradients, r.test_loss) for r in run.history] for run in (one, other)]
    assert rows[0] == rows[1], what


def cut_in_two(strategy: str, optimizer: str) -> None:
    """Bit for bit: parameters, running buffers, counts, scores."""
    it, place = (
        program(optimizer, plain="[" in strategy),
        folder / f"{strategy} {optimizer}",
    )
    whole = TRAIN(it, strategy, steps=WHOLE)
    TRAIN(it, strategy, steps=PART, checkpoint=place, checkpoint_every="4 steps")
    resumed = TRAIN(it, strategy, steps=WHOLE, checkpoint=place, checkpoint_every="4 steps", resume=True)
    updates = PART // 2 if "local-steps" in strategy else PART
    told = resumed.summary["notes"]["resumed"]
    assert told == f"went on from update {updates} of {place / f'step-{updates}'}", (strategy, told)
    assert_equal(whole, resumed, strategy)
    if "stages" in strategy:
        reached = updates, whole.summary["updates"]
        cuts = [Checkpoint.open(place / f"step-{at}").manifest.head["run"]["engine"]["cut"] for at in reached]
        assert cuts[0] == cuts[1], cuts


def another_split(before: str, after: str, optimizer: str) -> None:
    """What is read, without a step; the next steps show the optimizer's state."""
    it, place, again = program(optimizer, plain=True), folder / f"{before} {after}", folder / f"{before} {after} again"
    for each in (place, again):
        TRAIN(it, before, steps=PART, checkpoint=each)
    saved = Checkpoint.open(place / f"step-{PART}")
    standing = TRAIN(it, after, steps=PART, checkpoint=place, resume=True)
    assert all(torch.equal(value, saved.read(name)) for name, value in standing.state.items()), after
    run = TRAIN(it, after, steps=WHOLE, checkpoint=again, resume=True)
    whole = TRAIN(it, before, steps=WHOLE)
    for name, value in whole.state.items():
        # The same sums of the same products in another order, over five steps in float64.
        torch.testing.assert_close(run.state[name], value, rtol=1e-9, atol=1e-12, msg=f"{before} -> {after}: {name}")


SPLITS = {
    2: [
        ("replicas=2", "replicas=2 shard_optimizer=true", "adamw"),
        ("replicas=2 shard_optimizer=true", "replicas=2 shard_parameters=true", "adamw"),
        ("replicas=2 shard_parameters=true", "replicas=2", "adamw"),
        ("stages=2 micro_batches=2", "shards=2", "sgd"),
        ("shards=2", "stages=2 micro_batches=2", "adamw"),
    ],
    4: [
        ("replicas=2 shards=2 shard_optimizer=true", "replicas=2 stages=2 micro_batches=2", "adamw"),
        ("replicas=2 stages=2 micro_batches=2 shard_optimizer=true", "replicas=2 shards=2", "sgd"),
    ],
}


def late_copies() -> None:
    """However late copies begin, they are of one version."""
    strategies = "replicas=2", "replicas=2 shard_optimizer=true", "replicas=2 shard_parameters=true", "shards=2"
    for strategy in (*strategies, "stages=2 cuts=4 micro_batches=2", "replicas=2 compression=top-k:ratio=0.2"):
        it = replace(program("adamw", plain=True), model=layers)
        TRAIN(it, strategy, steps=4, checkpoint=folder / f"{strategy} whole")
        with pytest.MonkeyPatch.context() as patch:
            copy_late(patch, ReplicatedCoordinator)
            TRAIN(it, strategy, steps=9, checkpoint=folder / f"{strategy} late", checkpoint_every="4 steps", keep=9)
        whole, late = (Checkpoint.open(folder / f"{strategy} {name}" / "step-4") for name in ("whole", "late"))
        assert set(whole.names()) == set(late.names())
        assert all(torch.equal(whole.read(name), late.read(name)) for name in whole.names()), strategy


def asynchronous_pipeline() -> None:
    """What was saved on the way is the A of one update, though the ranks have made different numbers of them."""
    it, place, strategy = (
        replace(program("adamw", plain=True), clip_norm=None),
        folder / "async",
        "stages=2 schedule=pipedream",
    )
    TRAIN(it, strategy, steps=60, checkpoint=place, checkpoint_every="20 steps", keep=9)
    steps = sorted(int(path.name.partition("-")[2]) for path in place.glob("step-*"))
    assert len(steps) > 1, steps
    saved, run = Checkpoint.open(place / f"step-{steps[0]}"), TRAIN(it, strategy, steps=steps[0])
    assert all(torch.equal(value, saved.read(name)) for name, value in run.state.items())


class Drifting(nn.Module):
    """On rank 1 a bit of a parameter flips, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(6, 3).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if rank == 1 and self.passes == 30:
            self.layer.weight.data[0, 0] += 1e-16 + abs(self.layer.weight.data[0, 0]) * 1e-15
        return self.layer(x)


def diverging() -> None:
    with pytest.raises(PacelineError, match="after update 100, rank 1 has other parameters than the ranks with"):
        TRAIN(replace(program("sgd", plain=True), model=Drifting), f"replicas={ranks}", steps=150)


if sys.argv[2] == "cut":
    for case in CASES[ranks]:
        cut_in_two(*case)
elif sys.argv[2] == "late":
    late_copies()
elif sys.argv[2] == "split":
    for split in SPLITS[ranks]:
        another_split(*split)
else:
    asynchronous_pipeline()
    diverging()
