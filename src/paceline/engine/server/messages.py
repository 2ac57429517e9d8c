"""Messages between servers, replicas and main, and tensors as the bytes that they are."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm.shared_pickle import object_of, parts_of
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.core.records import Account, Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds, Version
from paceline.engine.base import Progress
from paceline.engine.server.news import NOTHING, News
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.trace.spans import Span

# A tensor's bytes: numpy lacks some dtypes of torch, and arrays are shared without a copy.
Bytes: TypeAlias = NDArray[np.uint8]


def pack(obj: object, known: Mapping[str, object] | None = None) -> list[Bytes]:
    """Pickle an object into arrays, its large buffers apart; raises InputError where it can't be pickled."""
    return [np.frombuffer(part, np.uint8) for part in parts_of(obj, known)]


def unpack(parts: Sequence[Bytes], known: Mapping[str, object] | None = None) -> Any:
    """Rebuild the object; its large buffers are views of ``parts``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the object store is read-only, of which torch warns
        return object_of(parts, known)


def arrays_of(state: FlatState) -> list[Bytes]:
    """Return the vectors of a state as arrays, without a copy."""
    return [vector.view(torch.uint8).numpy() for vector in state.vectors]


def state_of(layout: FlatLayout, arrays: Sequence[Bytes]) -> FlatState:
    """Return the state of these vectors, without a copy."""
    blocks = (*layout.parameters, *layout.buffers)
    with contextlib.ExitStack() as ignoring:
        if not all(array.flags.writeable for array in arrays):
            ignoring.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", UserWarning)  # as above
        # numpy gives an empty array no stride, by which torch could view it as another dtype.
        vectors = [
            torch.from_numpy(a).view(b.dtype) if a.size else torch.empty(0, dtype=b.dtype)
            for a, b in zip(arrays, blocks, strict=True)
        ]
    return FlatState(layout, vectors[: len(layout.parameters)], vectors[len(layout.parameters) :])


Phase: TypeAlias = Literal["starting", "training", "scoring", "done"]


class ReplicaAssignment(NamedTuple):
    """The part of the process of a replica in a run."""

    run: int
    """Number of the run of its engine."""
    replica: ReplicaId
    incarnation: int
    """How many processes were this replica before."""
    attempt: Clock
    """The newest attempt of the processes before this one that is complete; it is granted the next."""
    micro_steps: int
    """Micro-steps of these attempts since the run began or was resumed."""
    kept: Mapping[str, Any] | None = None
    """What the workers before had chosen, where a replica has several."""


class ServerGrant(NamedTuple):
    """Permission for a replica to compute a Δ."""

    attempt: Clock
    batches: BatchRange
    """A micro-step on each."""
    version: Version


class Member(NamedTuple):
    """One of the servers of a run, or the standby of one."""

    number: int
    """Of its slice of A; 0 is that of the first server, which decides."""
    standby: bool = False

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{'the standby of ' if self.standby else ''}server {self.number}"

    @property
    def other(self) -> "Member":
        """The other one that has the same slice, where servers have standbys."""
        return Member(self.number, not self.standby)


FIRSTS_STANDBY = Member(0, standby=True)

# A grant and the A for it; None: training has ended for this replica.
Reply: TypeAlias = tuple[ServerGrant | None, Sequence[Bytes]]

END: Reply = (None, [])


class PushCompletion(NamedTuple):
    """The end of one attempt."""

    replica: ReplicaId
    incarnation: int
    attempt: Clock
    version: Version
    samples: int
    finite: bool
    loss: float
    figures: Figures
    own_bytes: int = 0
    """Size of what the replica keeps, which follows Δ (:class:`paceline.engine.own_states.OwnState`)."""


class WorkerMeasurements(NamedTuple):
    """What a worker has measured of itself."""

    figures: Figures
    step_times: list[Seconds]
    parameter_bytes: int


class Ended(NamedTuple):
    """The end of a worker's part in a run."""

    failure: bytes | None
    """The error, as a message of which :func:`paceline.core.errors.failure_of` makes one again."""
    spans: list[Span]
    measured: WorkerMeasurements | None = None
    """Of a worker of a replica that has several; None: it failed, or another one of them is no more."""


class Suspect(NamedTuple):
    """A replica that is to be ended, and why."""

    replica: ReplicaId
    incarnation: int
    reason: str


class RunStatus(NamedTuple):
    """The state of a run."""

    phase: Phase
    progress: Progress
    failure: PacelineError | None
    waiting: tuple[ReplicaId, ...]
    """Replicas that have not built their model."""
    news: News = NOTHING
    suspects: tuple[Suspect, ...] = ()
    lost: Mapping[Member, str] = {}
    """Servers that are no more, but for the first, and why."""


class Result(NamedTuple):
    """The result of a run at the server."""

    state: list[Bytes]
    history: list[Record]
    account: Account
    spans: list[Span]
    began_ns: Nanoseconds
    """By the server's clock."""
    news: News
