"""Who takes part: each builds its model at A_0, has a loop make steps on the same batch, and returns its parameters.

A side calls its loop inside, so that those of several sides can be under way at once and take turns::

    plain(job, lambda a: ddp(job, lambda b: take_turns(a, b)))
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from kit.turns import Step
from models import SEED, Job
from torch import Tensor, nn

import paceline

Loop: TypeAlias = Callable[[Step], None]
State: TypeAlias = dict[str, Tensor]
Side: TypeAlias = Callable[[Job, Loop], State]

PLAIN, READING = "plain PyTorch", "plain PyTorch, loss read"
OURS, DDP, FSDP, DTENSOR, PIPELINING = "paceline", "DDP", "FSDP2", "DTensor", "torch.distributed.pipelining"

MICRO_BATCHES = 4
"""Of a pipeline's step."""

COLUMNS, ROWS = ("queries", "keys", "values", "wide"), ("mixed", "narrow")
"""Layers of a stack that tensor parallelism divides by columns, and those after them, by rows."""

MOST_STEPS = 10**6
"""More than any loop makes, so that each ends by itself."""


class Ranks(NamedTuple):
    """The ranks of torch's sides: all, or the first alone where there is no device for each.

    Args:
        group: of them, on the device's own backend; None: this rank is not among them.
        device: of this rank.
    """

    group: Any
    device: torch.device

    @property
    def rank(self) -> int:
        """This one's among them."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group)

    def mesh(self) -> Any:
        """The same ranks, as FSDP2 and DTensor take them."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type)


def plain(job: Job, loop: Loop, *, reads: bool = False) -> State:
    """One process; ``reads``: each step returns its loss, as Paceline's does, for which the host waits."""
    model = job.built()
    return _trained(job, model, model, job.batch(), loop, reads=reads)


def waiting(job: Job, loop: Loop) -> State:
    """A rank that has no part in a side."""
    loop(lambda: None)
    return {}


def ddp(ranks: Ranks, job: Job, loop: Loop) -> State:
    """torch's DistributedDataParallel, as its users write it."""
    from torch.nn.parallel import DistributedDataParallel

    made = job.built()
    devices = None if job.kind == "cpu" else [ranks.device.index]
    wrapped = DistributedDataParallel(made, device_ids=devices, process_group=ranks.group)
    return _trained(job, made, wrapped, job.batch(ranks.rank, ranks.size), loop)


def fsdp(ranks: Ranks, job: Job, loop: Loop) -> State:
    """torch's FSDP2: each layer of the kind that repeats, and the rest."""
    from torch.distributed.fsdp import fully_shard

    made, mesh = job.built(), ranks.mesh()
    for module in [layer for layer in made.modules() if isinstance(layer, job.about.layer)] + [made]:
        fully_shard(module, mesh=mesh)
    return _trained(job, made, made, job.batch(ranks.rank, ranks.size), loop)


def dtensor(ranks: Ranks, job: Job, loop: Loop) -> State:
    """torch's parallelize_module over a stack."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made, mesh = job.built(), ranks.mesh()
    for layer in made.children():
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        parallelize_module(layer, mesh, plan)
        layer.heads //= ranks.size  # torch leaves that to whoever writes the model
    return _trained(job, made, made, job.batch(), loop)


def pipelining(ranks: Ranks, job: Job, loop: Loop) -> State:
    """torch's Schedule1F1B over a stack, cut into equal parts."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, (x, y) = job.built(), job.batch()
    each, first = len(whole) // ranks.size, ranks.rank == 0
    last = ranks.rank == ranks.size - 1
    names = [str(number) for number in range(ranks.rank * each, (ranks.rank + 1) * each)]
    part = nn.Sequential()
    for name in names:
        part.add_module(name, whole.get_submodule(name))
    piece = torch.empty_like(x[: len(x) // MICRO_BATCHES])
    crosses = torch.empty_like(piece, requires_grad=True)
    takes = piece if first else crosses
    stage = PipelineStage(part, ranks.rank, ranks.size, ranks.device, takes, crosses, group=ranks.group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, job.about.loss)
    optimizer = job.about.optimizer(part.parameters())
    given = (x,) if first else ()

    def step() -> None:
        optimizer.zero_grad()
        wanted: dict[str, Any] = {"target": y, "losses": []} if last else {}
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()

    loop(step)
    return state_of(part)


def ours(strategy: str, backend: str, job: Job, loop: Loop) -> State:
    """Paceline's distributed engine."""
    parts = dist.get_world_size() if strategy.startswith("replicas") else 1

    def stepped(worker: Any) -> None:
        next(worker.batches())
        batch = job.batch(worker.replica, parts)
        loop(lambda: worker.step(batch))

    run = paceline.launch(
        stepped, program(job, whole=bool(strategy)), f"{strategy} device={job.kind}", engine=f"distributed:{backend}",
        steps=MOST_STEPS, evaluate_every=MOST_STEPS, progress=False,
    )  # fmt: skip
    return dict(run.state)


def program(job: Job, *, whole: bool) -> paceline.Program:
    """What Paceline trains; loops take the batch that is on the device instead of those of ``train``.

    Args:
        job: has the task.
        whole: whether a batch of ``train`` is that of a step; else it is of two samples, for a trial step on the CPU.
    """
    samples = job.samples if whole else 2

    def batches(replica: int, replicas: int, seed: int) -> Any:
        return itertools.repeat(job.host_batch(samples))

    return paceline.Program(
        model=job.make,
        loss=job.about.loss,
        optimizer=job.about.optimizer,
        train=batches,
        batch_size=samples,
        seed=SEED,
        precision=job.about.precision,  # type: ignore[arg-type]
    )


def _trained(
    job: Job, made: nn.Module, model: nn.Module, batch: tuple[Tensor, Tensor], loop: Loop, *, reads: bool = False
) -> State:
    """The loop of all who write their own; ``made`` is what ``model`` wraps."""
    optimizer = job.about.optimizer(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss = job.loss(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if reads:
            loss.item()

    loop(step)
    return state_of(made)


def state_of(module: nn.Module) -> State:
    """Its parameters, whole, on the CPU; all ranks that have parts call it together."""
    from torch.distributed.tensor import DTensor

    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.cpu().clone() for name, value in whole.items()}
