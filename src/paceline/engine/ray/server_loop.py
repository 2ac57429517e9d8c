"""The server's loop over one run: takes what replicas push, checks the budget, times out late replicas.

The training loop at the server: it takes what replicas push, looks at the clock, and misses those who are late.

A Δ is taken as it comes, within the call that brings it; the loop itself wakes for what is due and for what is amiss.
"""

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from paceline.aggregation.base import Arrival
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.records import Account, Record, ReplicaExit
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.coordinator import Coordinator
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.ray.evaluation import RayEvaluationQueue
from paceline.engine.ray.executor import RayExecutor, ReplicaRecord
from paceline.engine.ray.messages import Bytes, Phase, RayCompletion, Result, arrays_of
from paceline.engine.remote_errors import not_finite
from paceline.engine.run_context import RunContext, threads
from paceline.engine.run_history import RunHistory
from paceline.replica.flat_state import FlatState

TICK_S: Seconds = 0.2
"""How often the driver is told how things stand, and how often the server looks who is late."""


class RunState:
    """One run's."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.failure: PacelineError | None = None
        self.over = False
        """Whether training is to end."""
        self.began: Nanoseconds = 0
        """When training did; 0: it has not."""
        self._news, self._told = asyncio.Event(), asyncio.Event()

    def start(self) -> None:
        """From now on time counts."""
        self.began = time.monotonic_ns()

    def now(self) -> Seconds:
        """How long training has lasted."""
        return (time.monotonic_ns() - self.began) * 1e-9 if self.began else 0.0

    # ----------------------------------------------------------------------------------------------------- what happens

    def guarded(self, act: Callable[[], Any]) -> None:
        """What fails here ends the run, not one replica's call."""
        try:
            act()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The first failure wins."""
        if not isinstance(error, PacelineError):
            text = "".join(traceback.format_exception(error))
            error = WorkerError(f"the server failed: {type(error).__name__}: {error}\n\n{text}")
        self.failure = self.failure or error
        self.give_over()

    def give_over(self) -> None:
        """Training is to end with what there is."""
        self.over = True
        self.stir()
        self.tell()

    def pass_to(self, phase: Phase) -> None:
        """The next phase has come."""
        self.phase = phase
        self.tell()

    # ----------------------------------------------------------------------------------------------------- who is woken

    def stir(self) -> None:
        """Wake the training loop."""
        self._news.set()

    async def stirred(self, timeout_s: Seconds) -> None:
        """Wait for that, or so long."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return
        self._news.clear()

    def tell(self) -> None:
        """Answer the driver that asked how things stand."""
        self._told.set()

    async def changed(self) -> None:
        """Wait for that, or a tick."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), TICK_S)
        self._told.clear()


START_S: Seconds = 60.0
"""How long an actor's process may take to start, on top of ``timeout_s``."""


class PeerActors(Protocol):
    """The other actors of a run, as the server reaches them; nothing is waited for but a score."""

    def cancel(self, replica: ReplicaId, attempt: Clock) -> None:
        """Call an attempt off."""

    def end(self, replica: ReplicaId) -> None:
        """Training has ended."""

    def score(self, moment: SnapshotInfo, state: FlatState) -> Awaitable[Record | bytes]:
        """The record of a snapshot, or what the user's code raised; raises LostError where there is no scorer."""


