"""The server's loop over one run: takes what replicas push, checks the budget, times out late replicas.

A Δ is taken as it comes, within the call that brings it; the loop itself wakes for evaluation points, the end of the
budget and late replicas::

    replica --- push ---> take --> RunLoop.arrived --> reply with A, or keep the replica waiting
    run()   --- every tick, or when woken ----------> evaluate, end the budget, check for hangs

::

    starting --> training --> scoring --> done
                        \\ ends early: the budget is spent, the condition met, Ctrl-C, a failure
"""

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from paceline.aggregation.base import Arrival
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.loop import TICK_S, RunLoop
from paceline.engine.ray.evaluation_actor import RayEvaluation
from paceline.engine.ray.executor import RayExecutor, ReplicaRecord
from paceline.engine.ray.messages import Bytes, Phase, RayCompletion, Result, arrays_of
from paceline.engine.run_context import RunContext, threads
from paceline.replica.flat_state import FlatState


class RunState:
    """Phase, first failure and clock of a run at the server, and the events that wake its loop and the driver."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.failure: PacelineError | None = None
        self.over = False
        """True once training is to end."""
        self.began: Nanoseconds = 0
        """When training began; 0: it has not."""
        self._wake, self._changed = asyncio.Event(), asyncio.Event()

    def start(self) -> None:
        """Start the clock of training."""
        self.began = time.monotonic_ns()

    def now(self) -> Seconds:
        """Return how long training has lasted."""
        return (time.monotonic_ns() - self.began) * 1e-9 if self.began else 0.0

    def guarded(self, act: Callable[[], Any]) -> None:
        """Call ``act``; an error ends the run, not one replica's call."""
        try:
            act()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it has failed before."""
        if not isinstance(error, PacelineError):
            text = "".join(traceback.format_exception(error))
            error = WorkerError(f"the server failed: {type(error).__name__}: {error}\n\n{text}")
        self.failure = self.failure or error
        self.give_over()

    def give_over(self) -> None:
        """End training with what there is."""
        self.over = True
        self.wake()
        self.notify()

    def pass_to(self, phase: Phase) -> None:
        """Begin the next phase."""
        self.phase = phase
        self.notify()

    def wake(self) -> None:
        """Wake the training loop."""
        self._wake.set()

    async def woken(self, timeout_s: Seconds) -> None:
        """Wait until the training loop is woken, or for the timeout."""
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return
        self._wake.clear()

    def notify(self) -> None:
        """Answer the driver that waits for a change."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait for a change, or a tick."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK_S)
        self._changed.clear()


START_S: Seconds = 60.0
"""How long an actor's process may take to start, on top of ``timeout_s``."""


class PeerActors(Protocol):
    """The other actors of a run, as the server calls them; only a record is waited for."""

    def cancel(self, replica: ReplicaId, attempt: Clock) -> None:
        """Cancel an attempt."""

    def end(self, replica: ReplicaId) -> None:
        """End a replica's training."""

    def score(self, info: SnapshotInfo, state: FlatState) -> Awaitable[Record | bytes]:
        """Return the record of a snapshot, or what the user's code raised; LostError if the evaluator has ended."""


