"""The rows: which sides stand beside each other, in how many processes, and what Paceline's is to reach."""

import functools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from kit.crew import Member, crew
from kit.machine import machine
from kit.together import tell
from kit.turns import Step
from kit.work import Begun, Measured
from memory import predicted_mib
from models import Job
from rounds import Pace, burst, compared, measured, release
from sides import (
    DDP,
    DTENSOR,
    FSDP,
    MICRO_BATCHES,
    OURS,
    PIPELINING,
    PLAIN,
    READING,
    Ranks,
    Side,
    ddp,
    dtensor,
    fsdp,
    ours,
    pipelining,
    plain,
    program,
    waiting,
)

import paceline
from paceline.device import CPU, collective_backend, count, of_worker
from paceline.engine.local.engine import LocalEngine

ASYNCHRONOUS = 4
"""Replicas that go their own pace on one device."""

AT_ONCE = 10
"""Steps that plain PyTorch hands to the device before the host waits, where it has it alone."""

FORMS = {
    "": "",
    "asynchronous": f"replicas={ASYNCHRONOUS} aggregation=asynchronous",
    "replicas": "replicas=2",
    "stages": f"stages=2 micro_batches={MICRO_BATCHES}",
    "shards": "shards=2",
}
"""Strategies."""

THEIRS: Mapping[str, Mapping[str, Any]] = {
    "": {DDP: ddp, FSDP: fsdp},
    "replicas": {DDP: ddp, FSDP: fsdp},
    "stages": {PIPELINING: pipelining},
    "shards": {DTENSOR: dtensor},
}
"""torch's sides, by form."""


class Row(NamedTuple):
    """One row.

    Args:
        task: what is trained.
        form: of the workers, one of :data:`FORMS`.
        most: how much Paceline's step may take of plain PyTorch's; None: there is no bar.
    """

    task: str
    form: str = ""
    most: float | None = None

    @property
    def ranks(self) -> int:
        """Processes that take turns."""
        return 2 if self.form in ("replicas", "stages", "shards") else 1


ROWS: dict[str, Row] = {
    "mlp": Row("mlp", most=1.02),
    "gpt2": Row("gpt2", most=1.02),
    "resnet50": Row("resnet50", most=1.02),
    "asynchronous-mlp": Row("mlp", "asynchronous", 1 / 0.9),
    "asynchronous-resnet50": Row("resnet50", "asynchronous", 1 / 0.9),
    "replicas": Row("stack", "replicas"),
    "stages": Row("stack", "stages"),
    "shards": Row("stack", "shards"),
}
"""By name; of asynchronous replicas a step is one gradient, of any of them: 0.9 times as many a second."""


class Setting(NamedTuple):
    """Where and how rows are measured.

    Args:
        kind: type of device.
        small: whether sizes are those of a trial.
        pace: rounds and turns.
        seconds: of a turn of asynchronous replicas.
    """

    kind: str
    small: bool
    pace: Pace
    seconds: float


def words_of(name: str, setting: Setting) -> Iterator[Any]:
    """Measure a row; yields what is told meanwhile, and its figures last."""
    if ROWS[name].form == "asynchronous":
        yield from asynchronous(name, setting)
    else:
        yield from crew(beside, ROWS[name].ranks, name, setting)


def beside(member: Member, name: str, setting: Setting) -> None:
    """What each rank does for a row: all sides by turns."""
    row, job = ROWS[name], Job(ROWS[name].task, setting.kind, setting.small)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // row.ranks))  # for what the host computes first
    if setting.kind != CPU.type:
        torch.accelerator.set_device_index(member.rank % count(setting.kind))
    sides = sides_of(row, setting.kind, member.rank)
    figures = measured(member, job, sides, setting.pace)
    figures[OURS]["predicted_mib"] = None if row.form else predicted_mib(job)
    tell(member, Measured([told(name, setting, figures)]))


def sides_of(row: Row, kind: str, rank: int) -> Mapping[str, Side]:
    """Return the sides of a row, as one rank sees them.

    Where two ranks share a device, which NCCL refuses, Paceline's exchange by Gloo, and torch's sides have one rank.
    """
    enough = has_one_each(row, kind)
    takers = range(row.ranks if enough else 1)
    ranks = Ranks(dist.new_group(list(takers), backend=collective_backend(kind)), of_worker(kind, rank))
    note = "" if enough else ", one rank"
    sides: dict[str, Side] = {PLAIN: waiting if rank else plain}
    if not row.form:
        sides[READING] = functools.partial(plain, reads=True)
    for side, train in THEIRS[row.form].items():
        sides[f"{side}{note}"] = functools.partial(train, ranks) if rank in takers else waiting
    sides[OURS] = functools.partial(ours, FORMS[row.form], collective_backend(kind) if enough else "gloo")
    return sides


def has_one_each(row: Row, kind: str) -> bool:
    """Return whether each rank of a row has a device of its own."""
    return kind == CPU.type or row.ranks <= count(kind)


def asynchronous(name: str, setting: Setting) -> Iterator[Any]:
    """Asynchronous replicas on one device beside plain PyTorch, which has it alone; by half as many, longer turns."""
    job, rounds = Job(ROWS[name].task, setting.kind, setting.small), (setting.pace.rounds + 1) // 2
    taken: dict[str, list[float]] = {PLAIN: [], OURS: []}
    with LocalEngine() as engine:
        for number in range(rounds + 1):
            yield Begun(f"{name}, round {number} of {rounds}")
            for side in list(taken)[:: -1 if number % 2 else 1]:
                seconds = _alone_s(job, setting) if side == PLAIN else _asynchronous_s(job, setting, engine)
                if number:
                    taken[side].append(seconds)
    figures = {side: compared(job, times, taken[PLAIN]) for side, times in taken.items()}
    yield Measured([told(name, setting, figures)])


def _alone_s(job: Job, setting: Setting) -> float:
    """Return seconds of a step of one process."""
    found: list[float] = []

    def loop(step: Step) -> None:
        burst(job.kind, step, 1)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < setting.seconds:
            burst(job.kind, step, AT_ONCE)
            steps += AT_ONCE
        found.append((time.perf_counter() - began) / steps)

    plain(job, loop)
    release(job.kind)
    return found[0]


def on_the_device(job: Job, worker: Any) -> None:
    """A replica's loop, on the one batch that is there already."""
    batch = job.batch()
    for _ in worker.batches():
        worker.step(batch)


def _asynchronous_s(job: Job, setting: Setting, engine: LocalEngine) -> float:
    """Return seconds of a gradient, of all replicas together."""
    strategy = f"{FORMS['asynchronous']} device={job.kind}"
    run = paceline.launch(
        functools.partial(on_the_device, job), program(job, whole=False), strategy, engine=engine,
        seconds=setting.seconds, evaluate_every=10 * setting.seconds, progress=False,
    )  # fmt: skip
    return float(run.summary["seconds"]) / int(run.summary["applied"])


def told(name: str, setting: Setting, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A row as it is kept."""
    device = "cpu" if setting.kind == CPU.type else torch.get_device_module(setting.kind).get_device_name()
    about = {"row": name, "device": device, "devices": count(setting.kind), "small": setting.small}
    return about | {"sides": dict(figures), "machine": machine()}
