"""What each rank does: save a run, read checkpoints into its split, or go on from one.

Reading goes the way of a resume: the run is set up, ``HeldTensors.restore`` is called with the checkpoint, and what the
rank then holds of each tensor is compared with that rectangle of the full one. Before, all that it holds is NaN, so
what is not read shows.
"""

import contextlib
import functools
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from forms import SAVED_AT, STEPS, Batches, program
from kit.crew import Member
from torch import Tensor

import paceline
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.engine.distributed.held_tensors import HeldTensors
from paceline.engine.run_state import ResumePoint

# Ranks may wait long for each other: eight of them share the cores of one machine.
TRAIN = functools.partial(paceline.train, engine="distributed:shm", evaluate_every=1, progress=False, timeout_s=900.0)


class Task(NamedTuple):
    """What all ranks of a split do with one program.

    Args:
        strategy: of the split.
        optimizer: its name.
        dtype: of all parameters: ``float64`` or ``float32``.
        folder: where a run is saved; or of a run to go on from; "": the run is not cut.
        read: folders of checkpoints that are read into this split; none: the run is saved or goes on.
    """

    strategy: str
    optimizer: str
    dtype: str
    folder: str
    read: tuple[str, ...] = ()


class Trained(NamedTuple):
    """What came of a run, by the one rank that tells."""

    losses: list[tuple[float, float]]
    """After each update: of the training samples, and of the test set."""
    taken: list[list[int]]
    """Numbers of the samples of each update."""
    differing: list[str]
    """Names of tensors in memory that are not those of the checkpoint at the end."""


class Read(NamedTuple):
    """What came of reading one checkpoint into a split."""

    folder: str
    tensors: int
    """Number of tensors, parameters and optimizer state."""
    chunks: int
    """Rectangles that were compared, on all ranks."""
    differing: list[str]
    """Names of tensors of which a rank has other bits, or which the ranks do not cover exactly once."""


def work(member: Member, tasks: Sequence[tuple[int, Task]]) -> None:
    """Do all of them, one after another; rank 0 tells (number, result)."""
    gc.freeze()  # each run ends with a collection, most of whose time would go into what was imported
    for number, task in tasks:
        result: Any = read_all(member, task) if task.read else train(member, task)
        if member.rank == 0:
            member.tell((number, result))


def train(member: Member, task: Task) -> Trained:
    """Train to the cut and save, or go on from there to the end; or train from the beginning to the end."""
    batches, folder = Batches(), Path(task.folder)
    saves = not folder.exists()
    it, differing = program(task.optimizer, getattr(torch, task.dtype), batches), list[str]()
    if not task.folder:
        run = TRAIN(it, task.strategy, steps=SAVED_AT + STEPS)
    elif saves:
        run = TRAIN(it, task.strategy, steps=SAVED_AT, checkpoint=folder, checkpoint_every="1000 steps")
        saved = Checkpoint.open(folder / f"step-{SAVED_AT}")
        differing = [name for name, value in run.state.items() if not same_bits(value, saved.read(name))]
    else:
        run = TRAIN(it, task.strategy, steps=SAVED_AT + STEPS, resume=folder)
    updates = SAVED_AT if saves else STEPS
    rows = [(row.train_loss, row.test_loss) for row in run.history][-updates:]
    replicas, made = run.strategy.replicas, updates if task.folder else SAVED_AT + STEPS  # type: ignore[union-attr]
    return Trained(rows, taken(member, batches.taken, made, replicas), differing)  # type: ignore[arg-type]


def uncut(optimizer: str, dtype: str) -> list[tuple[float, float]]:
    """Return the losses after the cut of a run in one process that is not cut."""
    it = program(optimizer, getattr(torch, dtype), Batches())
    run = paceline.train(
        it, "replicas=1", engine="distributed:shm", evaluate_every=1, progress=False, steps=SAVED_AT + STEPS
    )
    return [(row.train_loss, row.test_loss) for row in run.history][-STEPS:]  # type: ignore[misc]