class ServerLoop:
    """One run at the server.

    Args:
        job: what is run.
        replicas: records of its replicas.
        run: its phase and first failure.
        peers: the other actors.
    """

    def __init__(self, job: Job, replicas: Sequence[ReplicaRecord], run: RunState, peers: PeerActors) -> None:
        self._job, self._replicas, self._run, self._peers = job, replicas, run, peers
        context = RunContext(job)
        self._executor = RayExecutor(context, replicas, lambda: self._coordinator.version, peers.cancel)
        self._loop = RunLoop(context, self._executor, self._executor.state.digest(), self._evaluate)
        self._coordinator = self._loop.coordinator
        layout = self._executor.state.layout
        self._evaluation = RayEvaluation(job, peers.score, self._keep, run.fail, layout.nbytes)
        self._awaited: dict[ReplicaId, Seconds] = {}
        """Replicas that are started in the place of dead ones -> until when they have to be ready."""
        self._seconds: Seconds = 0.0

    # ------------------------------------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        """Train to the end of the budget, and wait for the records."""
        try:
            await self._train()
            self.finish()
            await self._evaluation.drain()
        except Exception as error:
            self._run.fail(error)
        self._run.pass_to("done")

    async def _train(self) -> None:
        run, loop, coordinator = self._run, self._loop, self._coordinator
        run.pass_to("training")
        loop.evaluate_if_due(0.0)
        run.start()
        if not run.over:
            coordinator.begin()
        for replica in [r for r, record in enumerate(self._replicas) if record.finished]:
            coordinator.left(replica, "done")
        while not run.over and (coordinator.present or self._awaited):
            now = run.now()
            wait_s = loop.tick(now)
            if wait_s is None:
                return
            self._check_late(now)
            await run.woken(wait_s)
        if all(record.dead for record in self._replicas) and not run.over:
            raise loop.all_died()

    def finish(self) -> None:
        """End training: no replica computes any more."""
        self._seconds = min(self._run.now(), self._loop.end_s)
        self._coordinator.finish()
        for replica, record in enumerate(self._replicas):
            record.dismiss()
            self._peers.end(replica)
        if self._run.failure is None:
            self._loop.evaluate_final(self._seconds)
        self._run.pass_to("scoring")

    def _check_late(self, now: Seconds) -> None:
        """Raise if a replacement does not start, no replica computes, or none pushes in time."""
        for replica, deadline in self._awaited.items():
            if now > deadline:
                raise WaitTimeoutError(
                    f"the server waited {START_S + self._job.timeout_s:g} s for an actor in the place of replica "
                    f"{replica}; write RayEngine(replace=False), or a larger timeout_s="
                )
        if self._coordinator.computing or not (self._awaited or self._coordinator.idle):
            replicas, queue = self._replicas, self._evaluation.queue
            self._loop.check_hang(
                now,
                "the server",
                excused_until=lambda r: replicas[r].excused_s,
                attempt=lambda r: replicas[r].attempt,
                busy=lambda: queue.full,  # replicas wait for the evaluator
            )

    # ----------------------------------------------------------------------------------------------- what replicas push

    async def room(self) -> None:
        """Wait until the queue has room for a further snapshot."""
        while self._evaluation.queue.full and not self._run.over:
            await self._evaluation.wait_for_room()

    def expects(self, report: RayCompletion) -> bool:
        """Return whether it belongs to an attempt under way."""
        replica = report.replica
        return replica in self._coordinator.present and report.attempt == self._replicas[replica].attempt

    def take(self, report: RayCompletion, arrays: Sequence[Bytes]) -> None:
        """Have the policy decide on a Δ; without arrays, the attempt was cancelled."""
        now, replica = self._run.now(), report.replica
        if arrays and not self._coordinator.voids(replica):
            observed = self._executor.take(replica, report.attempt, arrays, now)
            loss = report.loss if report.samples else None
            self._loop.arrived(
                Arrival(replica, report.version, report.attempt, report.samples, now, report.finite, loss, observed)
            )
        else:
            self._coordinator.cancelled(replica)
        self._loop.handled(self._run.now())  # an update may have taken time
        if self._coordinator.idle:
            self._run.wake()

    # ------------------------------------------------------------------------------------- replicas that join and leave

    def joined(self, replica: ReplicaId) -> None:
        """Note that a replica is ready; one that replaces another joins the run."""
        if self._awaited.pop(replica, None) is not None and self._run.phase == "training":
            self._coordinator.joined(replica)

    def done(self, replica: ReplicaId) -> None:
        """Note that a replica's loop has ended."""
        if self._run.phase == "training":
            self._coordinator.left(replica, "done")

    def lost(self, replica: ReplicaId, reason: str, *, replaced: bool) -> bool | None:
        """Note that a replica has died; return whether to start another in its place, None if it was not needed."""
        if self._run.phase != "training" or replica not in self._coordinator.present | self._awaited.keys():
            return None
        now = self._run.now()
        self._loop.exits.append(ReplicaExit(replica, reason, now))
        # One that died before it was ready is not tried again.
        again = self._awaited.pop(replica, None) is None and replaced
        if again:
            self._awaited[replica] = now + START_S + self._job.timeout_s
        self._replicas[replica].lost()
        self._run.guarded(lambda: self._coordinator.left(replica, "died"))
        return again

    # ------------------------------------------------------------------------------------------------ state and results

    def progress(self) -> Progress:
        """Return the state of the run, once it has begun."""
        phase = self._run.phase
        return self._loop.history.progress("training" if phase == "training" else "scoring", self._run.now())

    def result(self, late: Sequence[ReplicaId], *, interrupted: bool) -> Result:
        """Return the result of the run; the replicas ``late`` did not end in time."""
        self._loop.ended_late(late, self._run.now())
        history, state = self._loop.history, self._executor.state
        size = state.layout.parameter_bytes
        workers = [record.figures_at(r, size, self._seconds) for r, record in enumerate(self._replicas)]
        notes: dict[str, str | int | float] = {"threads": threads(self._job)}
        account = history.account(self._seconds, workers, self._loop.exits, notes, interrupted=interrupted)
        records = sorted(history.records, key=lambda record: record.time_s)
        return Result(arrays_of(state), records, account, self._executor.spans.read(), self._run.began)

    def break_off(self) -> None:
        """Drop what is not evaluated."""
        self._evaluation.close()

    def close(self) -> None:
        """Release the executor's resources."""
        self._executor.close()

    def _evaluate(self, now: Seconds) -> None:
        self._evaluation.hand_in(self._executor.state, self._loop.history.snapshot(now))

    def _keep(self, records: list[Record]) -> None:
        self._loop.keep(records)
        if self._loop.condition_met:
            self._run.give_over()
