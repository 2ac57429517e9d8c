"""What actors and the driver say to each other, tensors apart."""

from typing import Literal, NamedTuple, TypeAlias

from paceline.core.errors import PacelineError
from paceline.core.records import Account, Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Version
from paceline.engine.base import Progress
from paceline.engine.figures import Figures
from paceline.engine.ray.freight import Bytes
from paceline.trace.spans import Span

Phase: TypeAlias = Literal["starting", "training", "scoring", "done"]


class Place(NamedTuple):
    """Where an actor lives."""

    pid: int
    node: str


class Post(NamedTuple):
    """What a replica is told when a run begins for it."""

    run: int
    """Which run of its engine."""
    replica: ReplicaId
    attempt: Clock
    """The newest that was made under its name: 0, but for one that takes another's place."""
    micro_steps: int
    """How many that were."""
    server: Place


class Order(NamedTuple):
    """What a replica is released for."""

    attempt: Clock
    micro_steps: int
    version: Version


Reply: TypeAlias = tuple[Order | None, list[Bytes]]
"""An order and the A for it; None: training has ended for this replica."""

END: Reply = (None, [])


class Report(NamedTuple):
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
    """What its user's code raised, as :func:`paceline.engine.failure.failure` writes it."""
    spans: list[Span]


class Standing(NamedTuple):
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
