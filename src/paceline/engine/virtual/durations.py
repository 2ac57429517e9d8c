"""How long everything takes in virtual time."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import final

from torch import nn

from paceline.clock.times import Times
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.replica.flat_state import FlatState
from paceline.trace.spans import Action, Span

_TRIALS = 9


@dataclass(frozen=True, slots=True)
class Drawn:
    """The parts of one attempt, in seconds."""

    pull: Seconds
    compute: Seconds
    delay: Seconds
    push: Seconds

    @property
    def busy(self) -> Seconds:
        """What the replica itself is at work on, or slowed by."""
        return self.compute + self.delay

    @property
    def total(self) -> Seconds:
        return self.pull + self.compute + self.delay + self.push


class Durations(ABC):
    """Of all attempts and updates of a run."""

    measured_s: Seconds | None = None
    """What computing one micro-step was measured to take, where it was."""

    @abstractmethod
    def draw(self, replica: ReplicaId, micro_steps: int) -> Drawn:
        """The durations of a replica's next attempt."""

    @abstractmethod
    def update(self, gradients: int) -> Seconds:
        """How long the server takes for an update of so many gradients."""


@final
class SampledDurations(Durations):
    """Draws every duration of a run from seeded streams.

    Args:
        setup: of the run.
        times: as asked for.
        measured_s: what one micro-step really takes, where compute is ``measured``.
        factor: what a replica takes, of the time of one process.
    """

    def __init__(self, setup: RunContext, times: Times, measured_s: Seconds | None, factor: float = 1.0) -> None:
        self._seed, self._times, self._delay = setup.job.program.seed, times, setup.job.delay
        self._replicas = setup.replicas
        self._apply, self._gradient = times.apply_stream(self._seed), times.gradient_stream(self._seed)
        self._streams: dict[ReplicaId, _Streams] = {}
        self.measured_s, self._factor = measured_s, factor

    def draw(self, replica: ReplicaId, micro_steps: int) -> Drawn:
        streams = self._streams.get(replica)
        if streams is None:
            streams = self._streams[replica] = self._open(replica)
        compute = delay = 0.0
        for _ in range(micro_steps):
            alone = next(streams.compute) if streams.compute is not None else self.measured_s or 0.0
            compute += self._factor * alone
            delay += next(streams.delay) if streams.delay is not None else 0.0
        return Drawn(next(streams.transfer), compute, delay, next(streams.transfer))

    def update(self, gradients: int) -> Seconds:
        return next(self._apply) + sum(next(self._gradient) for _ in range(gradients))

    def _open(self, replica: ReplicaId) -> "_Streams":
        delay = self._delay.stream(replica, self._replicas, self._seed) if self._delay else None
        return _Streams(
            self._times.compute_stream(replica, self._seed), self._times.transfer_stream(replica, self._seed), delay
        )


@dataclass(frozen=True, slots=True)
class _Streams:
    compute: Iterator[Seconds] | None
    transfer: Iterator[Seconds]
    delay: Iterator[Seconds] | None


def measure(setup: RunContext, module: nn.Module, state: FlatState) -> Seconds:
    """Seconds of real time that one micro-step takes: the median of 9 at A_0."""
    replica = setup.replica(0, module, state.layout)
    batches, taken = setup.batches(0), []
    for clock in range(_TRIALS):
        replica.adopt(state)
        batch = next(batches)
        began = time.perf_counter()
        replica.advance(batch, clock)
        taken.append(time.perf_counter() - began)
        replica.finish(state.layout.new())
    return median(taken)


def lane(replica: ReplicaId, step: int, waited_from: Seconds | None, at: Seconds, drawn: Drawn) -> list[Span]:
    """The spans of one attempt that begins at ``at``, and of the wait before it."""
    parts: list[tuple[Action, Seconds]] = [
        ("pull", drawn.pull),
        ("compute", drawn.compute),
        ("delay", drawn.delay),
        ("push", drawn.push),
    ]
    spans = [] if waited_from is None else [span(replica, "wait", step, waited_from, at)]
    for action, seconds in parts:
        spans.append(span(replica, action, step, at, at + seconds))
        at += seconds
    return [s for s in spans if s.end_ns > s.start_ns]


def span(replica: ReplicaId, action: Action, step: int, start_s: Seconds, end_s: Seconds) -> Span:
    """A span of virtual time; nanoseconds since the start of the run."""
    return Span(replica, 0, 0, action, step, 0, round(start_s * 1e9), round(end_s * 1e9), 0)