def taken(member: Member, own: Sequence[list[int]], updates: int, replicas: int) -> list[list[int]]:
    """Return the numbers of the samples of each update, over all replicas, of which the first rank of each counts."""
    every: list[Any] = [None] * member.ranks
    dist.all_gather_object(every, list(own[-updates:]))
    firsts = every[:: member.ranks // replicas]
    # Of the last update of an epoch some replicas may have no samples, and so no batch; here each has one.
    return [sorted(number for batch in update for number in batch) for update in zip(*firsts, strict=True)]


def read_all(member: Member, task: Task) -> list[Read]:
    """Read checkpoints into this split, and compare bit for bit; trains nothing."""
    found: dict[str, tuple[int, int, list[str], Counter[str]]] = {}

    def check(restore: Callable[[ResumePoint], None], held: HeldTensors) -> None:
        for name in task.read:
            checkpoint = Checkpoint.open(Path(name))
            point = ResumePoint.of(checkpoint)
            restore(point)
            for chunk in held_chunks(held):
                chunk.tensor.detach().fill_(math.nan)
            restore(point)
            found[name] = compared(held, checkpoint, point)

    with observed(check):
        it = program(task.optimizer, getattr(torch, task.dtype), Batches())
        TRAIN(it, task.strategy, steps=SAVED_AT, resume=Path(task.read[0]))
    every: list[Any] = [None] * member.ranks
    dist.all_gather_object(every, found)
    return [merged(name, [each[name] for each in every]) for name in task.read]


@contextlib.contextmanager
def observed(check: Callable[[Callable[[ResumePoint], None], HeldTensors], None]) -> Iterator[None]:
    """Context manager: ``check`` comes before what a rank does to go on."""
    restore = HeldTensors.restore

    def first_checked(held: HeldTensors, resume: ResumePoint) -> None:
        check(functools.partial(restore, held), held)
        restore(held, resume)

    with mock.patch.object(HeldTensors, "restore", first_checked):
        yield


def held_chunks(held: HeldTensors) -> list[TensorChunk]:
    """Return all that a rank holds of A and of the optimizer's state."""
    return [*held.state, *(held.optimizer.chunks(held.describe) if held.optimizer is not None else ())]


def compared(held: HeldTensors, saved: Checkpoint, point: ResumePoint) -> tuple[int, int, list[str], Counter[str]]:
    """Return the number of tensors, of rectangles, names of those that differ, and elements that this rank writes."""
    tensors, differing, chunks = {name: saved.read(name) for name in saved.names()}, set[str](), held_chunks(held)
    for chunk in chunks:
        rectangle = tensors[chunk.name]
        for dim, start in enumerate(chunk.offset):
            rectangle = rectangle.narrow(dim, start, chunk.tensor.shape[dim])
        if not same_bits(chunk.tensor.detach(), rectangle):
            differing.add(chunk.name)
    now, then = scalars(held.state_json()), scalars(point.optimizer)
    differing |= {f"{slot} of {name}" for (slot, name), value in now.items() if then.get((slot, name)) != value}
    written = Counter[str]()
    for chunk in held.written():
        written[chunk.name] += chunk.tensor.numel()
    return len(tensors), len(chunks), sorted(differing), written


def merged(folder: str, every: Sequence[tuple[int, int, list[str], Counter[str]]]) -> Read:
    """Return what came of all ranks: what together they write must be each tensor, once."""
    manifest, written = Checkpoint.open(Path(folder)).manifest, Counter[str]()
    for *_, own in every:
        written.update(own)
    uncovered = {name for name, info in manifest.tensors.items() if written[name] != math.prod(info.shape)}
    names = uncovered | {name for _, _, differing, _ in every for name in differing}
    return Read(folder, every[0][0], sum(chunks for _, chunks, _, _ in every), sorted(names))


def scalars(optimizer: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the numbers of an optimizer's state, by slot and parameter."""
    names = [name for group in optimizer.get("parameters", ()) for name in group]
    found = {}
    for slot, values in optimizer.get("scalars", {}).items():
        each = values["each"] if "each" in values else dict.fromkeys(names, values["all"])
        found |= {(slot, name): value for name, value in each.items()}
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits; those of NaN, of which there should be none, are none."""
    return one.dtype == other.dtype and torch.equal(one, other)


def far_apart(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that two checkpoints do not both have, nearly equal: sums in another order."""
    mine, others = Checkpoint.open(one), Checkpoint.open(other)
    names = set(mine.names()) ^ set(others.names())
    for name in set(mine.names()) & set(others.names()):
        a, b = mine.read(name), others.read(name)
        bound = 1e-9 if a.dtype == torch.float64 else 1e-3
        if not torch.allclose(a, b, rtol=bound, atol=bound * float(b.abs().max()) + 1e-300):
            names.add(name)
    return sorted(names)
