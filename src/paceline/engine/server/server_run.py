"""The run that the server serves: takes what replicas push, checks the budget, times out late replicas.

::

    replica   first .................. push ............................ push
    server    begin: answer with A_0   decide; answer with A once released    ...    answer: training has ended

A call of a replica is answered when F releases that replica. A Δ is taken as it comes, within the call that brings it;
the loop itself wakes for evaluation points, the end of the budget and late replicas::

    replica --- push --> ServerState.arrived --------> reply with A, or keep the replica waiting
    _train()  --- every tick, or when woken --------> evaluate, end the budget, check for hangs

    starting --> training --> scoring --> done
                        \\ ends early: the budget is spent, the condition met, Ctrl-C, a failure

A call says which attempt its replica has completed, and is answered with the grant after that. So a call can be made
again, of this server or of the standby that has taken over from it, and no Δ is taken twice. What changes the state of
the run is an event, which the standby is sent before anybody is told what follows from it.

The server saves the run: its process holds A, the optimizer and the Δs that wait, and begins each save within the call
that brings a Δ, so that no other event comes between. At the end of training it does nothing else until all is written.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.records import Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.loop import TICK_S
from paceline.engine.own_states import own_bytes
from paceline.engine.run_context import threads
from paceline.engine.server import messages
from paceline.engine.server.evaluation import ServerEvaluation
from paceline.engine.server.event_log import EventLog
from paceline.engine.server.first_server_link import OBSERVE
from paceline.engine.server.late_replicas import LateReplicas
from paceline.engine.server.news import Known, News, ServerNews
from paceline.engine.server.other_servers import OtherServers
from paceline.engine.server.peer import Notified, Peer
from paceline.engine.server.push_stream import PushListener
from paceline.engine.server.replies import ReplicaProcesses, Replies
from paceline.engine.server.run_control import RunControl, wait_for
from paceline.engine.server.server_state import ServerState
from paceline.engine.server.wire import Listener, StreamAddress
from paceline.engine.worker_metrics import Figures


class ServerRun:
    """One run at the server, as replicas and the driver call it.

    Args:
        job: what is run.
        number: of the run.
        state: of the run; where a standby takes over, that of the server before it.
        replicas: of the run; fewer where Ctrl-C came while they started.
        scorer: the evaluator; None: there is none.
        others: the other servers, each of which has a slice of A.
        address: of the interface that it listens at.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        state: ServerState,
        replicas: Sequence[Notified],
        scorer: Peer | None,
        others: OtherServers,
        address: str,
    ) -> None:
        self._job, self._number, self._state, self._others = job, number, state, others
        self._loop, self._coordinator = state.loop, state.coordinator
        self.control = self._run = run = RunControl(state.loop.start_s, state.began)
        self._log = EventLog(number, state, run.changed.set, job.suspect_after_s)
        self._end_saved, self._news = False, ServerNews(state.loop)
        self._checkpointer = Checkpointer(state.context, state.loop, self._snapshot, say=self._news.sentences.append)
        self._news.saved, self.reported = self._checkpointer.saved, self._news.reported
        state.executor.before_change = self._checkpointer.settle
        executor, most = state.executor, own_bytes(state.context, state.executor.part.whole)
        self.pushes = pushes = PushListener.of(state.context, executor.part, self.push, executor.allocate, most)
        self._listener = Listener(address, lambda c, hello: pushes.serve(c, hello["memory"]))
        whole = lambda state: others.joined("snapshot", state, executor.slices)  # noqa: E731
        self._evaluation = ServerEvaluation(job, state.queue, scorer, self._keep, run.fail, whole)
        self._late, self._replies = LateReplicas(job, state), Replies(state, self._log.settled)
        self._task: asyncio.Task[None] | None = None
        self._processes = ReplicaProcesses(number, replicas, state, self._log.settled)
        executor.cancelled = self._processes.cancel
        others.lost, others.changed = run.fail, run.changed.set

    def take_over(self) -> None:
        """Go on where the server stopped of which this was the standby."""
        state, run = self._state, self._run
        if state.loop.condition_met:
            run.give_over()
        if state.phase != "starting":
            state.loop.last_event_s = run.now()
            self._late.handled(run.now())
            for replica in self._coordinator.cancelling:
                self._processes.cancel(replica)
            self._task = asyncio.ensure_future(self._train())
        if state.queue.snapshots:
            self._evaluation.begin()

    @property
    def training(self) -> bool:
        """Return whether replicas train, and nothing ends it."""
        return self._state.phase == "training" and not self._run.over

    def fail(self, error: BaseException) -> None:
        """End the run by an error, unless it has failed before; no replica waits for a grant any more."""
        self._run.fail(error)
        if self._state.phase in ("starting", "training"):
            with self._run.guarded():
                self._finish()
        for replica in range(len(self._state.records)):  # also where another server is lost, and takes no event
            self._state.executor.dismiss(replica)
        self._run.done = True

    # ----------------------------------------------------------------------------------------------- calls of replicas

    async def ready(self, replica: ReplicaId, incarnation: int, kept: Mapping[str, Any] | None = None) -> None:
        """Note that a replica has built its model; ``kept`` is what workers that take its workers' place need."""
        run, state = self._run, self._state
        if incarnation != state.records[replica].incarnation:
            return
        self._change("ready", replica, run.now(), kept)
        if replica in self._coordinator.cancelling:  # since before it took another's place
            self._processes.cancel(replica)
        self._late.handled(run.now())
        run.changed.set()
        await self._log.settled()

    async def stream(self) -> StreamAddress | None:
        """Return where replicas make streams, by which a push is sent and answered; None: there can be none."""
        return self._listener.address()

    async def own_state(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> messages.Bytes | None:
        """Return what a replica kept after an attempt of this run or the one before, for the process that goes on."""
        await self._log.settled()
        state = self._state
        return state.executor.kept(replica, attempt) if incarnation == state.records[replica].incarnation else None

    async def first(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> messages.Reply:
        """Return the first grant after this attempt, once there is one."""
        return await self._replies.after(replica, incarnation, attempt)

    async def push(
        self, completion: messages.PushCompletion, refs: Sequence[Any], *arrays: messages.Bytes, lent: bool = False
    ) -> messages.Reply:
        """Take a Δ, or without arrays the end of a cancelled attempt; return the next grant, once there is one.

        Args:
            completion: the end of an attempt.
            refs: references of the arrays, if they are to be sent on.
            arrays: Δ, and what the replica keeps, where it is told of.
            lent: whether the replica writes these arrays again once it has the grant.
        """
        run, state, (replica, incarnation, attempt, *_) = self._run, self._state, completion
        while state.queue.full and not run.over:
            self._late.held_back.add(replica)
            self._evaluation.evaluated.clear()
            await self._evaluation.evaluated.wait()
        self._late.held_back.discard(replica)
        if arrays and state.takes(replica, incarnation, attempt):
            await self._others.staged(completion, arrays)
        if state.takes(replica, incarnation, attempt):
            with run.guarded():
                self._take(completion, refs, arrays, lent=lent)
        return await self._replies.after(replica, incarnation, attempt)

    async def excuse(self, replica: ReplicaId, incarnation: int, seconds: Seconds) -> None:
        """Note a delay that the job asked for: the replica pushes nothing meanwhile."""
        if incarnation == self._state.records[replica].incarnation:
            self._change("excused", replica, self._run.now() + seconds)
        await self._log.settled()

    async def done(self, replica: ReplicaId, incarnation: int, figures: Figures, step_times: Sequence[Seconds]) -> None:
        """Note that a replica's loop has ended."""
        record = self._state.records[replica]
        if incarnation == record.incarnation and not record.finished:
            with self._run.guarded():
                self._change("done", replica, figures, step_times)
            self._late.pace.left(replica)
        await self._log.settled()
        self._run.wake.set()

    async def clock(self) -> Nanoseconds:
        """Return the time of this host's clock."""
        return time.monotonic_ns()

    # --------------------------------------------------------------------------------------------- calls of the driver

    async def begin(self) -> None:
        """Begin training, once all replicas are ready; return when the standby knows that it has begun."""
        run = self._run
        if self._task is None:
            if self._state.phase == "starting" and not run.over:
                with run.guarded():
                    run.begin()
                    self._change("begin", run.began)
                    self._late.handled(run.now())
            self._task = asyncio.ensure_future(self._train())
        await self._log.settled(for_main=True)

    async def interrupt(self) -> None:
        """End training with what there is."""
        self._run.give_over()
        await self.begin()

    async def lost(self, replica: ReplicaId, incarnation: int, reason: str) -> messages.ReplicaAssignment | None:
        """Note that a replica has died; return the part of the process that is to replace it, if one is."""
        run, state = self._run, self._state
        run.wake.set()
        if incarnation == state.records[replica].incarnation:
            self._late.pace.left(replica)
            replaced = (self._job.on_death == "replace" or state.fewest) and not run.over
            with run.guarded():
                self._change("lost", replica, reason, run.now(), replaced)
            self._replies.wake(replica)
            await self._others.replaced(replica, state.records[replica].incarnation)
        await self._log.settled(for_main=True)
        return state.assignment(self._number, replica) if replica in state.starting and not run.over else None

    async def scale(self, replicas: int) -> list[messages.ReplicaAssignment]:
        """Let replicas leave, or join, so that there are so many; return the parts of the processes to be started."""
        run, state, started = self._run, self._state, list[ReplicaId]()
        if self.training:
            with run.guarded():
                started = self._change("scaled", replicas, run.now())
        await self._log.settled(for_main=True)
        return [state.assignment(self._number, replica) for replica in started]

    async def staying(self) -> int:
        """Return how many replicas take part, or will, and are not to leave."""
        return len(self._state.staying)

    async def replaced(self, replica: ReplicaId, process: Notified) -> None:
        """Call this process from now on in place of one that has died."""
        self._processes.replaced(replica, process)

    async def attach(self, standby: Peer) -> None:
        """Have this process follow from now on; return once it has all that this one has."""
        await self._log.attach(standby)

    async def release(self) -> None:
        """Go on without a standby, which can not take over any more."""
        await self._log.release()

    async def stand(self, known: Known) -> messages.RunStatus:
        """Return the state of the run, at its next change or after a tick, with what main does not know."""
        run, state = self._run, self._state
        await wait_for(run.changed, TICK_S)
        phase: messages.Phase = "done" if run.done else state.phase
        waiting, progress = state.building, state.progress(phase, run.now())
        suspects, news = self._late.suspects, self._news.since(known)
        await self._log.settled(for_main=True)
        return messages.RunStatus(phase, progress, run.failure, waiting, news, suspects, dict(self._others.ended))

    async def save_end(self, known: Known) -> News:
        """Save the run as it is now, for a worker has failed; return what main does not know."""
        self._save_end()
        return self._news.since(known)

    async def result(self, late: Sequence[ReplicaId], signal: str | None, known: Known) -> messages.Result:
        """Return the result, also where a signal breaks the run off; the replicas ``late`` did not end in time."""
        loop, state = self._loop, self._state
        if state.phase in ("starting", "training"):
            self._finish()
        self._break_off()
        loop.ended_late(late, self._run.now())
        records = sorted(loop.history.records, key=lambda record: record.time_s)
        whole = await self._others.joined("newest", state.executor.owner.state, state.executor.slices)
        optimizer_bytes = state.executor.owner.flat_optimizer.nbytes + await self._others.optimizer_bytes()
        notes = {"threads": threads(self._job.strategy), "server_optimizer_bytes": optimizer_bytes}
        account = state.account(self._checkpointer.notes() | self._late.pace.notes() | notes, signal)
        arrays, spans = messages.arrays_of(whole), state.executor.spans.read()
        return messages.Result(arrays, records, account, spans, self._run.began, self._news.since(known))

    def close(self) -> None:
        """Break the run off and release its resources."""
        self._break_off()
        self._listener.close()
        self._others.close()
        self._checkpointer.close()
        self._state.executor.spans.close()

    # ----------------------------------------------------------------------------------------------------------- events

    def _change(self, event: str, *args: Any) -> Any:
        """Have the state take an event, and forward it."""
        self._forward(event, *args)
        result = getattr(self._state, event)(*args)
        self._log.add(event, *args)
        self._log.flush()
        if self._state.queue.snapshots:
            self._evaluation.begin()
        return result

    def _forward(self, event: str, *args: Any) -> None:
        """Have the other servers take an event that this one takes next."""
        self._others.send(event, args, self._state.counts())

    def _take(
        self, completion: messages.PushCompletion, refs: Sequence[Any], arrays: Sequence[messages.Bytes], *, lent: bool
    ) -> None:
        """Have the policy decide on a Δ, or let a replica whose attempt was cancelled go on."""
        run, state, log, replica, now = self._run, self._state, self._log, completion.replica, self._run.now()
        self._late.pace.arrived(replica, now)
        if lent and log.attached:  # the standby is sent them later
            arrays, lent = [array.copy() for array in arrays], False
        if arrays and replica not in self._coordinator.cancelling:
            executor = state.executor
            delta = executor.delta_of(arrays) if executor.statistics.looks_inside else None
            if delta is not None:
                self._forward(OBSERVE, replica)
            if lent:
                executor.lent[replica] = completion.attempt
            observed = executor.statistics.observe(delta, now)
            self._forward("arrived", completion, now, observed)
            state.arrived(completion, now, observed, arrays)
            log.add("arrived", completion, now, observed, refs=refs, arrays=arrays)
        else:
            self._forward("cancelled", replica, completion.figures)
            state.cancelled(replica, completion.figures)
            log.add("cancelled", replica, completion.figures)
        self._change("handled", run.now())  # an update may have taken time
        self._late.handled(run.now())
        self._save_if_due()
        if not self._coordinator.present or self._coordinator.deadline < run.now() + TICK_S:
            run.wake.set()

    def _keep(self, record: Record) -> None:
        self._change("evaluated", record)
        if self._loop.condition_met:
            self._run.give_over()

    # ------------------------------------------------------------------------------------------------ from start to end

    async def _train(self) -> None:
        """Train to the end of the budget, and wait for the records."""
        run, state = self._run, self._state
        try:
            run.changed.set()
            while state.phase == "training" and not run.over and state.goes_on(run.now()):
                now = run.now()
                wait_s = self._change("tick", now)
                if wait_s is None:
                    break
                self._late.handled(now)
                if (notes := self._late.look(now)) is not None:
                    self._change("remarked", notes)
                if self._late.suspects:
                    run.changed.set()
                self._save_if_due()
                await wait_for(run.wake, wait_s)
            else:  # not the end of the budget
                if all(state.records[r].dead for r in state.members) and not (run.over or self._job.joins):
                    raise self._loop.all_died()
            if state.phase != "scoring":
                self._finish()
            run.changed.set()
            if self._evaluation.task is not None:
                await asyncio.wait([self._evaluation.task])
        except Exception as error:
            run.fail(error)
            self._save_end()
        run.done = True
        run.changed.set()

    def _finish(self) -> None:
        """End training: no replica computes any more."""
        seconds = min(self._run.now(), self._loop.end_s)
        self._save_end()
        self._change("finish", seconds, self._run.failure is None)
        self._processes.end()

    def _snapshot(self) -> Snapshot:
        others = self._others.packed(self._state.counts())
        return self._state.executor.snapshot([position.attempt for position in self._coordinator.positions], others)

    def _save_if_due(self) -> None:
        if self._run.sound and not self._end_saved:
            self._checkpointer.save_if_due(self._run.now())

    def _save_end(self) -> None:
        """Save the end of training, once, unless the server itself has failed; return when it is written."""
        if self._run.sound and not self._end_saved:
            self._end_saved = True
            self._checkpointer.finish(min(self._run.now(), self._loop.end_s))

    def _break_off(self) -> None:
        for task in (self._evaluation.task, self._task):
            if task is not None:
                task.cancel()
