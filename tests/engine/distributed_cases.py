"""What ranks train in one start of torchrun, and how a test starts them."""

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.checkpoint import checkpoint

from paceline import Program, Run, train
from paceline.engine.distributed.sync_batchnorm import synchronised_batchnorm
from paceline.optim.lamb import Lamb
from tests.engine import programs

ROOT = Path(__file__).parents[2]

STEPS = 13
"""Two and a half epochs and more of 50 samples, three replicas of 4 samples each: uneven last batches."""

MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One run; its strategy lacks the replicas."""

    program: Program
    strategy: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: {"steps": STEPS})

    def run(self, replicas: int, engine: str) -> Run:
        strategy = f"replicas={replicas} {self.strategy}"
        return train(self.program, strategy, engine=engine, progress=False, **self.settings)


def program(**fields: Any) -> Program:
    """Scored on a test set of its own."""
    return programs.program(**{"optimizer": MOMENTUM, "test": programs.data(samples=20)} | fields)


def with_holes(output: Tensor, target: Tensor) -> Tensor:
    """Not finite for some batches, on every engine the same."""
    loss = nn.functional.cross_entropy(output, target)
    return loss * float("nan") if int(target.sum()) % 5 == 1 else loss


def source(replica: int, replicas: int, seed: int) -> Any:
    """Batches of a function: replica r sees rows r, r + P, ..."""
    inputs, targets = programs.data()
    for start in range(0, 40, 4):
        rows = torch.arange(start, start + 4) + seed + replica
        yield inputs[rows % 50], targets[rows % 50]


def short_loop(worker: Any) -> None:
    """Replica 1 goes earlier than the others."""
    for made, batch in enumerate(worker.batches(), start=1):
        worker.step(batch)
        if worker.replica == 1 and made == 5:
            return


class TwoTypes(nn.Module):
    """A float32 vector beside float64 matrices, so that A is two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.rest = programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x * self.scale.double())


class Checkpointed(nn.Module):
    """One layer under two checkpoints, each with a backward pass of its own, that adds to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        for _ in range(2):
            between = checkpoint(self.again, between, use_reentrant=True) if self.training else self.again(between)
        return self.head(between)

    def again(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))


class Branching(nn.Module):
    """Its graph depends on the batch, so each rank has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        branch = self.left if float(x.sum()) > 0 else self.right
        return self.head(torch.tanh(branch(between)))


class LookedUp(nn.Module):
    """The gradient of its table is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(4, 6, sparse=True), programs.mlp()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x + self.table((x[:, 0] > 0).long()))


def half() -> nn.Module:
    return programs.mlp(torch.bfloat16)


ONE_PROCESS: dict[str, Case] = {
    "sgd": Case(program(optimizer=functools.partial(SGD, lr=0.1))),
    "momentum": Case(program()),
    "adam": Case(program(optimizer=functools.partial(Adam, lr=0.01))),
    "groups": Case(program(optimizer=programs.half_decayed)),
    "lamb": Case(program(optimizer=functools.partial(Lamb, lr=0.01))),
    "scheduler": Case(program(scheduler=functools.partial(StepLR, step_size=4, gamma=0.5))),
    "clipping": Case(program(clip_norm=0.05)),
    "all of them": Case(
        program(
            optimizer=functools.partial(AdamW, lr=0.01),
            scheduler=functools.partial(CosineAnnealingLR, T_max=STEPS),
            clip_norm=0.05,
        )
    ),
    "tuple": Case(program(model=programs.Two, train=programs.with_tuple(), test=None)),
    "dict": Case(program(model=programs.Two, train=programs.with_dict(), test=None)),
    "tied": Case(program(model=programs.Tied)),
    "frozen": Case(program(model=programs.frozen)),
    "one sample each": Case(program(batch_size=1)),
    "two dtypes": Case(program(model=TwoTypes)),
}
"""Equal to one process that sees all batches."""


def over_all_ranks(model: Callable[[], nn.Module]) -> nn.Module:
    return synchronised_batchnorm(model())


def spread() -> nn.Module:
    """Planes with BatchNorm before and after: the second sees what the first did."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.BatchNorm2d(1),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()


