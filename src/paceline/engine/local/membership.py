"""Which replicas of a run take part: those that die, are replaced, are silent, come later, or are to leave.

::

    started ---------> takes part --- dies -------> replaced: others make its step anew; the policy sees a slow replica
                        ^   |   |                   or left out: the policy goes on with P - 1
    joins: spawned -----+   |   +---- silent -----> killed where the run survives that, and so dead
                            +---- is to leave ----> leaves when the policy releases it next
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import WorkerError
from paceline.core.records import ReplicaExit
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import Completion
from paceline.engine.local.server import SharedMemoryServer
from paceline.engine.local.worker_processes import WorkerProcesses
from paceline.engine.loop import TICK_S, RunLoop
from paceline.engine.process_supervisor import EXIT_OK
from paceline.engine.replacement import DeathCounter
from paceline.engine.replica_pace import ReplicaPace
from paceline.engine.run_context import RunContext
from paceline.engine.scaling import ScaleRequests, fitting, moves
from paceline.engine.worker_metrics import update_workers_file
from paceline.strategy import Strategy


def replicas_at_start(strategy: Strategy) -> int:
    """Return how many replicas begin: all, or as many within the bounds as this host has cores for."""
    return fitting(strategy, [len(os.sched_getaffinity(0))])


@dataclass(frozen=True)
class MembershipContext:
    """The parts of a run that its membership works with."""

    job: Job
    run: RunContext
    arena: ParameterArena
    server: SharedMemoryServer
    workers: WorkerProcesses
    loop: RunLoop
    take: Callable[[ReplicaId, Completion], None]
    """Has the policy decide on a completion."""
    now: Callable[[], Seconds]
    """Returns the training time."""
    paused_until: Callable[[ReplicaId], Seconds]
    """Returns the training time at which the last delay of a replica that was asked for ends."""


class ReplicaMembership:
    """The replicas of one run.

    Args:
        context: of its run.
    """

    def __init__(self, context: MembershipContext) -> None:
        self._context, self._job = context, context.job
        self._workers, self._server = context.workers, context.server
        self._loop, self._coordinator = context.loop, context.loop.coordinator
        self.pace = ReplicaPace(context.run.replicas, context.job.suspect_after_s, context.job.timeout_s)
        self.starting: dict[ReplicaId, Seconds] = {}
        """Replicas whose workers are spawned and not ready, and since when."""
        self._joining: set[ReplicaId] = set()
        """Those of them that the policy does not know."""
        self._members = set(range(replicas_at_start(context.job.strategy)))
        """Replicas that have taken part."""
        self._lost: set[ReplicaId] = set()
        """Replicas that have died, and were not replaced."""
        self._deaths = DeathCounter()
        self._looked_s: Seconds = 0.0
        """When main last looked for silent replicas, and for requests."""
        self._requests = ScaleRequests(context.job.out, context.job.strategy)
        self._target: int | None = None
        """How many replicas there are to be; None: as many as there are."""

    @property
    def all_died(self) -> bool:
        """Return whether no replica is left, since all have died."""
        return self._members <= self._lost

    @property
    def _computing(self) -> set[ReplicaId]:
        return self._coordinator.computing - self.starting.keys()

    def decided(self) -> None:
        """Note which replicas compute after a decision."""
        self.pace.handled(self._computing, self._context.now())

    # ----------------------------------------------------------------------------------------------------------- events

    def ready(self) -> None:
        """Let replicas whose workers are ready now take part."""
        for replica in [replica for replica in self.starting if self._workers.is_ready(replica)]:
            del self.starting[replica]
            self._loop.last_event_s = self._context.now()
            if replica in self._joining:
                self._joining.remove(replica)
                self._members.add(replica)
                self._coordinator.admit(replica)
        self.decided()

    def ended(self, replica: ReplicaId, status: str) -> None:
        """Handle the end of all workers of a replica."""
        if replica not in self._coordinator.present | self._joining or status == EXIT_OK:
            self._server.reads_no_more(replica)
            self._coordinator.left(replica, "done")
            for worker in self._job.strategy.mesh.replica_ranks(replica):
                update_workers_file(self._job.out, self._job.strategy.mesh.coordinate(worker), None)
        else:
            self._died(replica, status)

    def look(self) -> None:
        """Name replicas that are silent or slow, end the silent ones where the run survives that; scale the run."""
        now, pace, server = self._context.now(), self.pace, self._server
        if now - self._looked_s < TICK_S:
            return
        self._looked_s = now
        silent, self._loop.remarks = pace.look(
            now, self._context.paused_until, lambda r: server.attempts[r], server.unread
        )
        if self._job.survives_deaths:
            for replica, silence_s in silent.items():
                self._workers.terminate(replica, f"silent for {silence_s:.1f} s; killed")
        for replica, since in self.starting.items():
            if now - since > self._workers.start_timeout_s:
                self._workers.terminate(replica, f"did not start within {self._workers.start_timeout_s:g} s; killed")
        requested = self._requests.poll(lambda: len(self._staying))
        self._target = self._target if requested is None else requested
        if self._target is not None:
            self._scale(self._target)

    # -------------------------------------------------------------------------------------------------- come and go

    @property
    def _staying(self) -> set[ReplicaId]:
        """Return the replicas that take part, or will, and are not to leave."""
        return (self._coordinator.present | self._joining) - self._coordinator.departing

    def _scale(self, replicas: int) -> None:
        """Let replicas leave, or join, so that there are so many; those whose workers are still ending join later."""
        leaving, joining = moves(self._staying, replicas, self._context.run.replicas)
        for replica in leaving:
            self._coordinator.depart(replica)
        for replica in joining:
            if replica in self._coordinator.present | self._joining:
                self._coordinator.stay(replica)
            elif replica not in self._workers.living:
                self._coordinator.stay(replica)
                self._join(replica)
        if len(self._staying) == replicas:
            self._target = None

    def _join(self, replica: ReplicaId) -> None:
        """Spawn the workers of a replica that the policy does not know, or knows no more."""
        self._lost.discard(replica)
        self._server.rejoin(replica)
        self._joining.add(replica)
        self._spawn(replica)

    def _spawn(self, replica: ReplicaId) -> None:
        context = self._context
        context.arena.control.drop_slice(replica)
        context.arena.control.paused_until_ns[replica] = 0
        first = self._coordinator.positions[replica].clock - context.run.positions[replica].clock
        self._workers.spawn(replica, first)
        self.pace.left(replica)
        self.starting[replica] = context.now()
        processes, mesh = self._workers.supervisor.processes, self._job.strategy.mesh
        for worker in mesh.replica_ranks(replica):
            update_workers_file(self._job.out, mesh.coordinate(worker), {"pid": processes[worker].pid})

    # --------------------------------------------------------------------------------------------------------- deaths

    def _died(self, replica: ReplicaId, status: str) -> None:
        """Let a run go on without a replica that has died, or with other workers in its place, or end it."""
        on_death, now = self._job.on_death, self._context.now()
        if on_death == "stop":
            self._loop.exited(ReplicaExit(replica, status, now))
            raise WorkerError(
                f"replica {replica} died at its step {self._server.attempts[replica]}: {status}; write "
                "on_death='replace' to have others take its place"
            )
        fewest = len(self._staying) <= (self._job.strategy.least_replicas or 0)
        if (on_death == "replace" or fewest) and not self._workers.interrupts.count:
            self._loop.exited(ReplicaExit(replica, f"{status}; replaced", now))
            self._replace(replica, status)
            return
        self._loop.exited(ReplicaExit(replica, status, now))
        self._lost.add(replica)
        self.starting.pop(replica, None)
        self._joining.discard(replica)
        self.pace.left(replica)
        self._server.reads_no_more(replica)
        self._coordinator.left(replica, "died")
        self.decided()

    def _replace(self, replica: ReplicaId, status: str) -> None:
        """Spawn workers that make the attempt of a dead replica anew, from the version that it was granted.

        The policy sees a slow replica: Δ, data, random numbers and decisions are those of a run without a death.
        """
        for pending in self._server.pending():  # one may have been published while the rest of its replica was killed
            self._context.take(*pending)
        if replica not in self._coordinator.present | self._joining:  # it was its last
            self._server.reads_no_more(replica)
            return
        completed = self._server.attempts[replica] - (replica in self._coordinator.computing)
        self._deaths.died(replica, completed, status)
        self.starting.pop(replica, None)
        self._spawn(replica)
