"""The state of a run at its server: what follows from the job and the events so far, and from nothing else.

The same events in the same order give the same state, bit for bit, in another process: that is how a standby of the
server keeps up with it (:mod:`paceline.engine.server.event_log`). So whatever is measured, the time or a statistic of
time, is part of an event, and no method here reads a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.aggregation.base import Arrival
from paceline.core.mesh import Coordinate
from paceline.core.records import Account, Record, ReplicaExit
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.evaluation import EvaluationQueue
from paceline.engine.loop import TICK_S, RunLoop
from paceline.engine.own_states import keeps_own_state
from paceline.engine.replacement import DeathCounter
from paceline.engine.run_context import RunContext
from paceline.engine.scaling import moves
from paceline.engine.server import messages
from paceline.engine.server.executor import ALONE, ServerExecutor, ServerShare
from paceline.engine.worker_metrics import Figures, worker_figures

# Methods of the state that are its events.
EVENTS = (
    *("ready", "begin", "tick", "arrived", "cancelled", "handled", "excused", "done"),
    *("scaled", "lost", "evaluated", "remarked", "finish"),
)


class ServerState:
    """A, its optimizer, coordinator, history, grants and snapshots of a run.

    Args:
        job: what is run.
        copied: state of another process; None: the run begins.
        replicas: that take part at first; None: all.
        share: of this server.
        packed: A and its optimizer, where the run goes on and another server has read its checkpoint.
    """

    def __init__(
        self,
        job: Job,
        copied: Sequence[messages.Bytes] | None = None,
        replicas: int | None = None,
        share: ServerShare = ALONE,
        packed: messages.Bytes | None = None,
    ) -> None:
        self.context = context = RunContext(job)
        self.executor = ServerExecutor(context, share, restore=copied is None, packed=packed)
        state = self.executor.owner.state
        parks, self.members = job.on_death != "stop", set(range(replicas or context.replicas))
        self.loop = RunLoop(
            context, self.executor, self.executor.start_digest, self._evaluate, replicas=len(self.members), parks=parks
        )
        self.queue = EvaluationQueue(job.program, state.layout.nbytes)
        """Snapshots that were taken, and whose records have not come."""
        self.phase: messages.Phase = "starting"
        self.began: Nanoseconds = 0
        """When training would have begun without a break; 0: it has not."""
        self.seconds = self.loop.start_s
        """How long training has lasted, at its end."""
        self.starting: dict[ReplicaId, Seconds] = {}
        """Replicas whose processes are started in the place of dead ones, or to join, and since when."""
        self.joining: set[ReplicaId] = set()
        """Those of them that the policy does not know."""
        self.notes: dict[str, str] = {}
        """What was remarked about replicas."""
        self._deaths = DeathCounter()
        if copied is not None:
            self._restore(copied)
        self.coordinator, self.records = self.loop.coordinator, self.executor.replicas

    # ------------------------------------------------------------------------------------------------------ events

    def ready(self, replica: ReplicaId, now: Seconds, kept: Mapping[str, Any] | None = None) -> None:
        """Note that a replica has built its model, and what its workers have chosen, if it has several."""
        self.records[replica].ready, self.records[replica].kept = True, kept
        self.starting.pop(replica, None)
        self.loop.last_event_s = now
        if replica in self.joining:
            self.joining.remove(replica)
            if self.phase == "training":
                self.coordinator.admit(replica)

    def begin(self, began: Nanoseconds) -> None:
        """Begin training."""
        self.phase, self.began = "training", began
        self.loop.evaluate_if_due(self.loop.start_s)
        self.coordinator.begin()
        # A loop that makes no step may have ended before training began.
        for replica in [r for r, record in enumerate(self.records) if record.finished]:
            self.coordinator.left(replica, "done")

    def tick(self, now: Seconds) -> Seconds | None:
        """Evaluate what is due, and have the policy decide at its deadline.

        Returns:
            How long to wait for events; None: the budget is spent.
        """
        if self.coordinator.present:
            self.loop.expire(now)
            return self.loop.tick(now)
        wait_s = self.loop.tick(now)
        return wait_s if wait_s is None else TICK_S  # no deadline of the policy's concerns anybody

    def arrived(
        self,
        completion: messages.PushCompletion,
        now: Seconds,
        observed: Mapping[str, float],
        arrays: Sequence[messages.Bytes],
    ) -> None:
        """Have the policy decide on a Δ."""
        replica, _, attempt, version, samples, finite, loss, figures, _ = completion
        self.records[replica].measured(figures)
        self.executor.take(replica, attempt, arrays)
        mean = loss if samples else None
        self.loop.arrived(Arrival(replica, version, attempt, samples, now, finite, mean, observed))

    def cancelled(self, replica: ReplicaId, figures: Figures) -> None:
        """Let a replica go on whose attempt was cancelled."""
        self.records[replica].measured(figures)
        self.executor.forget(replica)
        self.coordinator.cancelled(replica)

    def handled(self, now: Seconds) -> None:
        """Evaluate what is due after a Δ, whose update may have taken time."""
        self.loop.handled(now)

    def excused(self, replica: ReplicaId, until_s: Seconds) -> None:
        """Note a delay of a replica that the job asked for."""
        self.records[replica].excused_s = until_s

    def done(self, replica: ReplicaId, figures: Figures, step_times: Sequence[Seconds]) -> None:
        """Note that a replica's loop has ended."""
        record = self.records[replica]
        record.measured(figures)
        record.step_times, record.finished = [*step_times], True
        if self.phase == "training":  # others take the batches with which a process leaves that may do so at any time
            self.coordinator.left(replica, "died" if self.context.job.joins else "done")

    def scaled(self, replicas: int, now: Seconds) -> list[ReplicaId]:
        """Let replicas leave, or join, so that there are so many; return those whose processes are to be started."""
        leaving, joining = moves(self.staying, replicas, len(self.records))
        for replica in leaving:
            self.coordinator.depart(replica)
        started = list[ReplicaId]()
        for replica in joining:
            self.coordinator.stay(replica)
            if replica in self.coordinator.present | self.joining:
                continue
            self.records[replica].joins(self.coordinator.positions[replica].attempt)
            self.members.add(replica)
            self.joining.add(replica)
            self.starting[replica] = now
            started.append(replica)
        return started

    def lost(self, replica: ReplicaId, status: str, now: Seconds, replaced: bool) -> None:
        """Note that a replica's process has died, and whether another makes its attempt anew, or the policy has P - 1.

        Raises:
            WorkerError: it has died too often at this step.
        """
        record, present = self.records[replica], replica in self.coordinator.present | self.joining
        record.lost()
        self.starting.pop(replica, None)
        if self.phase != "training":
            return
        if not present:  # it has made its last step, and can be called back no more
            self.coordinator.left(replica, "died")
            return
        self.loop.exited(ReplicaExit(replica, f"{status}; replaced" if replaced else status, now))
        if replaced:
            self._deaths.died(replica, self.completed(replica), status)
            self.starting[replica] = now
        else:
            record.dead = True
            self.joining.discard(replica)
            self.coordinator.left(replica, "died")

    def evaluated(self, record: Record) -> None:
        """Keep the record of the oldest snapshot."""
        self.queue.snapshots.popleft()
        self.loop.keep([record])

    def remarked(self, notes: Mapping[str, str]) -> None:
        """Keep remarks about replicas."""
        self.notes |= notes

    def finish(self, now: Seconds, score: bool) -> None:
        """End training: no replica computes any more."""
        self.phase, self.seconds = "scoring", now
        self.coordinator.finish()
        for replica in range(len(self.records)):
            self.executor.dismiss(replica)
        owner = self.executor.owner
        moved = not self.loop.ends_here and owner.finish(lambda: owner.state.layout.new(self.executor.allocate))
        if score:
            self.loop.evaluate_final(now, moved=moved)

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def staying(self) -> set[ReplicaId]:
        """Return the replicas that take part, or will, and are not to leave."""
        return (self.coordinator.present | self.joining) - self.coordinator.departing

    @property
    def fewest(self) -> bool:
        """Return whether there are as few replicas as the bounds allow, so that one that dies is replaced."""
        job = self.context.job
        return not job.joins and len(self.staying) <= (job.strategy.least_replicas or 0)

    def goes_on(self, now: Seconds) -> bool:
        """Return whether a Δ may still arrive: replicas take part, or may join while the budget lasts."""
        job, budget = self.context.job, self.context.job.budget
        if self.coordinator.present or not job.joins:
            return bool(self.coordinator.present)
        if budget.amount is None:
            return bool(self.joining) or budget.until is not None
        # Who joins next is replica 0, whose share counts what others of this number were granted.
        return self.loop.history.spent(now) < budget.amount and not self.loop.dispatcher.quota.spent(0)

    def completed(self, replica: ReplicaId) -> int:
        """Return the newest attempt of a replica that is complete."""
        return self.records[replica].attempt - (replica in self.coordinator.computing)

    def assignment(self, run: int, replica: ReplicaId) -> messages.ReplicaAssignment:
        """Return the part of the process that is to be this replica from now on."""
        first = self.coordinator.positions[replica].clock - self.context.positions[replica].clock
        incarnation = self.records[replica].incarnation
        kept = self.records[replica].kept
        return messages.ReplicaAssignment(run, replica, incarnation, self.completed(replica), first, kept)

    def takes(self, replica: ReplicaId, incarnation: int, attempt: int) -> bool:
        """Return whether a Δ is awaited: it is of the present process, and was not taken before."""
        record, coordinator = self.records[replica], self.coordinator
        awaited = replica in coordinator.present and replica in coordinator.computing
        return awaited and (incarnation, attempt) == (record.incarnation, record.attempt)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of updates and of Δs."""
        return self.coordinator.version, self.coordinator.tally.gradients

    @property
    def building(self) -> tuple[ReplicaId, ...]:
        """Return the replicas that have not built their model."""
        return tuple(r for r in sorted(self.members) if not self.records[r].ready)

    def progress(self, phase: messages.Phase, now: Seconds) -> Progress:
        """Return how far the run is."""
        if phase == "starting":
            return Progress("starting", 1 - len(self.building) / len(self.members))
        progress = self.loop.history.progress("training" if phase == "training" else "scoring", now)
        return replace(progress, remarks=self.loop.remarks)

    def account(self, notes: Mapping[str, str | int | float], signal: str | None) -> Account:
        """Return the account of the run, which a signal has broken off, if any did."""
        loop, size = self.loop, self.executor.part.whole.parameter_bytes
        since_s = self.seconds - loop.start_s
        workers = [
            worker_figures(Coordinate(r), record.figures, record.step_times, size, since_s)
            for r, record in enumerate(self.records)
            if r in self.members
        ]
        if not keeps_own_state(self.context):  # the servers have the only optimizer
            workers = [replace(row, optimizer_bytes=0) for row in workers]
        notes = {**notes, **self.notes}
        interrupted = signal is not None
        return loop.history.account(self.seconds, workers, loop.exits, notes, interrupted=interrupted, signal=signal)

    def _evaluate(self, now: Seconds) -> None:
        self.queue.snapshots.append((self.executor.owner.state, self.loop.history.snapshot(now)))

    # ------------------------------------------------------------------------------------------------------- copies

    def copy(self) -> list[messages.Bytes]:
        """Return the state as it is, between two events; to be sent before the next."""
        executor, arrays_of = self.executor, messages.arrays_of
        parts = {
            "loop": self.loop,
            "records": executor.replicas,
            "version": executor.version,
            "sent": executor.sent,
            "kept": executor.own,
            "undecided": {name: arrays_of(delta) for name, delta in executor.undecided.items()},
            "statistics": executor.statistics,
            "snapshots": [(arrays_of(state), info) for state, info in self.queue.snapshots],
            "own": {name: getattr(self, name) for name in _OWN},
            "optimizer": executor.owner.flat_optimizer.replicated(),
            "state": arrays_of(executor.owner.state),
        }
        return messages.pack(parts, self._known())

    def _restore(self, copied: Sequence[messages.Bytes]) -> None:
        executor, layout = self.executor, self.executor.owner.state.layout
        parts = messages.unpack(copied, self._known())
        self.loop = parts["loop"]
        executor.replicas, executor.version, executor.sent = parts["records"], parts["version"], parts["sent"]
        executor.statistics, executor.own = parts["statistics"], parts["kept"]
        executor.undecided = {n: messages.state_of(layout, a) for n, a in parts["undecided"].items()}
        self.queue.snapshots.extend((messages.state_of(layout, a), info) for a, info in parts["snapshots"])
        for name, value in parts["own"].items():
            setattr(self, name, value)
        torch._foreach_copy_(executor.owner.state.vectors, messages.state_of(layout, parts["state"]).vectors)
        executor.owner.flat_optimizer.replicate(parts["optimizer"])

    def _known(self) -> dict[str, Any]:
        """Return what a copy refers to by name, for the other process has its own."""
        context, executor = self.context, self.executor
        return {
            "state": self,
            "context": context,
            "job": context.job,
            "policy": context.policy,
            "executor": executor,
            "owner": executor.owner,
        }


# Attributes of a state that a copy has as they are.
_OWN = ("phase", "began", "seconds", "starting", "joining", "members", "notes", "_deaths")
