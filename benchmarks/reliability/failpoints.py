"""Points of the protocol at which a process waits for the injector, which then kills whom it wants to.

::

    worker   after-backward ... (Δ is written) ... delta-written ... (completion is published) ... published
    main     decided ... (update) ... updated ... (commit)            main, where a checkpoint is due    staging

A process that gets to the point writes its id into the file ``held`` and waits for the file ``go``, the first time
only: whoever does the step anew passes. Main waits with all workers alive; one of them is killed meanwhile.
"""

import ctypes
import functools
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.writer import _Staging
from paceline.engine.local.control_block import Completion
from paceline.engine.local.server import SharedMemoryServer
from paceline.engine.replica_pace import ReplicaPace
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.replica.flat_state import FlatState

WORKER_POINTS = ("after-backward", "delta-written", "published")
INTERPRETER, NAN, FLIP, ALLOCATE = "interpreter", "nan", "flip", "allocate"
MAIN_POINTS = ("decided", "updated", "staging")

ALLOCATED = 64_000_000
"""Numbers of four bytes."""

# After this the process goes on by itself, and the trial fails.
_BOUND_S = 60.0


def hold(folder: Path) -> bool:
    """Wait for the injector, and return True, the first time that any process of the run comes to a point."""
    deadline = time.monotonic() + _BOUND_S
    if not _first(folder):
        return False
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return True


def _first(folder: Path) -> bool:
    """Return whether this process is the first of the run that comes to its point; then the injector can see it."""
    try:
        with (folder / "held").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def in_worker(where: dict[str, Any], worker: Any, step: int, batch: tuple[Tensor, Tensor]) -> None:
    """Have a worker wait at a point of its present step, or do what the point says."""
    if (where["replica"], where["step"]) != (worker.replica, step):
        return
    client, point = worker._client, where["point"]
    if point == INTERPRETER and _first(Path(where["folder"])):
        ctypes.PyDLL(None).sleep(20)  # a PyDLL does not release the interpreter's lock
    elif point == ALLOCATE and hold(Path(where["folder"])):
        torch.ones(ALLOCATED)
    elif point == NAN:
        batch[0].fill_(math.nan)
    elif point == FLIP:
        flip_bit(client.pull().vectors[0], step)
    if point not in WORKER_POINTS:
        return
    wait = functools.partial(hold, Path(where["folder"]))
    if point == "after-backward":
        client.delta_buffer = _before(client.delta_buffer, wait)
    elif point == "delta-written":
        client.push = _before(client.push, wait)
    else:
        client.push = _after(client.push, wait)


def flip_bit(vector: Tensor, seed: int) -> None:
    """Flip one bit of one number of a float32 vector."""
    draw = random.Random(seed)
    words = vector.detach().view(torch.int32)
    words[draw.randrange(len(words))] ^= 1 << draw.randrange(23)  # of the fraction: it stays finite


def in_main(where: dict[str, Any]) -> None:
    """Have main wait at a point, the ``step``-th time that it comes there."""
    if where["point"] not in MAIN_POINTS:
        return
    seen = 0

    def wait() -> None:
        nonlocal seen
        seen += 1
        if seen == where["step"]:
            hold(Path(where["folder"]))

    owner, name = {
        "decided": (SharedMemoryServer, "apply"),
        "updated": (ServerOptimizer, "apply"),
        "staging": (_Staging, "copy"),
    }[where["point"]]
    order = _after if where["point"] == "updated" else _before
    setattr(owner, name, order(getattr(owner, name), wait))


def note_remarks(folder: Path, *, arrivals: bool) -> None:
    """Have main note when it finds a replica slow, and when it has a Δ of which if asked."""
    stragglers, read = ReplicaPace.stragglers, SharedMemoryServer.read

    def note(kind: str, replicas: Iterable[int]) -> None:
        with (folder / "remarks").open("a") as file:
            file.writelines(f"{time.monotonic():.6f} {kind} {replica}\n" for replica in replicas)

    def noting(pace: ReplicaPace) -> Mapping[int, float]:
        found = stragglers(pace)
        note("stragglers", found)
        return found

    def reading(server: SharedMemoryServer, replica: int, completion: Completion, *, keep: bool) -> FlatState | None:
        note("arrived", [replica])  # before any replica is let go on by it
        return read(server, replica, completion, keep=keep)

    ReplicaPace.stragglers = noting  # type: ignore[method-assign]
    if arrivals:
        SharedMemoryServer.read = reading  # type: ignore[method-assign]


def _before(function: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        wait()
        return function(*args, **keywords)

    return call


def _after(function: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        value = function(*args, **keywords)
        wait()
        return value

    return call
