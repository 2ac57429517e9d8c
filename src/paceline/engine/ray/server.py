"""The server's actor, and the run that it serves: takes what replicas push, checks the budget, times out late replicas.

::

    replica   first .................. push ............................ push
    server    begin: answer with A_0   decide; answer with A once released    ...    answer: training has ended

A call of a replica is answered when F releases that replica. A Δ is taken as it comes, within the call that brings it;
the loop itself wakes for evaluation points, the end of the budget and late replicas::

    replica --- push --> RunLoop.arrived -----------> reply with A, or keep the replica waiting
    _train()  --- every tick, or when woken --------> evaluate, end the budget, check for hangs

    starting --> training --> scoring --> done
                        \\ ends early: the budget is spent, the condition met, Ctrl-C, a failure

The server saves the run: its process holds A, the optimizer and the Δs that wait, and begins each save within the call
that brings a Δ, so that no other event comes between. At the end of training it does nothing else until all is written.
"""

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.aggregation.base import Arrival
from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.mesh import Coordinate
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.loop import TICK_S, RunLoop
from paceline.engine.ray import messages
from paceline.engine.ray.evaluation_actor import RayEvaluation
from paceline.engine.ray.executor import RayExecutor, ReplicaRecord
from paceline.engine.run_context import RunContext, threads
from paceline.engine.worker_metrics import Figures, worker_figures

# How long an actor's process may take to start, on top of timeout_s.
START_S: Seconds = 60.0


class RunState:
    """Phase, first failure and clock of a run at the server, and the events that wake its loop and the driver.

    Args:
        start_s: training time before the run was resumed.
    """

    def __init__(self, start_s: Seconds) -> None:
        self._start_s = start_s
        self.phase: messages.Phase = "starting"
        self.failure: PacelineError | None = None
        self.sound = True
        """False once A or the counts may be wrong: what failed was no replica."""
        self.over = False
        """True once training is to end."""
        self.began: Nanoseconds = 0
        """When training would have begun without a break; 0: it has not."""
        self.wake, self.changed = asyncio.Event(), asyncio.Event()
        """Set to wake the training loop; to answer the driver that waits for a change."""

    def now(self) -> Seconds:
        """Return how long training has lasted."""
        return (time.monotonic_ns() - self.began) * 1e-9 if self.began else self._start_s

    def begin(self) -> None:
        """Start the clock."""
        self.began = time.monotonic_ns() - int(self._start_s * 1e9)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager: an error inside ends the run, not one replica's call."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it has failed before."""
        self.sound &= isinstance(error, WorkerError)
        if not isinstance(error, PacelineError):
            text = "".join(traceback.format_exception(error))
            error = WorkerError(f"the server failed: {type(error).__name__}: {error}\n\n{text}")
        self.failure = self.failure or error
        self.give_over()

    def give_over(self) -> None:
        """End training with what there is."""
        self.over = True
        self.wake.set()
        self.changed.set()

    def pass_to(self, phase: messages.Phase) -> None:
        """Begin the next phase."""
        self.phase = phase
        self.changed.set()


