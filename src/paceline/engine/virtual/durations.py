"""How long everything takes in virtual time: sampled from given distributions, or from measurements of a step."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import NamedTuple, final

import numpy as np
from torch import nn

from paceline.clock.times import Times
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.engine.step_profile.forecast import Forecast, update_s
from paceline.engine.step_profile.replica_timing import virtual_span
from paceline.replica.flat_state import FlatState
from paceline.trace.spans import Action, Span

_TRIALS = 9
_SEED_TAG = int.from_bytes(b"seen")


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """The parts of one attempt, in seconds."""

    pull: Seconds
    compute: Seconds
    delay: Seconds
    push: Seconds

    def spans(self, replica: ReplicaId, step: int, waited_from: Seconds | None, at: Seconds) -> list[Span]:
        """Return the spans of an attempt that begins at ``at``, and of the wait before it."""
        parts: list[tuple[Action, Seconds]] = [
            ("pull", self.pull),
            ("compute", self.compute),
            ("delay", self.delay),
            ("push", self.push),
        ]
        spans = [] if waited_from is None else [virtual_span(replica, "wait", step, waited_from, at)]
        for action, seconds in parts:
            spans.append(virtual_span(replica, action, step, at, at + seconds))
            at += seconds
        return [span for span in spans if span.end_ns > span.start_ns]


class Durations(ABC):
    """Durations of all attempts and updates of a run."""

    measured_s: Seconds | None = None
    """Measured time of one micro-step; None: nothing was measured."""

    @abstractmethod
    def attempt(self, replica: ReplicaId, micro_steps: int) -> AttemptTimes:
        """Return the durations of a replica's next attempt."""

    @abstractmethod
    def update(self, gradients: int) -> Seconds:
        """Return how long the server takes for an update of so many gradients."""


class _Streams(NamedTuple):
    compute: Iterator[Seconds] | None
    transfer: Iterator[Seconds]
    delay: Iterator[Seconds]


@final
class SampledDurations(Durations):
    """Draws every duration of a run from seeded streams.

    Args:
        context: of the run.
        times: their distributions.
        measured_s: time of one micro-step, where compute is ``measured``.
        factor: time of a replica relative to that of one process.
    """

    def __init__(self, context: RunContext, times: Times, measured_s: Seconds | None, factor: float = 1.0) -> None:
        self._context, self._times = context, times
        seed = context.job.program.seed
        self._apply, self._gradient = times.apply_stream(seed), times.gradient_stream(seed)
        self._streams: dict[ReplicaId, _Streams] = {}
        self.measured_s, self._factor = measured_s, factor

    def attempt(self, replica: ReplicaId, micro_steps: int) -> AttemptTimes:
        streams = self._streams.get(replica)
        if streams is None:
            seed, times = self._context.job.program.seed, self._times
            streams = self._streams[replica] = _Streams(
                times.compute_stream(replica, seed),
                times.transfer_stream(replica, seed),
                _delays(self._context, replica),
            )
        compute = delay = 0.0
        for _ in range(micro_steps):
            alone = next(streams.compute) if streams.compute is not None else self.measured_s or 0.0
            compute += self._factor * alone
            delay += next(streams.delay)
        return AttemptTimes(next(streams.transfer), compute, delay, next(streams.transfer))

    def update(self, gradients: int) -> Seconds:
        return next(self._apply) + sum(next(self._gradient) for _ in range(gradients))


@final
class MeasuredDurations(Durations):
    """Draws the time to compute from measured passes; all else takes its median.

    Args:
        context: of the run.
        forecast: measurements of its step.
    """

    def __init__(self, context: RunContext, forecast: Forecast) -> None:
        self._context, self._forecast = context, forecast
        self.measured_s = median(forecast.compute_s)
        self._streams: dict[ReplicaId, tuple[np.random.Generator, Iterator[Seconds]]] = {}
        self._updates: dict[int, Seconds] = {}

    def attempt(self, replica: ReplicaId, micro_steps: int) -> AttemptTimes:
        if replica not in self._streams:
            rng = np.random.default_rng([self._context.job.program.seed, _SEED_TAG, replica])
            self._streams[replica] = rng, _delays(self._context, replica)
        (rng, delays), passes = self._streams[replica], self._forecast.compute_s
        compute = sum(passes[int(rng.integers(len(passes)))] for _ in range(micro_steps))
        delay = sum(next(delays) for _ in range(micro_steps))
        return AttemptTimes(self._forecast.pull_s, compute, delay, self._forecast.push_s)

    def update(self, gradients: int) -> Seconds:
        if gradients not in self._updates:
            self._updates[gradients] = update_s(self._context.job, gradients, self._forecast.steps_on)
        return self._updates[gradients]


def _delays(context: RunContext, replica: ReplicaId) -> Iterator[Seconds]:
    delay, seed = context.job.delay, context.job.program.seed
    stream = delay.stream(replica, context.replicas, seed) if delay else None
    return repeat(0.0) if stream is None else stream


def measure_micro_step(context: RunContext, module: nn.Module, state: FlatState) -> Seconds:
    """Return the real time of one micro-step: the median of 9 at A_0."""
    replica = context.replica(0, module, state.layout)
    batches, seconds = context.batches(0), []
    for clock in range(_TRIALS):
        replica.adopt(state)
        batch = next(batches)
        began = time.perf_counter()
        replica.advance(batch, clock)
        seconds.append(time.perf_counter() - began)
        replica.finish(state.layout.new())
    return median(seconds)