SYNCHRONISED: dict[str, tuple[Any, dict[str, Any]]] = {
    "batchnorm of rows": (programs.batchnorm, {"steps": STEPS}),
    "batchnorm of planes": (spread, {"steps": STEPS}),
    "batchnorm and who leaves early": (programs.batchnorm, {"epochs": 1}),
}
"""Models whose BatchNorm, made one over all ranks, is that of one process, running means and all."""

ACCUMULATED: dict[str, Case] = {"accumulated": Case(program(clip_norm=0.5), "accumulate=3")}

LIKE_VIRTUAL: dict[str, Case] = {
    "sum": Case(program(optimizer=functools.partial(SGD, lr=0.05)), "aggregation=synchronous:combine=sum"),
    "running means": Case(program(model=programs.batchnorm, train=programs.data(samples=48))),
    "running means of a sum": Case(
        program(model=programs.batchnorm, train=programs.data(samples=48)), "aggregation=synchronous:combine=sum"
    ),
    "masks": Case(program(model=programs.dropout)),
    "accumulated masks": Case(program(model=programs.dropout), "accumulate=2"),
    "epochs": Case(program(), settings={"epochs": 1.5}),
    "disjoint": Case(program(), "partition=disjoint", {"epochs": 2}),
    "skipped": Case(program(loss=with_holes), settings={"steps": STEPS, "on_nonfinite": "skip"}),
    "skipped and accumulated": Case(program(loss=with_holes), "accumulate=2", {"steps": 5, "on_nonfinite": "skip"}),
    "until": Case(program(), settings={"steps": 60, "until": "train_loss<=1.05", "evaluate_every": 3}),
    "source": Case(program(train=source)),
    "loop": Case(program(), settings={"steps": STEPS, "loop": short_loop}),
    "half precision": Case(program(model=half, train=programs.data(dtype=torch.bfloat16), test=None)),
    "autocast": Case(program(precision="bf16")),
    "seldom scored": Case(program(), settings={"steps": STEPS, "evaluate_every": 5.5}),
}
"""Equal to the virtual engine, record by record."""

LOCAL_STEPS: dict[str, Case] = {
    "local steps": Case(program(), "aggregation=local-steps:period=3"),
    "local steps of a sum": Case(program(), "aggregation=local-steps:period=3,over=(synchronous:combine=sum)"),
    "an outer optimizer": Case(
        program(
            optimizer=functools.partial(AdamW, lr=0.01),
            scheduler=functools.partial(StepLR, step_size=4, gamma=0.5),
            clip_norm=0.05,
        ),
        "aggregation=local-steps:period=4,outer=nesterov",
        {"epochs": 3},
    ),
    "fragments": Case(program(), "aggregation=local-steps:period=6,fragments=3,outer=nesterov", {"steps": 20}),
    "overlapped": Case(program(), "aggregation=local-steps:period=4,overlap=2,outer=nesterov", {"steps": 18}),
    "overlapped fragments": Case(
        program(model=programs.batchnorm, train=programs.data(samples=48)),
        "aggregation=local-steps:period=6,fragments=2,overlap=1",
        {"steps": 20, "evaluate_every": 7},
    ),
    "overlapped and skipped": Case(
        program(loss=with_holes),
        "aggregation=local-steps:period=3,overlap=2",
        {"steps": 12, "on_nonfinite": "skip"},
    ),
    "overlapped and shorter": Case(
        program(), "aggregation=local-steps:period=5,overlap=4", {"steps": 60, "loop": short_loop}
    ),
    "elastic": Case(program(), "aggregation=elastic-averaging:period=3,elasticity=0.2,synchronous=true", {"epochs": 3}),
    "elastic running means": Case(
        program(model=programs.batchnorm, train=programs.data(samples=48)),
        "aggregation=elastic-averaging:period=2,elasticity=0.1,synchronous=true",
    ),
    "local running means": Case(
        program(model=programs.batchnorm, train=programs.data(samples=48)), "aggregation=local-steps:period=2"
    ),
    "local steps skipped": Case(
        program(loss=with_holes),
        "aggregation=local-steps:period=2,outer=momentum",
        {"steps": STEPS, "on_nonfinite": "skip"},
    ),
}
"""Replicas with optimizers of their own; equal to the virtual engine, record by record."""