async def wait_for(event: asyncio.Event, timeout_s: Seconds) -> None:
    """Wait until an event is set, or for the timeout; then clear it: the caller looks at what has changed."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    event.clear()


class ServerRun:
    """One run at the server, as replicas and the driver call it.

    Args:
        job: what is run.
        number: of the run.
        replicas: actors of its replicas; fewer where Ctrl-C came while they started.
        scorer: the evaluator's actor.
    """

    def __init__(self, job: Job, number: int, replicas: Sequence[Any], scorer: Any) -> None:
        self._job, context = job, RunContext(job)
        actors = [*replicas, *[None] * (context.replicas - len(replicas))]
        pairs = zip(actors, context.positions, strict=True)
        self._replicas = [ReplicaRecord(number, actor, position.attempt) for actor, position in pairs]
        self._executor = RayExecutor(context, self._replicas)
        state = self._executor.owner.state
        self._loop = RunLoop(context, self._executor, state.digest(), self._evaluate, parks=job.on_death != "stop")
        self._coordinator, self._run = self._loop.coordinator, RunState(self._loop.start_s)
        self._sentences: list[str] = []
        """All that the user was to be told."""
        self._checkpointer = Checkpointer(context, self._loop, self._snapshot, say=self._sentences.append)
        self._evaluation = RayEvaluation(job, scorer, self._keep, self._run.fail, state.layout.nbytes)
        self._awaited: dict[ReplicaId, Seconds] = {}
        """Replicas that are started in the place of dead ones -> until when they have to be ready."""
        self._end_saved = False
        self._seconds = self._loop.start_s
        self._task: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------- calls of replicas

    async def ready(self, replica: ReplicaId) -> None:
        """Note that a replica has built its model; one that replaces another joins the run."""
        record = self._replicas[replica]
        record.ready, record.dead = True, False
        if self._awaited.pop(replica, None) is not None and self._run.phase == "training":
            with self._run.guarded():
                self._coordinator.joined(replica)
        self._run.changed.set()

    async def first(self, replica: ReplicaId) -> messages.Reply:
        """Return the first grant of a replica, once there is one."""
        return await self._replicas[replica].wait()

    async def push(self, completion: messages.RayCompletion, *arrays: messages.Bytes) -> messages.Reply:
        """Take a Δ, or without arrays the end of a cancelled attempt; return the next grant, once there is one."""
        run, coordinator, executor, replica = self._run, self._coordinator, self._executor, completion.replica
        while self._evaluation.queue.full and not run.over:
            self._evaluation.evaluated.clear()
            await self._evaluation.evaluated.wait()
        record = self._replicas[replica]
        if replica not in coordinator.present or completion.attempt != record.attempt:
            return messages.END
        # The future comes first: the decision on this Δ may reply to it at once.
        reply = record.wait()
        record.measured(completion.figures)
        with run.guarded():
            _, attempt, version, samples, finite, loss, _ = completion
            if arrays and replica not in coordinator.cancelling:
                now = run.now()
                delta = messages.state_of(executor.owner.state.layout, arrays)
                executor.undecided[replica, attempt] = delta
                observed = executor.statistics.observe(delta, now)
                mean = loss if samples else None
                self._loop.arrived(Arrival(replica, version, attempt, samples, now, finite, mean, observed))
            else:
                coordinator.cancelled(replica)
            self._loop.handled(run.now())  # an update may have taken time
            self._save_if_due()
            if not coordinator.present:
                run.wake.set()
        return await reply

    async def excuse(self, replica: ReplicaId, seconds: Seconds) -> None:
        """Note a delay that the job asked for: the replica pushes nothing meanwhile."""
        self._replicas[replica].excused_s = self._run.now() + seconds

    async def done(self, replica: ReplicaId, figures: Figures, step_times: Sequence[Seconds]) -> None:
        """Note that a replica's loop has ended."""
        record = self._replicas[replica]
        record.measured(figures)
        record.step_times = [*step_times]
        if self._run.phase == "training":
            with self._run.guarded():
                self._coordinator.left(replica, "done")
        record.finished = True
        self._run.wake.set()

    async def clock(self) -> Nanoseconds:
        """Return the time of this host's clock."""
        return time.monotonic_ns()

    # --------------------------------------------------------------------------------------------- calls of the driver

    async def begin(self) -> None:
        """Begin training, once all replicas are ready."""
        self._task = asyncio.ensure_future(self._train())

    async def interrupt(self) -> None:
        """End training with what there is."""
        self._run.give_over()
        if self._task is None:
            await self.begin()

    async def lost(self, replica: ReplicaId, reason: str, replaced: bool) -> tuple[Clock, int] | None:
        """Note that a replica has died; return its attempts and micro-steps where another is to replace it."""
        run, record = self._run, self._replicas[replica]
        run.wake.set()
        if run.phase != "training" or replica not in self._coordinator.present | self._awaited.keys():
            return None
        now = run.now()
        self._loop.exits.append(ReplicaExit(replica, reason, now))
        # One that died before it was ready is not tried again.
        again = self._awaited.pop(replica, None) is None and replaced
        if again:
            self._awaited[replica] = now + START_S + self._job.timeout_s
        record.lost()
        with run.guarded():
            self._coordinator.left(replica, "died")
        return (record.attempt, record.micro_steps) if again else None

    async def replaced(self, replica: ReplicaId, actor: Any) -> None:
        """Call this actor from now on in place of one that has died."""
        self._replicas[replica].actor = actor

    async def stand(self, known: int) -> messages.RunStatus:
        """Return the state of the run, at its next change or after a tick; main knows so many sentences."""
        run = self._run
        await wait_for(run.changed, TICK_S)
        waiting = tuple(r for r, record in enumerate(self._replicas) if not record.ready)
        if run.phase == "starting":
            progress = Progress("starting", 1 - len(waiting) / len(self._replicas))
        else:
            progress = self._loop.history.progress("training" if run.phase == "training" else "scoring", run.now())
        return messages.RunStatus(run.phase, progress, run.failure, waiting, tuple(self._sentences[known:]))

    async def save_end(self, known: int) -> tuple[str, ...]:
        """Save the run as it is now, for a worker has failed; return the sentences that main does not know."""
        self._save_end()
        return tuple(self._sentences[known:])

    async def result(self, late: Sequence[ReplicaId], signal: str | None, known: int) -> messages.Result:
        """Return the result, also where a signal breaks the run off; the replicas ``late`` did not end in time."""
        loop, state = self._loop, self._executor.owner.state
        if self._run.phase in ("starting", "training"):
            self._finish()
        self._break_off()
        loop.ended_late(late, self._run.now())
        nbytes = state.layout.parameter_bytes
        workers = [
            worker_figures(Coordinate(r), record.figures, record.step_times, nbytes, self._seconds)
            for r, record in enumerate(self._replicas)
        ]
        notes: dict[str, str | int | float] = {"threads": threads(self._job.strategy), **self._checkpointer.notes()}
        account = loop.history.account(
            self._seconds, workers, loop.exits, notes, interrupted=signal is not None, signal=signal
        )
        records = sorted(loop.history.records, key=lambda record: record.time_s)
        spans = self._executor.spans.read()
        said = tuple(self._sentences[known:])
        return messages.Result(messages.arrays_of(state), records, account, spans, self._run.began, said)

    def close(self) -> None:
        """Break the run off and release its resources."""
        self._break_off()
        self._checkpointer.close()
        self._executor.spans.close()

    def _break_off(self) -> None:
        for task in (self._evaluation.task, self._task):
            if task is not None:
                task.cancel()

    # ------------------------------------------------------------------------------------------------ from start to end

    async def _train(self) -> None:
        """Train to the end of the budget, and wait for the records."""
        run, loop, coordinator = self._run, self._loop, self._coordinator
        try:
            run.pass_to("training")
            loop.evaluate_if_due(run.now())
            run.begin()
            if not run.over:
                coordinator.begin()
            # A loop that makes no step may have ended before training began.
            for replica in [r for r, record in enumerate(self._replicas) if record.finished]:
                coordinator.left(replica, "done")
            while not run.over and (coordinator.present or self._awaited):
                now = run.now()
                wait_s = loop.tick(now)
                if wait_s is None:
                    break
                self._check_late(now)
                self._save_if_due()
                await wait_for(run.wake, wait_s)
            else:  # not the end of the budget
                if all(record.dead for record in self._replicas) and not run.over:
                    raise loop.all_died()
            self._finish()
            if self._evaluation.task is not None:
                await asyncio.wait([self._evaluation.task])
        except Exception as error:
            run.fail(error)
            self._save_end()
        run.pass_to("done")

    def _check_late(self, now: Seconds) -> None:
        """Raise if a replacement does not start, no replica computes, or none pushes in time."""
        for replica, deadline in self._awaited.items():
            if now > deadline:
                raise WaitTimeoutError(
                    f"the server waited {START_S + self._job.timeout_s:g} s for an actor in the place of replica "
                    f"{replica}; write RayEngine(replace=False), or a larger timeout_s="
                )
        if self._coordinator.computing or not (self._awaited or not self._coordinator.present):
            self._loop.check_hang(
                now,
                "the server",
                excused_until=lambda r: self._replicas[r].excused_s,
                attempt=lambda r: self._replicas[r].attempt,
                busy=lambda: self._evaluation.queue.full,  # replicas wait for the evaluator
            )

    def _finish(self) -> None:
        """End training: no replica computes any more."""
        self._seconds = min(self._run.now(), self._loop.end_s)
        self._save_end()
        self._coordinator.finish()
        for record in self._replicas:
            record.reply(messages.END)
            record.cancel(math.inf)
        if self._run.failure is None:
            self._loop.evaluate_final(self._seconds)
        self._run.pass_to("scoring")

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._executor.chunks(), self._executor.owner.flat_optimizer.state_json())

    def _save_if_due(self) -> None:
        if self._run.sound and not self._end_saved:
            self._checkpointer.save_if_due(self._run.now())

    def _save_end(self) -> None:
        """Save the end of training, once, unless the server itself has failed; return when it is written."""
        if self._run.sound and not self._end_saved:
            self._end_saved = True
            self._checkpointer.finish(min(self._run.now(), self._loop.end_s))

    def _evaluate(self, now: Seconds) -> None:
        self._evaluation.hand_in(self._executor.owner.state, self._loop.history.snapshot(now))

    def _keep(self, records: list[Record]) -> None:
        self._loop.keep(records)
        if self._loop.condition_met:
            self._run.give_over()


class ServerActor(messages.Actor):
    """The server's actor, kept from run to run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._run: ServerRun | None = None

    async def open(self, number: int, parts: Sequence[messages.Bytes], replicas: Sequence[Any], scorer: Any) -> None:
        """Begin to serve a run."""
        self._run = ServerRun(messages.unpack(parts), number, replicas, scorer)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the run."""
        assert self._run is not None, f"{method}: no run is open"
        return await getattr(self._run, method)(*args)

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()
        self._run = None
