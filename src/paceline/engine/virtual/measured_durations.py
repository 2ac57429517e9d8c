"""How long everything takes in virtual time where all of it was measured."""

from collections.abc import Iterator
from statistics import median
from typing import final

import numpy as np

from paceline.core.types import ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.engine.step_profile.predict import Forecast, update_s
from paceline.engine.virtual.durations import Drawn, Durations

_DRAWS = int.from_bytes(b"seen")


@final
class MeasuredDurations(Durations):
    """Draws what computing takes from what was measured; what else there is takes its median.

    Args:
        setup: of the run.
        forecast: of its job.
    """

    def __init__(self, setup: RunContext, forecast: Forecast) -> None:
        self._setup, self._forecast = setup, forecast
        self.measured_s = median(forecast.compute_s)
        self._streams: dict[ReplicaId, Iterator[tuple[Seconds, Seconds]]] = {}
        self._updates: dict[int, Seconds] = {}

    def draw(self, replica: ReplicaId, micro_steps: int) -> Drawn:
        stream = self._streams.setdefault(replica, self._stream(replica))
        computes, delays = zip(*(next(stream) for _ in range(micro_steps)), strict=True)
        return Drawn(self._forecast.pull_s, sum(computes), sum(delays), self._forecast.push_s)

    def update(self, gradients: int) -> Seconds:
        if gradients not in self._updates:
            self._updates[gradients] = update_s(self._setup.job, gradients, self._forecast.steps_on)
        return self._updates[gradients]

    def _stream(self, replica: ReplicaId) -> Iterator[tuple[Seconds, Seconds]]:
        """Of each micro-step: computing, and being slowed."""
        seed, delay = self._setup.job.program.seed, self._setup.job.delay
        rng, found = np.random.default_rng([seed, _DRAWS, replica]), self._forecast.compute_s
        slowed = delay.stream(replica, self._setup.replicas, seed) if delay else None
        while True:
            yield found[int(rng.integers(len(found)))], next(slowed) if slowed is not None else 0.0
