"""One turn of each side: what a step takes on this rank, and the parameters that it ends with.

What a side needs is imported by that side alone, so that the memory of none holds another's code.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import SEED, task
from torch import Tensor, nn
from torch.optim import Optimizer

WARM_UP = 3
"""Steps that do not count."""

BEGAN = deque[float]()
"""When each step of the newest turn of ours asked for its batch. No list: ranks compare what is in those."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3),
}


class Job(NamedTuple):
    """What a turn trains."""

    model: str
    batch: int
    steps: int
    """That count."""
    optimizer: str = "sgd"


class Turn(NamedTuple):
    """What one turn gave on this rank."""

    times: list[float]
    """Seconds of each step that counts."""
    state: dict[str, Tensor]
    """The parameters at the end, by name."""
    payload_bytes: float | None = None
    """Sent by all ranks together in a step, as the side itself counts it."""


def alone(job: Job) -> Turn:
    """Processes that communicate nothing: nothing can be faster but by chance."""
    model = task(job.model).built()
    return _timed(job, model, model, OPTIMIZERS[job.optimizer](model.parameters()))


def ddp(backend: str, job: Job) -> Turn:
    """torch's DistributedDataParallel, as its users write it."""
    from torch.nn.parallel import DistributedDataParallel

    if backend == "shm":
        import paceline.comm

        paceline.comm.register()
    group = dist.new_group(backend=backend)
    made = task(job.model).built()
    wrapped = DistributedDataParallel(made, process_group=group)
    turn = _timed(job, made, wrapped, OPTIMIZERS[job.optimizer](wrapped.parameters()))
    del wrapped
    dist.destroy_process_group(group)
    return turn


def accelerate(job: Job) -> Turn:
    """Hugging Face Accelerate, as its users write it: DDP on Gloo underneath."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = task(job.model).built()
    model, optimizer = accelerator.prepare(made, OPTIMIZERS[job.optimizer](made.parameters()))
    return _timed(job, made, model, optimizer, accelerator.backward)


def fabric(job: Job) -> Turn:
    """Lightning Fabric, as its users write it: DDP on Gloo underneath."""
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    lightning.launch()
    made = task(job.model).built()
    model, optimizer = lightning.setup(made, OPTIMIZERS[job.optimizer](made.parameters()))
    return _timed(job, made, model, optimizer, lightning.backward)


def _timed(
    job: Job, made: nn.Module, model: nn.Module, optimizer: Any, backward: Callable[[Tensor], object] = Tensor.backward
) -> Turn:
    """The loop of all who write their own; ``made`` is what ``model`` wraps."""
    trained = task(job.model)
    x, y = trained.batch(job.batch, dist.get_rank())
    times = []
    for _ in range(WARM_UP + job.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        backward(trained.loss(model(x), y))
        optimizer.step()
        times.append(time.perf_counter() - began)
    return Turn(times[WARM_UP:], {name: p.detach().clone() for name, p in made.named_parameters()})


def ours(engine: str, words: str, job: Job) -> Turn:
    """Paceline's distributed engine."""
    import paceline

    trained = task(job.model)
    BEGAN.clear()

    def batches(replica: int, replicas: int, seed: int) -> Iterator[Any]:
        one = trained.batch(job.batch, replica)  # the same again and again, as on the other sides
        while True:
            BEGAN.append(time.perf_counter())
            yield one

    program = paceline.Program(
        model=trained.make,
        loss=trained.loss,
        optimizer=OPTIMIZERS[job.optimizer],
        train=batches,
        batch_size=job.batch,
        seed=SEED,
    )
    strategy, steps = f"replicas={dist.get_world_size()} threads=1 {words}", WARM_UP + job.steps
    run = paceline.train(program, strategy, engine=engine, steps=steps, evaluate_every=10**6, progress=False)
    times = [after - before for before, after in itertools.pairwise(list(BEGAN)[-steps:])]  # of all but the last
    return Turn(times[WARM_UP:], dict(run.state), run.summary["payload_bytes_per_step"])


Side = Callable[[Job], Turn]

WHOLE, DIVIDED = "shard_optimizer=false", "shard_optimizer=true"

ALONE, AGAINST, DEFAULT = "alone", "ddp gloo", "paceline"

SIDES: dict[str, Side] = {
    ALONE: alone,
    AGAINST: functools.partial(ddp, "gloo"),
    "ddp shm": functools.partial(ddp, "shm"),
    "accelerate gloo": accelerate,
    "fabric gloo": fabric,
    DEFAULT: functools.partial(ours, "distributed", ""),
    "paceline gloo": functools.partial(ours, "distributed:gloo", WHOLE),
    "paceline shm": functools.partial(ours, "distributed:shm", WHOLE),
    "paceline shm, divided": functools.partial(ours, "distributed:shm", DIVIDED),
}

OPTIONAL = {"accelerate gloo": ("accelerate", "accelerate"), "fabric gloo": ("lightning_fabric", "lightning-fabric")}
"""Module and distribution that a side needs beside Paceline's own."""


def absent(side: str) -> str | None:
    """Why a side can't be measured here; None where it can."""
    module, distribution = OPTIONAL.get(side, ("torch", "torch"))
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{distribution} is not installed; write pip install {distribution}"


def version(side: str) -> str:
    """Of what a side needs beside torch and Paceline; empty where that is nothing."""
    if side not in OPTIONAL:
        return ""
    distribution = OPTIONAL[side][1]
    return f"{distribution} {importlib.metadata.version(distribution)}"
