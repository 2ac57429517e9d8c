"""Messages between actors and the driver, and what travels through Ray's object store.

What actors and the driver say to each other, tensors apart.
"""

import pickle
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm.shared_pickle import parts_of
from paceline.core.errors import PacelineError
from paceline.core.records import Account, Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Version
from paceline.engine.base import Progress
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.trace.spans import Span

Bytes: TypeAlias = NDArray[np.uint8]
"""An array whatever its numbers are; numpy has no name for some of torch's."""


def pack(obj: object) -> list[Bytes]:
    """An object graph as arrays: its pickle, then each large array beside it; raises InputError where it can't be."""
    return [np.frombuffer(part, np.uint8) for part in parts_of(obj)]


def unpack(parts: Sequence[Bytes]) -> Any:
    """Rebuild the object graph; its large arrays are views of ``parts``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch would have its memory writable
        return pickle.loads(parts[0].tobytes(), buffers=parts[1:])


def arrays_of(state: FlatState) -> list[Bytes]:
    """The vectors of a state, in its order; nothing is copied."""
    return [vector.view(torch.uint8).numpy() for vector in state.vectors]


def state_of(layout: FlatLayout, arrays: Sequence[Bytes]) -> FlatState:
    """The state whose vectors these are; nothing is copied."""
    blocks = (*layout.parameters, *layout.buffers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as above
        vectors = [torch.from_numpy(a).view(b.dtype) for a, b in zip(arrays, blocks, strict=True)]
    return FlatState(layout, vectors[: len(layout.parameters)], vectors[len(layout.parameters) :])


Phase: TypeAlias = Literal["starting", "training", "scoring", "done"]


class WorkerLocation(NamedTuple):
    """Where an actor lives."""

    pid: int
    node: str


class ReplicaAssignment(NamedTuple):
    """What a replica is told when a run begins for it."""

    run: int
    """Which run of its engine."""
    replica: ReplicaId
    attempt: Clock
    """The newest that was made under its name: 0, but for one that takes another's place."""
    micro_steps: int
    """How many that were."""
    server: WorkerLocation


class RayGrant(NamedTuple):
    """What a replica is released for."""

    attempt: Clock
    micro_steps: int
    version: Version


Reply: TypeAlias = tuple[RayGrant | None, list[Bytes]]
"""An order and the A for it; None: training has ended for this replica."""

END: Reply = (None, [])


class RayCompletion(NamedTuple):
    """What a replica tells of one attempt."""

    replica: ReplicaId
    attempt: Clock
    version: Version
    samples: int
    finite: bool
    loss: float
    figures: Figures


class Ended(NamedTuple):
    """What a replica's run has come to."""

    failure: bytes | None
    """What its user's code raised, as :func:`paceline.core.errors.encode_failure` writes it."""
    spans: list[Span]


class RunStatus(NamedTuple):
    """How a run stands."""

    phase: Phase
    progress: Progress
    failure: PacelineError | None
    waiting: tuple[ReplicaId, ...]
    """Those that have not built their model."""


class Result(NamedTuple):
    """What the server has to give in the end."""

    state: list[Bytes]
    history: list[Record]
    account: Account
    spans: list[Span]
    began_ns: Nanoseconds
    """On the server's clock."""
