"""Where snapshots of A are scored, off the training path: after training, each rank a share of them.

A is one on all ranks, so snapshot k is copied and scored by rank k mod P alone. Where a score may end the run
(``until=``), training stops for it, its clock too, and rank 0 tells the others.
"""

from collections import deque
from collections.abc import Callable
from functools import cached_property

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.distributed.update import Update
from paceline.engine.evaluation import Evaluator, SnapshotInfo, room
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.flat_state import FlatState
from paceline.replica.module_utils import materialize


class RankEvaluation:
    """One rank's.

    Args:
        job: of the run.
        context: who shares the work.
        nbytes: of one snapshot.
    """

    def __init__(self, job: Job, context: RankContext, nbytes: int) -> None:
        self._job, self._context, self._world = job, context, context.world
        self._queue: deque[tuple[SnapshotInfo, FlatState]] = deque()
        self._records: list[Record] = []
        self._room = room(nbytes * context.world.local_size)
        self._given = 0

    def hand_in(self, update: Update, moment: SnapshotInfo) -> None:
        """Have A scored after training; where no memory is left for a copy, another is scored now."""
        mine = self._given % self._world.size == self._world.rank
        self._given += 1
        if mine:
            while len(self._queue) >= self._room:
                self._score_next()
        state = update.full_state(wanted=mine)
        if state is not None:
            self._queue.append((moment, state))

    def score_now(self, update: Update, moment: SnapshotInfo) -> Record:
        """The record of A, on all ranks."""
        state = update.full_state(wanted=self._world.rank == 0)
        mine = self._scorer.score(state, moment) if state is not None else None
        record: Record = self._context.gather(mine, "a score")[0]
        return record

    def score_rest(self, given_up: Callable[[], bool]) -> list[Record]:
        """Score this rank's share, unless that is given up; its records."""
        while self._queue and not given_up():
            self._score_next()
        self._queue.clear()
        return self._records

    def _score_next(self) -> None:
        moment, state = self._queue.popleft()
        self._records.append(self._scorer.score(state, moment))

    @cached_property
    def _scorer(self) -> Evaluator:
        return Evaluator(self._job.program, materialize(self._job.program, SpillAllocator()))
