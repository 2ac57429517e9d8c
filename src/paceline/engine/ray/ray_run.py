"""One run on Ray in the main process: it starts the actors, watches for deaths and Ctrl-C, and gathers the results.

The server's actor decides and counts; main never waits for a Δ.
"""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import ray

from paceline.core.errors import WaitTimeoutError, WorkerError, failure_text
from paceline.core.mesh import Coordinate
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.loop import TICK_S, InterruptGuard
from paceline.engine.ray.actor_pool import GLANCE_S, ActorPool, Needs, exit_reason, share_of_gpus
from paceline.engine.ray.cluster import Cluster
from paceline.engine.ray.messages import Ended, ReplicaAssignment, Result, RunStatus, pack, state_of
from paceline.engine.run_context import first_state
from paceline.engine.worker_metrics import WorkersFile, training_spans
from paceline.replica.flat_state import write
from paceline.trace.spans import Span

GRACE_S: Seconds = 5.0
"""Time in which actors may finish when a run is over, so that the next run can use them again."""


class RayRun:
    """One run.

    Args:
        job: what is run.
        cluster: where it runs.
        actors: the engine's actors.
        watch: receives progress.
        closing: what has to be released, however the run ends; for the caller to close.
        number: number of the run in its engine.
        replace: True if another actor takes the place of a replica that dies.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        actors: ActorPool,
        watch: Watcher,
        closing: ExitStack,
        *,
        number: int,
        replace: bool,
    ) -> None:
        self._job, self._cluster, self._actors, self._watch, self._closing = job, cluster, actors, watch, closing
        self._number, self._replace, self._replicas = number, replace, job.strategy.replicas
        self._module, state = first_state(job.program, job.running_buffers)
        self._layout = state.layout
        self._job_parts: Any = ray.put(pack(job))
        self._running: dict[Any, ReplicaId] = {}
        """Future result of a replica's actor -> the replica."""
        self._dead: list[Any] = []
        self._spans: list[Span] = []
        self._status = RunStatus("starting", Progress("starting", 0.0), None, ())
        self._status_request: Any = None
        self._requested_s = 0.0
        self._begun = self._interrupted = False

    def outcome(self) -> Outcome:
        """Run to the end."""
        with InterruptGuard(lambda: None) as interrupts:
            self._watch(Progress("starting", 0.0))
            try:
                self._start(interrupts)
                self._poll(lambda: self._status.phase in ("scoring", "done"), interrupts)
                late = self._stop_replicas(interrupts)
                enough = min(interrupts.count, 1) + 1
                self._poll(lambda: self._status.phase == "done", interrupts, enough=enough)
                result: Result = self._get(self._ask("result", late, interrupts.count > 0))
            finally:
                self._release_actors(0.0 if interrupts.insisted else GRACE_S)
        model = write(self._module, state_of(self._layout, result.state))
        spans = training_spans([*self._spans, *result.spans], result.began_ns) if self._job.trace else []
        return Outcome(model.state_dict(), model, result.history, result.account, spans)

    # ------------------------------------------------------------------------------------------------------ the phases

    def _start(self, interrupts: InterruptGuard) -> None:
        job, actors = self._job, self._actors
        gpu = share_of_gpus(self._cluster.gpus, self._replicas) if job.strategy.device.startswith("cuda") else 0.0
        needs = Needs(self._replicas, patient=job.budget.until is None, gpus=gpu)
        actors.start(
            needs,
            job.timeout_s,
            lambda: interrupts.count > 0,
            lambda part: self._watch(Progress("starting", part / 2)),
        )
        handles = actors.replicas[: self._replicas]
        self._get(actors.server.open.remote(self._number, self._job_parts, handles, actors.scorer))
        actors.scorer.open.remote(self._job_parts)
        if not interrupts.count:
            for replica in range(self._replicas):
                self._run_replica(replica, 0, 0)
            deadline = time.monotonic() + job.timeout_s
            built = lambda: self._status.phase == "starting" and not self._status.waiting  # noqa: E731
            self._poll(built, interrupts, until=deadline)
            if self._status.waiting and not interrupts.count:
                raise WaitTimeoutError(
                    f"main waited {job.timeout_s:g} s for replicas {list(self._status.waiting)} to build their model; "
                    "write a larger timeout_s="
                )
        others = {"coordinator": actors.server, "scorer": actors.scorer}
        processes = {"main": {"pid": os.getpid()}} | {r: actors.place(a)._asdict() for r, a in others.items()}
        replicas = {Coordinate(r): actors.place(a)._asdict() for r, a in enumerate(actors.replicas[: self._replicas])}
        workers_file = WorkersFile(job.out, processes, replicas)
        self._closing.callback(workers_file.close)
        for path in workers_file.files:
            self._cluster.remove_on_exit(path)
        if not interrupts.count:
            self._get(self._ask("begin"))
            self._begun = True

    def _stop_replicas(self, interrupts: InterruptGuard) -> list[ReplicaId]:
        """Let the replicas end by themselves; return those that did not in time."""
        deadline = time.monotonic() + self._job.timeout_s
        self._poll(lambda: not self._running, interrupts, until=deadline)
        late = sorted(self._running.values())
        self._dead += [self._actors.replicas[replica] for replica in late]
        self._running.clear()
        return [] if interrupts.insisted else late

    def _poll(
        self, done: Callable[[], bool], interrupts: InterruptGuard, *, until: float = math.inf, enough: int = 2
    ) -> None:
        """Handle events until ``done``, the time ``until``, or ``enough`` Ctrl-C; the first one ends training."""
        while not done() and interrupts.count < enough and time.monotonic() < until:
            if interrupts.count and not self._interrupted:
                self._interrupted = True
                self._get(self._ask("interrupt"))
            if self._status_request is None:
                self._status_request, self._requested_s = self._ask("stand"), time.monotonic()
            ready, _ = ray.wait([self._status_request, *self._running], timeout=GLANCE_S)
            for ref in ready:
                if ref == self._status_request:
                    self._take_status(ref)
                else:
                    self._replica_ended(self._running.pop(ref), ref)
            if time.monotonic() - self._requested_s > self._job.timeout_s + TICK_S:
                raise WaitTimeoutError(
                    f"main waited {self._job.timeout_s:g} s for the server to report the state of the run, and "
                    "received nothing; write a larger timeout_s= if an update of A takes so long"
                )

    # ---------------------------------------------------------------------------------------------------------- events

    def _take_status(self, ref: Any) -> None:
        self._status_request, self._requested_s = None, time.monotonic()
        self._status = self._get(ref)
        if self._status.failure is not None:
            raise self._status.failure
        self._watch(self._status.progress)

    def _replica_ended(self, replica: ReplicaId, ref: Any) -> None:
        """Take the spans of a replica that ended; one that died leaves, or is replaced."""
        try:
            ended: Ended = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._get(self._actors.server.place.remote())  # raises if it is the server that was lost
            raise WorkerError(f"replica {replica} failed: {error}") from error
        except ray.exceptions.RayError as error:
            status = exit_reason(error)
            self._dead.append(self._actors.replicas[replica])
            if not self._begun and not self._interrupted:
                raise WorkerError(f"replica {replica} ended while it started: {status}") from error
            again = self._get(self._ask("lost", replica, status, self._replace))
            if again is not None:
                self._get(self._actors.server.replaced.remote(replica, self._actors.replace(replica)))
                self._run_replica(replica, *again)
            return
        if ended.failure is not None:
            raise WorkerError(failure_text(json.loads(ended.failure)))
        self._spans += ended.spans

    def _run_replica(self, replica: ReplicaId, attempt: Clock, micro_steps: int) -> None:
        """Start a replica in its actor, after ``attempt`` attempts and ``micro_steps`` of a dead one."""
        actors = self._actors
        assignment = ReplicaAssignment(self._number, replica, attempt, micro_steps, actors.place(actors.server))
        self._running[actors.replicas[replica].run.remote(self._job_parts, assignment, actors.server)] = replica

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the server's session; return the future result."""
        return self._actors.server.ask.remote(method, *args)

    def _get(self, ref: Any) -> Any:
        """Wait for a result of the server."""
        try:
            return ray.get(ref, timeout=self._job.timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"the server failed: {error.cause}\n\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"the server died, and A with it: {exit_reason(error)}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeoutError(
                f"main waited {self._job.timeout_s:g} s for the server's answer; write a larger timeout_s="
            ) from error

    def _release_actors(self, grace_s: Seconds) -> None:
        """Keep the actors that have finished for the next run, and end the others."""
        actors = self._actors
        running = {ref: actors.replicas[replica] for ref, replica in self._running.items()}
        if running:
            self._ask("interrupt")
        actors.settle(running, grace_s)
        actors.drop(self._dead)
        actors.settle({actor.close.remote(): actor for actor in (actors.server, actors.scorer) if actor}, grace_s)
