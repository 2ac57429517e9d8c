"""The contract of an engine: the job it is given, the progress it reports, the outcome it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

from torch import Tensor, nn

from paceline.checkpoint.options import CheckpointOptions
from paceline.clock.times import Delay, Times
from paceline.core.conditions import Condition
from paceline.core.errors import unknown
from paceline.core.records import Account, Record, ReplicaExit
from paceline.core.registry import declare
from paceline.core.types import BudgetUnit, OnDeath, OnNonFinite, ReplicaId, Seconds
from paceline.engine import ENGINES
from paceline.engine.run_state import ResumePoint
from paceline.engine.torch_settings import TorchSettings
from paceline.program import Program
from paceline.strategy import Strategy
from paceline.support import Feature
from paceline.trace.spans import Span


@dataclass(frozen=True, slots=True)
class Budget:
    """Bound of a run and interval of its evaluation points, both in one unit."""

    unit: BudgetUnit
    amount: float | None
    """None: until the condition is met."""
    evaluate_every: float
    until: Condition | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :func:`~paceline.train` that say the same.

        >>> Budget("steps", 10, 2.0, Condition("test_accuracy", above=True, bound=0.97)).arguments()
        {'evaluate_every': 2.0, 'steps': 10, 'until': 'test_accuracy>=0.97'}
        """
        arguments: dict[str, Any] = {"evaluate_every": self.evaluate_every}
        if self.amount is not None:
            arguments[self.unit] = self.amount
        if self.until is not None:
            arguments["until"] = f"{self.until.field}{'>=' if self.until.above else '<='}{self.until.bound!r}"
        return arguments


@dataclass(frozen=True)
class Job:
    """One run, checked and resolved: the aggregation knows P and the learning rate, the program its metrics."""

    program: Program
    strategy: Strategy
    budget: Budget
    engine: str = "local"
    """Name of the engine that was asked for; ranks of a local run have this one, too."""
    running_buffers: tuple[str, ...] = ()
    """Names of the buffers that a training step writes; they are part of Δ and A."""
    on_losses: bool = False
    """Whether the optimizer's steps take the loss, too."""
    delay: Delay | None = None
    times: Times | None = None
    """Simulated durations, of the virtual engine."""
    trace: bool = False
    on_nonfinite: OnNonFinite = "stop"
    on_death: OnDeath | None = None
    """What becomes of a run whose replica dies; None: it goes on without it where the engine can, and what a worker
    raises ends it."""
    suspect_after_s: Seconds = 5.0
    """Silence after which a replica that computes is suspected to be stopped."""
    timeout_s: Seconds = 60.0
    noise_scale: bool = False
    """True to estimate the gradient noise scale."""
    loop: Callable[[Any], None] | None = None
    """The user's own loop; absent: one step per batch."""
    callbacks: bool = False
    """Whether callbacks of the user's watch the run."""
    out: Path | None = None
    """Folder of ``workers.json`` while the run lasts."""
    checkpoint: CheckpointOptions | None = None
    """Where and how often the run is saved while it lasts; absent: never."""
    resume: ResumePoint | None = None
    """Where the run goes on; absent: it begins."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of ``train`` that a checkpoint has, as plain values (:data:`paceline.checkpoint.options.OPTIONS`)."""
    other_options: tuple[str, ...] = ()
    """Names of those that were given, but have no text."""
    fingerprint: Mapping[str, str] = field(default_factory=dict[str, str])
    """What tells this program from others."""
    modules: tuple[str, ...] = ()
    """Installed modules that workers need for the program."""
    captured: bytes | Callable[[], bytes | None] | None = field(default=None, repr=False)
    """The model's graph, where main captures it for all workers; or what waits until it has."""
    joins: bool = False
    """Whether replicas are processes that join by themselves, so that none is started, and none is replaced."""
    torch_settings: TorchSettings = field(default_factory=TorchSettings)
    """Those of the process that the user started, for all others."""

    @property
    def live(self) -> bool:
        """True if records are needed while training goes on: a condition or callbacks may end it by them."""
        return self.callbacks or self.budget.until is not None

    @property
    def survives_deaths(self) -> bool:
        """True if the run was asked to survive its replicas, whatever ends them; A is kept where it outlives them."""
        return self.on_death in ("continue", "replace") or self.strategy.elastic


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a run, for a live display."""

    phase: Literal["starting", "training", "scoring"]
    fraction: float | None
    """Share of the budget that is spent, 0 to 1; None where there is no bound."""
    time_s: Seconds = 0.0
    updates: int = 0
    gradients: int = 0
    threshold: int = 1
    staleness_mean: float | None = None
    loss: float | None = None
    """Mean loss of the newest Δs."""
    record: Record | None = None
    """The newest scored record."""
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Statistics of gradients, if requested."""
    remarks: tuple[str, ...] = ()
    """Sentences about replicas that are silent or slow."""
    work: str = ""
    """What is being done in the phase ``starting``, where that is known: ``capturing``."""


