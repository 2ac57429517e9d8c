"""How long everything takes in virtual time: sampled from given distributions, or from measurements of a step."""

from collections.abc import Iterator
from itertools import islice, repeat
from statistics import median
from typing import NamedTuple, final

import numpy as np

from paceline.clock.times import Times
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.engine.step_profile.compute import micro_step_s
from paceline.engine.step_profile.forecast import (
    Forecast,
    ReplicaTiming,
    forecast,
    replica_timing,
    update_s,
    virtual_span,
)
from paceline.trace.spans import Action, Span

_SEED_TAG = int.from_bytes(b"seen")


class AttemptTimes(NamedTuple):
    """The parts of one attempt, in seconds."""

    pull: Seconds
    compute: Seconds
    delay: Seconds
    push: Seconds

    def spans(self, replica: ReplicaId, step: int, waited_from: Seconds | None, at: Seconds) -> list[Span]:
        """Return the spans of an attempt that begins at ``at``, and of the wait before it."""
        actions: tuple[Action, ...] = ("pull", "compute", "delay", "push")  # in the order of the fields
        spans = [] if waited_from is None else [virtual_span(replica, "wait", step, waited_from, at)]
        for action, seconds in zip(actions, self, strict=True):
            spans.append(virtual_span(replica, action, step, at, at + seconds))
            at += seconds
        return [span for span in spans if span.end_ns > span.start_ns]


@final
class SampledDurations:
    """Draws every duration of a run from seeded streams.

    Args:
        context: of the run.
        times: their distributions.
        measured_s: time of one micro-step, where compute is ``measured``.
        factor: time of a replica relative to that of one process.
    """

    def __init__(self, context: RunContext, times: Times, measured_s: Seconds | None, factor: float = 1.0) -> None:
        seed, replicas = context.job.program.seed, range(context.replicas)
        self.measured_s, self._factor = measured_s, factor
        self._apply, self._gradient = times.stream("apply", seed), times.stream("gradient", seed)
        measured = repeat(measured_s or 0.0) if times.compute == "measured" else None
        self._compute = [measured or times.stream("compute", seed, replica) for replica in replicas]
        self._transfer = [times.stream("transfer", seed, replica) for replica in replicas]
        self._delay = _delays(context)

    def skip(self, replica: ReplicaId, attempts: int, micro_steps: int) -> None:
        """Draw those of a replica's attempts before a run was resumed."""
        _skip(self._transfer[replica], 2 * attempts)
        _skip(self._compute[replica], micro_steps)
        _skip(self._delay[replica], micro_steps)

    def skip_updates(self, updates: int, gradients: int) -> None:
        """Draw those of the updates before a run was resumed, of so many gradients together."""
        _skip(self._apply, updates)
        _skip(self._gradient, gradients)

    def attempt(self, replica: ReplicaId, micro_steps: int) -> AttemptTimes:
        """Return the durations of a replica's next attempt."""
        computing, delays, transfer = self._compute[replica], self._delay[replica], self._transfer[replica]
        compute = delay = 0.0
        for _ in range(micro_steps):
            compute += self._factor * next(computing)
            delay += next(delays)
        return AttemptTimes(next(transfer), compute, delay, next(transfer))

    def update(self, gradients: int) -> Seconds:
        """Return how long the server takes for an update of so many gradients."""
        return next(self._apply) + sum(next(self._gradient) for _ in range(gradients))


@final
class MeasuredDurations:
    """Draws the time to compute from measured passes; all else takes its median.

    Args:
        context: of the run.
        forecast: measurements of its step.
    """

    def __init__(self, context: RunContext, forecast: Forecast) -> None:
        self._job, self._forecast, self._delay = context.job, forecast, _delays(context)
        self.measured_s = median(forecast.compute_s)
        seed = context.job.program.seed
        self._rngs = [np.random.default_rng([seed, _SEED_TAG, replica]) for replica in range(context.replicas)]
        self._updates: dict[int, Seconds] = {}

    def skip(self, replica: ReplicaId, attempts: int, micro_steps: int) -> None:
        """Draw the delays of a replica's attempts before a run was resumed; passes were measured anew."""
        del attempts
        _skip(self._delay[replica], micro_steps)

    def skip_updates(self, updates: int, gradients: int) -> None:
        """Do nothing: updates all take the same time."""

    def attempt(self, replica: ReplicaId, micro_steps: int) -> AttemptTimes:
        """Return the durations of a replica's next attempt."""
        rng, delays, passes = self._rngs[replica], self._delay[replica], self._forecast.compute_s
        compute = sum(passes[int(rng.integers(len(passes)))] for _ in range(micro_steps))
        delay = sum(next(delays) for _ in range(micro_steps))
        return AttemptTimes(self._forecast.pull_s, compute, delay, self._forecast.push_s)

    def update(self, gradients: int) -> Seconds:
        """Return how long the server takes for an update of so many gradients."""
        if gradients not in self._updates:
            self._updates[gradients] = update_s(self._job, gradients, self._forecast.steps_on)
        return self._updates[gradients]


def durations_of(context: RunContext) -> tuple[ReplicaTiming, SampledDurations | MeasuredDurations]:
    """Return how long a replica's parts take, relative to one process, and where a run's durations come from.

    Raises:
        InputError: they are to be measured of parts that are compiled.
    """
    job = context.job
    times = job.times or Times()
    if times.compute == "measured" and job.strategy.spread and job.strategy.compile:
        raise InputError(
            f"times={str(times)!r} measures stages and shards as they are, but compile=True compiles them; write times "
            "in seconds, compute=0.01 for instance, or compile=false"
        )
    if times.all_measured:
        measured = forecast(job)
        return measured.replica_timing, MeasuredDurations(context, measured)
    compute_measured = times.compute == "measured"
    timing = replica_timing(job, measured=compute_measured)
    measured_s = micro_step_s(context) if compute_measured else None
    return timing, SampledDurations(context, times, measured_s, timing.factor)


def _skip(draws: Iterator[Seconds], count: int) -> None:
    if not isinstance(draws, repeat):
        next(islice(draws, count, count), None)


def _delays(context: RunContext) -> list[Iterator[Seconds]]:
    """Return the extra delays of each replica, without end."""
    delay, seed, replicas = context.job.delay, context.job.program.seed, context.replicas
    streams = [delay.stream(replica, replicas, seed) if delay else None for replica in range(replicas)]
    return [repeat(0.0) if stream is None else stream for stream in streams]
