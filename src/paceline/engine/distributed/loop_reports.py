"""What the loops of all ranks report, on its way to the process that the user started.

::

    torchrun    first rank <--- store --- other ranks: once a tick, as it exchanges
    launcher    main <--------- socket -- all ranks
"""

import json
import math
import time
from typing import final

from paceline.core.types import Seconds
from paceline.engine.base import Job, LoopEvent, Watcher, loop_event, loop_message
from paceline.engine.loop import TICK_S
from paceline.engine.spmd.rank_context import RankContext


@final
class LoopReports:
    """One rank's end.

    Args:
        job: of the run.
        context: of this rank.
        watch: takes the reports, on the first rank, or sends them to main.
        by_store: whether other ranks leave theirs in the job's store.
    """

    def __init__(self, job: Job, context: RankContext, watch: Watcher, *, by_store: bool) -> None:
        self._context, self._watch = context, watch
        self._signals = context.store_signals if by_store and job.loop is not None else None
        self._collected_s: Seconds = -math.inf

    def report(self, event: LoopEvent) -> None:
        """Take what this rank's loop reports."""
        if self._signals is None or self._context.is_first:
            self._watch.event(event)
        else:
            self._signals.report(json.dumps(loop_message(event)))

    def collect(self, *, at_once: bool = False) -> None:
        """Take what other ranks have reported, if this is the first; once in TICK_S unless it is to be ``at_once``."""
        now = time.monotonic()
        if self._signals is None or not self._context.is_first or (now - self._collected_s < TICK_S and not at_once):
            return
        self._collected_s = now
        for text in self._signals.reports():
            if (event := loop_event(json.loads(text))) is not None:
                self._watch.event(event)