SHARDED: dict[str, Case] = {
    f"sharded {name}": Case(case.program, "shard_optimizer=true")
    for name, case in ONE_PROCESS.items()
    if name
    in ("sgd", "momentum", "adam", "groups", "lamb", "scheduler", "clipping", "all of them", "tied", "two dtypes")
}
"""The same, with the optimizer's state divided among the ranks."""

COMPRESSED: dict[str, Case] = {
    "all that is largest": Case(program(), "compression=top-k:ratio=1"),
    "bf16": Case(program(), "compression=bf16"),
    "all of local steps": Case(program(), "aggregation=local-steps:period=3 compression=top-k:ratio=1"),
    "skipped and compressed": Case(
        program(loss=with_holes), "compression=top-k:ratio=1", {"steps": STEPS, "on_nonfinite": "skip"}
    ),
}

CASES = ONE_PROCESS | SHARDED | COMPRESSED | ACCUMULATED | LIKE_VIRTUAL | LOCAL_STEPS
CASES |= {
    name: Case(program(model=functools.partial(over_all_ranks, model)), settings=settings)
    for name, (model, settings) in SYNCHRONISED.items()
}


OVERLAPPED: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "momentum",
        "adam",
        "clipping",
        "tuple",
        "tied",
        "frozen",
        "one sample each",
        "two dtypes",
        "accumulated",
        "sum",
        "running means",
        "accumulated masks",
        "epochs",
        "disjoint",
        "until",
        "source",
        "loop",
        "half precision",
        "autocast",
    )
} | {
    "a shorter last Δ": Case(program(), "accumulate=3", {"epochs": 1.0}),
    "checkpointed": Case(program(model=Checkpointed)),
    "branching": Case(program(model=Branching)),
    "looked up": Case(program(model=LookedUp)),
    "slow": Case(program(), settings={"steps": STEPS, "delay": "fraction=0.5 constant:value=0.01"}),
}
"""Also trained with Δ sent in buckets during the backward pass."""

GRAPHS = ("momentum", "clipping", "tied", "frozen", "two dtypes", "accumulated", "accumulated masks", "autocast")
"""Of these, those whose steps are run as graphs as well."""

UNDIVIDED = ("skipped", "sharded momentum", "bf16", "batchnorm of rows")
"""Where Δ is sent after it, however small buckets are."""


def torchrun(script: Path, *words: str, ranks: int, folder: Path) -> "subprocess.Popen[str]":
    """Start a script on so many ranks of this host; each run finds a free port by itself."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    return subprocess.Popen(
        [sys.executable, *command, str(folder), *words],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]", within_s: float = 300.0) -> str:
    """What it printed; it does not outlive the call."""
    try:
        return process.communicate(timeout=within_s)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def keep(folder: Path, name: str, value: Any) -> None:
    """Leave what a rank has found for the test."""
    rank = os.environ["RANK"]
    (folder / f"{name}.{rank}").write_bytes(pickle.dumps(value))


def kept(folder: Path, name: str, ranks: int) -> list[Any]:
    """What all ranks have left."""
    return [pickle.loads((folder / f"{name}.{rank}").read_bytes()) for rank in range(ranks)]


def told(run: Run) -> dict[str, Any]:
    """All of a run that tests compare."""
    return {
        "state": dict(run.state),
        "history": [record.row() for record in run.history],
        "summary": run.summary,
        "spans": run.spans,
        "model": dict(run.model.state_dict()) if run.model is not None else {},
    }


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or the name and text of what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error)
