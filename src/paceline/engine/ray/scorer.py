"""The actor that scores snapshots, off the training path."""

import contextlib
import os
from collections.abc import Sequence

import torch

from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.failure import SCORER, failure
from paceline.engine.ray.freight import Bytes, state_of, unpack
from paceline.engine.ray.messages import Place
from paceline.engine.ray.replica import place
from paceline.engine.scoring import Moment, Scorer
from paceline.replica.state import Layout


class ScorerActor:
    """Scores the snapshots of one run after the other.

    Args:
        patient: use only idle cores; not where runs wait for a score.
    """

    def __init__(self, patient: bool) -> None:
        torch.set_num_threads(1)
        if patient:
            # Only cycles that nobody else wants, so that scoring never bends the timing of the replicas.
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._job: Job | None = None
        self._scorer: tuple[Layout, Scorer] | None = None

    def place(self) -> Place:
        """Where it lives."""
        return place()

    def open(self, parts: Sequence[Bytes]) -> None:
        """A run begins."""
        self._job, self._scorer = unpack(parts), None

    def close(self) -> None:
        """It has ended."""
        self._job = self._scorer = None

    def score(self, moment: Moment, *arrays: Bytes) -> Record | bytes:
        """The record of one snapshot, or what the user's code raised."""
        assert self._job is not None, "no run is open"
        try:
            if self._scorer is None:
                module = self._job.program.build()
                self._scorer = Layout.of(module, self._job.running_buffers), Scorer(self._job.program, module)
            layout, scorer = self._scorer
            return scorer.score(state_of(layout, arrays), moment)
        except BaseException as error:
            return failure(SCORER, error)