class Logged(NamedTuple):
    """Figures that a loop of the user's logs."""

    replica: ReplicaId
    step: int
    """Number of steps that the replica has made, those without samples included."""
    values: Mapping[str, float]


class StopAsked(NamedTuple):
    """A loop of the user's asks to end training on all replicas."""

    replica: ReplicaId
    reason: str


# What loops report to the process that the user started.
LoopEvent: TypeAlias = Logged | StopAsked


def loop_message(event: LoopEvent) -> dict[str, Any]:
    """Return what a loop reports as JSON.

    >>> loop_message(StopAsked(1, "loss is flat"))
    {'StopAsked': [1, 'loss is flat']}
    """
    return {type(event).__name__: list(event)}


def loop_event(message: Mapping[str, Any]) -> LoopEvent | None:
    """Return what a loop has reported, of its :func:`loop_message`; None: it is another message."""
    if "Logged" in message:
        return Logged(*message["Logged"])
    return StopAsked(*message["StopAsked"]) if "StopAsked" in message else None


# What happens in a run: a snapshot was scored, a replica died or left, a checkpoint is whole, a loop has reported.
RunEvent: TypeAlias = Record | ReplicaExit | Path | LoopEvent


@final
class Watcher:
    """Receives progress and events of a run in the process that the user started, and may ask it to end.

    ::

        engine --- watch(progress), watch.event(record) ---> display, callbacks
        engine <-- watch.stopped --------------------------- a callback's reason to end training

    Args:
        show: takes the newest progress.
        take: takes each event, in their order; what it raises ends the run.
        asked: returns the reason for which training is to end now; None: it goes on.
        heard: takes the name of the first signal that asks to end the run, at once and from another thread.
    """

    def __init__(
        self,
        show: Callable[[Progress], None] = lambda _: None,
        take: Callable[[RunEvent], None] = lambda _: None,
        asked: Callable[[], str | None] = lambda: None,
        heard: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._show, self._asked = show, asked
        self.heard = heard
        """Takes the first signal."""
        self.event = take
        """Takes an event."""

    def __call__(self, progress: Progress) -> None:
        """Take the newest progress."""
        self._show(progress)

    @property
    def stopped(self) -> str | None:
        """The reason for which training is to end; None: it goes on."""
        return self._asked()


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    state: Mapping[str, Tensor]
    """The trained parameters and buffers by full name, on the CPU."""
    model: nn.Module
    history: Sequence[Record]
    account: Account
    spans: Sequence[Span]


@declare(ENGINES)
class Engine(AbstractContextManager["Engine"], ABC):
    """Runs jobs, one at a time; may keep what is expensive to start (a fork server) until it is closed.

    An engine is added by one file, ``engine/<name>/engine.py``, with ``@register("<name>")`` over its class; a class
    that is registered anywhere else is found as soon as its module has been imported.
    """

    name: str
    features: frozenset[Feature] = frozenset()
    """What it supports beyond single-worker replicas that make one update together on CPUs."""
    joins: bool = False
    """Whether its replicas are processes that join by themselves."""

    @classmethod
    def from_address(cls, address: str | None) -> "Engine":
        """Open the engine of a name with ``address`` after its colon, ``ray:auto``; None if it has no colon.

        Raises:
            InputError: an address that the engine does not take, or what it needs is not installed.
        """
        if address is not None:
            raise unknown("engine", f"{cls.name}:{address}", ENGINES.names())
        return cls()

    @abstractmethod
    def refuse(self, job: Job) -> None:
        """Raise InputError where this machine can't run the job; what no machine can is in :mod:`paceline.support`."""

    def warming_up(self, strategy: Strategy) -> AbstractContextManager[None]:
        """Context manager: what a run under a strategy will need is begun, while its program is still looked at."""
        del strategy
        return nullcontext()

    @abstractmethod
    def run(self, job: Job, watch: Watcher) -> Outcome:
        """Run a job to its end. Ctrl-C ends it early, with ``account.interrupted`` set.

        So does ``watch.stopped``, as a budget that is spent, with ``account.stopped`` set. Records, departures and
        checkpoints are events of ``watch``; if ``job.live``, records are made while training goes on.
        """

    def close(self) -> None:
        """Release all that outlives a run."""

    def __exit__(self, *_: object) -> None:
        self.close()