class ServerLoop:
    """One run's.

    Args:
        job: what is run.
        lanes: its replicas.
        course: how it stands.
        mates: the other actors.
    """

    def __init__(self, job: Job, lanes: Sequence[ReplicaRecord], course: RunState, mates: PeerActors) -> None:
        self._job, self._lanes, self._course, self._mates = job, lanes, course, mates
        self._setup = setup = RunContext.of(job)
        self._hands = RayExecutor(setup, lanes, lambda: self._coordinator.version, mates.cancel)
        self._coordinator = Coordinator(setup.policy, setup.replicas, setup.allowance(), self._hands)
        self._chronicle = RunHistory(setup, self._coordinator, self._hands.state.digest())
        self._desk = RayEvaluationQueue(job, mates.score, self._keep, course.fail, self._hands.state.layout.nbytes)
        self._left: list[ReplicaExit] = []
        self._awaited: dict[ReplicaId, Seconds] = {}
        """Those that take the place of dead ones, and until when they have to be there."""
        budget = job.budget
        self._timed = budget.unit == "seconds"
        self._end = budget.amount if self._timed and budget.amount is not None else math.inf
        self._heard_s: Seconds = 0.0
        self._seconds: Seconds = 0.0

    # ---------------------------------------------------------------------------------------------------- from the loop

    async def run(self) -> None:
        """To the end, scores included."""
        try:
            await self._until_over()
            self.finish()
            await self._desk.drained()
        except Exception as error:
            self._course.fail(error)
        self._course.pass_to("done")

    def finish(self) -> None:
        """Nobody computes any more."""
        self._seconds = min(self._course.now(), self._end)
        self._coordinator.finish()
        for replica, lane in enumerate(self._lanes):
            lane.dismiss()
            self._mates.end(replica)
        if self._course.failure is None and (self._timed or self._chronicle.moved_on):
            self._hand_in(self._seconds)
        self._course.pass_to("scoring")

    async def _until_over(self) -> None:
        course, points = self._course, self._chronicle.points
        self._begin()
        while not course.over and (self._coordinator.present or self._awaited):
            now = course.now()
            if now >= self._end:
                return
            if points.next < self._end * (1 - 1e-9):
                self._look(now)
            self._miss_nobody(now)
            due = points.next if self._timed else math.inf
            await course.stirred(max(0.0, min(due, self._end, now + TICK_S) - now))
        if all(lane.dead for lane in self._lanes) and not course.over:
            raise WorkerError(f"every replica died: {'; '.join(f'{d.replica} {d.reason}' for d in self._left)}")

    def _begin(self) -> None:
        self._course.pass_to("training")
        self._look(0.0)
        self._course.start()
        if not self._course.over:
            self._coordinator.begin()
        for replica in [r for r, lane in enumerate(self._lanes) if lane.finished]:
            self._coordinator.left(replica, "done")

    def _miss_nobody(self, now: Seconds) -> None:
        """A hang is a failure: somebody must be at work, and push within the time that is allowed."""
        for replica, deadline in self._awaited.items():
            if now > deadline:
                raise WaitTimeoutError(
                    f"the server waited {START_S + self._job.timeout_s:g} s for an actor in the place of replica "
                    f"{replica}; write RayEngine(replace=False), or a larger timeout_s="
                )
        at_work = sorted(self._coordinator.computing)
        if at_work:
            self._miss(at_work, now)
        elif self._coordinator.present and not self._awaited:
            raise self._coordinator.deadlock()

    def _miss(self, at_work: Sequence[ReplicaId], now: Seconds) -> None:
        excused_s = max(self._lanes[r].excused_s for r in at_work)
        if now - max(self._heard_s, excused_s) > self._job.timeout_s and not self._desk.full:
            waiting = [f"replica {r}" for r in self._coordinator.waiting]
            late = ", ".join(f"replica {r} at its step {self._lanes[r].attempt}" for r in at_work)
            raise WaitTimeoutError(
                f"{', '.join(['the server', *waiting])} waited {self._job.timeout_s:g} s for {late}, and heard "
                "nothing; write a larger timeout_s= if a step takes so long"
            )

    # ----------------------------------------------------------------------------------------------- what replicas push

    async def room(self) -> None:
        """Wait until the scorer has room for a further snapshot."""
        while self._desk.full and not self._course.over:
            await self._desk.one_less()

    def expects(self, report: RayCompletion) -> bool:
        """Whether it tells of an attempt that is under way."""
        replica = report.replica
        return replica in self._coordinator.present and report.attempt == self._lanes[replica].attempt

    def take(self, report: RayCompletion, arrays: Sequence[Bytes]) -> None:
        """Have F decide on a Δ; without one, the attempt was called off."""
        now = self._course.now()
        if arrays and not self._coordinator.voids(report.replica):
            self._arrived(report, arrays, now)
        else:
            self._coordinator.cancelled(report.replica)
        self._heard_s = self._course.now()
        if not self._timed:
            self._look(self._heard_s)
        if not self._coordinator.present:
            self._course.stir()

    def _arrived(self, report: RayCompletion, arrays: Sequence[Bytes], now: Seconds) -> None:
        replica, clock, samples = report.replica, report.attempt, report.samples
        if not report.finite and self._job.on_nonfinite == "stop":
            raise not_finite(report.loss, replica, clock)
        self._chronicle.heard(report.loss, samples)
        observed = self._hands.take(replica, clock, arrays, now)
        loss = report.loss if samples else None
        self._coordinator.arrived(Arrival(replica, report.version, clock, samples, now, report.finite, loss, observed))

    # ------------------------------------------------------------------------------------------- who comes and who goes

    def joined(self, replica: ReplicaId) -> None:
        """A replica is there; where it takes another's place, F lets it in."""
        if self._awaited.pop(replica, None) is not None and self._course.phase == "training":
            self._coordinator.joined(replica)

    def done(self, replica: ReplicaId) -> None:
        """A replica's loop has ended."""
        if self._course.phase == "training":
            self._coordinator.left(replica, "done")

    def lost(self, replica: ReplicaId, reason: str, *, replaced: bool) -> bool | None:
        """A replica has died; whether another is awaited in its place, or None: nobody misses it."""
        if self._course.phase != "training" or replica not in self._coordinator.present | self._awaited.keys():
            return None
        now = self._course.now()
        self._left.append(ReplicaExit(replica, reason, now))
        # One that died before it was there is not tried again.
        again = self._awaited.pop(replica, None) is None and replaced
        if again:
            self._awaited[replica] = now + START_S + self._job.timeout_s
        self._lanes[replica].lost()
        self._course.guarded(lambda: self._coordinator.left(replica, "died"))
        return again

    # ----------------------------------------------------------------------------------------------- what is told of it

    def progress(self) -> Progress:
        """How it stands, once it has begun."""
        phase = self._course.phase
        return self._chronicle.progress("training" if phase == "training" else "scoring", self._course.now())

    def result(self, late: Sequence[ReplicaId], *, interrupted: bool) -> Result:
        """What it has come to; ``late`` did not end in time."""
        reason = f"did not end within {self._job.timeout_s:g} s; killed"
        left = [*self._left, *(ReplicaExit(r, reason, self._course.now()) for r in late)]
        history = sorted(self._chronicle.history, key=lambda record: record.time_s)
        account, state, spans = self._account(left, interrupted=interrupted), self._hands.state, self._hands.spans()
        return Result(arrays_of(state), history, account, spans, self._course.began)

    def break_off(self) -> None:
        """Leave what is not scored."""
        self._desk.close()

    def close(self) -> None:
        """Let go of everything."""
        self._hands.close()

    def _account(self, left: Sequence[ReplicaExit], *, interrupted: bool) -> Account:
        size = self._hands.state.layout.parameter_bytes
        workers = [lane.told(r, size, self._seconds) for r, lane in enumerate(self._lanes)]
        notes: dict[str, str | int | float] = {"threads": threads(self._job)}
        return self._chronicle.account(self._seconds, workers, left, notes, interrupted=interrupted)

    def _look(self, now: Seconds) -> None:
        if self._chronicle.point_reached(now):
            self._hand_in(now)

    def _hand_in(self, now: Seconds) -> None:
        self._desk.hand_in(self._hands.state, self._chronicle.moment(now))

    def _keep(self, record: Record) -> None:
        if self._chronicle.record(record):
            self._course.give_over()
