"""The main process of runs on Ray: one run.

Main starts the actors, watches for deaths and Ctrl-C, and gathers the results. The server's actor decides and counts;
main never waits for a Δ.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray

from paceline.checkpoint.fingerprint import versions
from paceline.core.errors import CallbackError, WaitTimeoutError, WorkerError, failure_of, raised_text
from paceline.core.mesh import Coordinate
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.loop import TICK_S, InterruptGuard
from paceline.engine.ray.actor_pool import GLANCE_S, ActorPool, exit_reason, gpus_of_worker
from paceline.engine.ray.actors import CONTROL, RayPeer, WorkerLocation
from paceline.engine.ray.cluster import Cluster
from paceline.engine.ray.server_client import ServerClient
from paceline.engine.run_context import first_state
from paceline.engine.scaling import ScaleRequests, fitting, scaling_files
from paceline.engine.server import messages
from paceline.engine.server.news import NewsReader
from paceline.engine.server.replica_group import with_workers
from paceline.engine.server_optimizer import usual_servers
from paceline.engine.spmd.rank_context import PREPARATION_S
from paceline.engine.worker_metrics import training_spans, update_workers_file, workers_file
from paceline.replica.flat_state import write
from paceline.trace.spans import Span

# Time in which actors may finish when a run is over, so that the next run can use them again.
GRACE_S: Seconds = 5.0

# Period at which main looks for nodes that came or went, where replicas do so, too.
ROOM_S: Seconds = 2.0


class RayRun:
    """One run.

    Args:
        job: what is run.
        cluster: where it runs.
        actors: the engine's actors.
        watch: receives progress.
        interrupts: counts how often this process was asked to end.
        closing: what has to be released, however the run ends; for the caller to close.
        number: number of the run in its engine.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        actors: ActorPool,
        watch: Watcher,
        interrupts: InterruptGuard,
        closing: ExitStack,
        *,
        number: int,
    ) -> None:
        self._job, self._cluster, self._actors, self._watch, self._closing = job, cluster, actors, watch, closing
        self._number, self._replicas = number, job.strategy.replicas
        self._module, state = first_state(job.program, job.running_buffers)
        self._layout = state.layout
        self._job_parts: Any = ray.put(messages.pack(job))
        self._reader = NewsReader(job, watch)
        self._server = ServerClient(job, self._job_parts, number, actors, self._reader)
        self._running: dict[Any, tuple[messages.ReplicaAssignment, Coordinate]] = {}
        """Future result of a worker's actor -> the part of its replica, and its place."""
        self._places: dict[Any, tuple[Coordinate, Any]] = {}
        """Future location of an actor that has taken another's place -> that place, and the actor."""
        self._measured: dict[Coordinate, messages.WorkerMeasurements] = {}
        """Of the workers of replicas that have several."""
        self._dead: list[Any] = []
        self._spans: list[Span] = []
        waiting = tuple(range(self._replicas))
        self._status = messages.RunStatus("starting", Progress("starting", 0.0), None, waiting)
        self._status_request: Any = None
        self._requested_s = 0.0
        self._begun = self._interrupted = False
        self._stopped: str | None = None
        """The reason for which a callback has ended training."""
        self._interrupts = interrupts
        self._requests = ScaleRequests(job.out, job.strategy)
        self._room = fitting(job.strategy, cluster.cores())
        """How many replicas the cluster has had room for."""
        usual = usual_servers(cluster.hosts, self._layout.parameter_bytes)
        self._servers = job.strategy.servers or (1 if job.strategy.standby else usual)
        self._looked_s = self._measured_s = 0.0
        """When main last looked for requests; and for nodes that came or went."""

    def outcome(self) -> Outcome:
        """Run to the end."""
        self._watch(Progress("starting", 0.0))
        interrupts = self._interrupts
        try:
            self._start()
            self._poll(lambda: self._status.phase in ("scoring", "done"))
            self._poll(lambda: not self._running, until=time.monotonic() + self._job.timeout_s)
            running = sorted({part.replica for part, _ in self._running.values()})  # they did not end in time
            self._dead += [self._actors.replicas[replica] for replica in running]
            self._running.clear()
            late = [] if interrupts.insisted else running
            enough = min(interrupts.count, 1) + 1
            self._poll(lambda: self._status.phase == "done", enough=enough)
            result: messages.Result = self._server.call("result", late, interrupts.first)
            self._reader.take(result.news)
        except (WorkerError, CallbackError):
            self._save_end()
            raise
        finally:
            # Keep the actors that have finished for the next run, and end the others.
            grace_s, actors = 0.0 if interrupts.insisted else GRACE_S, self._actors
            if self._running and actors.server is not None:
                self._server.begin("interrupt")
            actors.settle({ref: actors.replicas[part.replica] for ref, (part, _) in self._running.items()}, grace_s)
            actors.drop(self._dead)
            actors.settle({actor.close.remote(): actor for actor in self._server.close()}, grace_s)
        model = write(self._module, messages.state_of(self._layout, result.state))
        spans = training_spans([*self._spans, *result.spans], result.began_ns) if self._job.trace else []
        account = self._server.noted(with_workers(result.account, self._job.strategy.mesh, self._measured))
        return Outcome(model.state_dict(), model, result.history, replace(account, stopped=self._stopped), spans)

    # ------------------------------------------------------------------------------------------------------ the phases

    def _start(self) -> None:
        job, actors, interrupts = self._job, self._actors, self._interrupts
        gpus = gpus_of_worker(job.strategy.device, job.strategy.workers, self._cluster.gpus)
        stop = lambda: interrupts.count > 0  # noqa: E731
        actors.start(
            job, self._room, self._servers, gpus, stop, lambda part: self._watch(Progress("starting", part / 2))
        )
        handles = actors.replicas[: self._room]
        self._server.open(handles)
        if not interrupts.count:
            for replica in range(len(handles)):
                self._run_replica(messages.ReplicaAssignment(self._number, replica, 0, 0, 0))
            timeout_s = job.timeout_s + (PREPARATION_S if job.strategy.compile else 0.0)
            deadline = time.monotonic() + timeout_s
            built = lambda: self._status.phase == "starting" and not self._status.waiting  # noqa: E731
            self._poll(built, until=deadline)
            if self._status.waiting and not interrupts.count:
                raise WaitTimeoutError(
                    f"main waited {timeout_s:g} s for replicas {list(self._status.waiting)} to build their model; "
                    "write a larger timeout_s="
                )
        others = {"coordinator": actors.server, "scorer": actors.scorer}
        if job.strategy.standby:
            others["standby"] = actors.standby
            others |= {f"standby of server {n}": standby for n, standby in enumerate(actors.other_standbys, 1)}
        others |= {f"server {number}": other for number, other in enumerate(actors.others, 1)}
        known = {role: actors.locations[actor]._asdict() for role, actor in others.items() if actor is not None}
        replicas = {
            place: actors.locations[worker]._asdict()
            for replica, actor in enumerate(handles)
            for place, worker in zip(self._workers_of(replica), actors.workers(actor), strict=True)
        }
        for path in self._closing.enter_context(
            workers_file(job.out, {"main": {"pid": os.getpid()}} | known, replicas)
        ):
            self._cluster.janitor.remove_on_exit(path)
        self._closing.enter_context(scaling_files(job.out))
        if not interrupts.count:
            self._server.call("begin")
            self._begun = True
            if job.on_death == "replace":
                actors.keep_spare()

    def _poll(self, done: Callable[[], bool], *, until: float = math.inf, enough: int = 2) -> None:
        """Handle events until ``done``, the time ``until``, or ``enough`` Ctrl-C; the first one ends training.

        So does a callback, once training has begun.
        """
        interrupts, server = self._interrupts, self._server
        while not done() and interrupts.count < enough and time.monotonic() < until:
            if self._begun and self._status.phase == "training" and self._stopped is None:
                self._stopped = self._watch.stopped
            if (interrupts.count or self._stopped is not None) and not self._interrupted:
                self._interrupted = True
                server.call("interrupt")
            if self._status_request is None:
                self._status_request, self._requested_s = server.begin("stand"), time.monotonic()
            waited = [self._status_request, *self._running, *self._places, *server.watches]
            ready, _ = ray.wait(waited, timeout=GLANCE_S)
            for ref in ready:
                if ref in server.watches:
                    server.check()
                elif ref == self._status_request:
                    self._take_status(ref)
                elif ref in self._places:
                    self._place(*self._places.pop(ref), ref)
                elif ref in self._running:  # a suspect's was dropped a moment ago
                    self._worker_ended(*self._running.pop(ref), ref)
            if self._status.phase == "training" and not interrupts.count:
                server.keep_standby()
                self._scale_if_asked()
            if time.monotonic() - self._requested_s > server.patience_s + TICK_S:
                late = WaitTimeoutError(
                    f"main waited {server.patience_s:g} s for the server to report the state of the run, and "
                    "received nothing; write a larger timeout_s= if an update of A takes so long"
                )
                if not server.guarded:
                    raise late
                server.recover(late)
                self._status_request = server.begin("stand")
                self._requested_s = time.monotonic()

    def _take_status(self, ref: Any) -> None:
        """Take a report of the server: show it, raise its failure, end the replicas that it suspects."""
        self._status_request, self._status = None, self._server.finish(ref, "stand")
        self._requested_s = time.monotonic()
        if self._interrupted and self._status.phase == "training":
            self._server.call("interrupt")  # a server that has taken over knows of none
        self._reader.take(self._status.news)
        if self._status.failure is not None:
            raise self._status.failure
        self._watch(self._status.progress)
        for member, reason in self._status.lost.items():
            self._server.lose(member, reason)
        for suspect in self._status.suspects:
            for part, place in [*self._running.values()]:
                if (part.replica, part.incarnation) == suspect[:2] and place == Coordinate(part.replica):
                    self._died(part, suspect.reason)

    def _worker_ended(self, part: messages.ReplicaAssignment, place: Coordinate, ref: Any) -> None:
        """Take the spans of a worker that ended; a replica of which one died leaves, or is replaced, as a whole."""
        name = place.label if self._job.strategy.spread else str(place.replica)
        try:
            ended: messages.Ended = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._server.check()
            raise WorkerError(f"replica {name} failed: {error}") from error
        except ray.exceptions.RayError as error:
            status = exit_reason(error)
            if not self._begun and not self._interrupted:
                self._end(part)
                raise WorkerError(f"replica {name} ended while it started: {status}") from error
            where = f"its worker of stage {place.stage}, shard {place.shard}: "
            self._died(part, where + status if self._job.strategy.spread else status)
            return
        if ended.failure is None:
            self._spans += ended.spans
            if ended.measured is not None:
                self._measured[place] = ended.measured
            if self._job.strategy.elastic and self._status.phase == "training":
                update_workers_file(self._job.out, place, None)
            return
        message = json.loads(ended.failure)
        if "refused" in message or not (self._begun and self._job.survives_deaths):
            raise failure_of(message)
        self._died(part, raised_text(message))

    def _scale_if_asked(self) -> None:
        """Have replicas join or leave, as a request or the room in the cluster says; look at both now and then."""
        now = time.monotonic()
        if now - self._looked_s < TICK_S:
            return
        self._looked_s = now
        replicas = self._requests.poll(lambda: int(self._server.call("staying")))
        if replicas is None and self._job.strategy.elastic and now - self._measured_s > ROOM_S:
            self._measured_s, before = now, self._room
            self._room = fitting(self._job.strategy, self._cluster.cores())
            replicas = None if self._room == before else self._room
        if replicas is None:
            return
        for part in self._server.call("scale", replicas):
            self._start_replica(part, self._actors.join(part.replica))

    def _start_replica(self, part: messages.ReplicaAssignment, actor: Any) -> None:
        """Have an actor be a replica from now on, while the others train."""
        self._server.call("replaced", part.replica, RayPeer(actor))
        self._run_replica(part)
        for place, worker in zip(self._workers_of(part.replica), self._actors.workers(actor), strict=True):
            located = worker.place.options(concurrency_group=CONTROL).remote()
            self._places[located] = place, worker

    def _died(self, part: messages.ReplicaAssignment, status: str) -> None:
        """Let the run go on without a replica, or with another actor in its place, or end it."""
        self._end(part)
        if self._job.on_death == "stop" and self._status.phase == "training" and not self._interrupted:
            raise WorkerError(
                f"replica {part.replica} died: {status}; write on_death='replace' to have another take its place"
            )
        again: messages.ReplicaAssignment | None = self._server.call("lost", part.replica, part.incarnation, status)
        if again is not None:
            self._start_replica(again, self._actors.replace(part.replica))
            self._actors.keep_spare()

    def _end(self, part: messages.ReplicaAssignment) -> None:
        """End what is left of a replica, all of its workers."""
        actor = self._actors.replicas[part.replica]
        self._dead.append(actor)
        for call, (other, _) in [*self._running.items()]:
            if (other.replica, other.incarnation) == (part.replica, part.incarnation):
                del self._running[call]
        self._actors.end(actor)

    def _place(self, place: Coordinate, actor: Any, ref: Any) -> None:
        """Note where an actor runs that has taken another's place."""
        with contextlib.suppress(ray.exceptions.RayError):
            location: WorkerLocation = ray.get(ref)
            self._actors.locations[actor] = location
            update_workers_file(self._job.out, place, location._asdict())

    def _run_replica(self, part: messages.ReplicaAssignment) -> None:
        """Start a replica in its actors."""
        actors = self._actors
        workers = actors.workers(actors.replicas[part.replica])
        listener = [workers[0].listen.options(concurrency_group=CONTROL).remote()] if self._job.strategy.spread else []
        servers = [actors.server, *actors.others]
        common = self._job_parts, part, servers, actors.locations[actors.server].node, versions()
        for number, (place, worker) in enumerate(zip(self._workers_of(part.replica), workers, strict=True)):
            self._running[worker.run.remote(*common, number, listener)] = part, place

    def _workers_of(self, replica: ReplicaId) -> list[Coordinate]:
        """Return the places of a replica's workers."""
        mesh = self._job.strategy.mesh
        return [mesh.coordinate(rank) for rank in mesh.replica_ranks(replica)]

    def _save_end(self) -> None:
        """Have the server save the run after a worker has failed, for A itself is good; do nothing where it is lost."""
        if self._begun and self._job.checkpoint is not None:
            with contextlib.suppress(WorkerError, WaitTimeoutError):
                self._reader.take(self._server.call("save_end"))
