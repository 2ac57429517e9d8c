"""The main process of runs on Ray: the actors, which are kept from run to run, and one run.

Main starts the actors, watches for deaths and Ctrl-C, and gathers the results. The server's actor decides and counts;
main never waits for a Δ.
"""

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.errors import WaitTimeoutError, WorkerError, failure_text
from paceline.core.mesh import Coordinate
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.checkpointing import LAST_SAVE_S, tell
from paceline.engine.loop import TICK_S, InterruptGuard
from paceline.engine.ray import messages
from paceline.engine.ray.cluster import Cluster, missing_package
from paceline.engine.ray.evaluation_actor import EvaluatorActor
from paceline.engine.ray.replica import ReplicaActor
from paceline.engine.ray.server import ServerActor
from paceline.engine.run_context import first_state
from paceline.engine.worker_metrics import training_spans, workers_file
from paceline.replica.flat_state import write
from paceline.trace.spans import Span

# Time that a process that imports torch may take to start with others, in addition to timeout_s.
EACH_S: Seconds = 10.0

# Period at which main checks for Ctrl-C while it waits.
GLANCE_S: Seconds = 0.1

# Time in which actors may finish when a run is over, so that the next run can use them again.
GRACE_S: Seconds = 5.0


class ActorPool:
    """All actors of an engine."""

    def __init__(self) -> None:
        self._gpus = 0.0
        """GPUs of each replica."""
        self._idle_only = True
        """Whether the evaluator uses only idle cores: nothing waits for an evaluation."""
        self.locations: dict[Any, messages.WorkerLocation] = {}
        """The process and the node of each actor."""
        self._nodes: dict[Any, str] = {}
        """The node that each replica was scheduled on."""
        self.replicas: list[Any] = []
        self.server: Any = None
        self.scorer: Any = None

    def start(self, job: Job, gpus: float, stop: Callable[[], bool], progress: Callable[[float], None]) -> None:
        """Start the actors that a job lacks and wait for them; once ``stop`` returns True, for replicas no longer.

        Replicas that have not started by then are dropped.

        Args:
            job: to run; its ``timeout_s`` is in addition to the time that starting processes takes.
            gpus: of each replica; a part of one where replicas share it.
            stop: called all the time.
            progress: called with the fraction of actors that have started.

        Raises:
            WaitTimeoutError: not all have started in time.
            PacelineError: one can't be started.
        """
        count, idle_only = job.strategy.replicas, job.budget.until is None
        if gpus != self._gpus:
            self.drop(self.replicas)
        if idle_only != self._idle_only:
            self.drop([self.scorer])
        self._gpus, self._idle_only = gpus, idle_only
        near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if self.server is None:
            self.server = ray.remote(num_cpus=0, scheduling_strategy=near)(ServerActor).remote()
        if self.scorer is None:
            self.scorer = ray.remote(num_cpus=0, scheduling_strategy=near)(EvaluatorActor).remote(idle_only)
        while len(self.replicas) < count:
            self.replicas.append(self._new_replica())

        actors = [self.server, self.scorer, *self.replicas[:count]]
        pending = {actor.place.remote(): actor for actor in actors if actor not in self.locations}
        bound = job.timeout_s + EACH_S * len(pending)
        deadline = time.monotonic() + bound
        while pending and not (stop() and all(actor in self.replicas for actor in pending.values())):
            for ref in ray.wait(list(pending), timeout=GLANCE_S)[0]:
                try:
                    self.locations[pending.pop(ref)] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise missing_package(error) or WorkerError(f"a Ray actor can't be started: {error}") from error
            progress(1 - len(pending) / len(actors))
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {bound:g} s for {len(pending)} of {len(actors)} Ray actors to start; write fewer "
                    "replicas=, or a larger timeout_s="
                )
        self.drop(list(pending.values()))

    def replace(self, replica: ReplicaId) -> Any:
        """Start and return an actor in place of one that has died."""
        self.locations.pop(self.replicas[replica], None)
        self.replicas[replica] = self._new_replica()
        return self.replicas[replica]

    def drop(self, actors: Sequence[Any]) -> None:
        """Kill these actors; the next run starts others."""
        for actor in [a for a in actors if a is not None]:
            self.locations.pop(actor, None)
            ray.kill(actor)
        self.replicas = [r for r in self.replicas if r not in actors]
        self.server = None if self.server in actors else self.server
        self.scorer = None if self.scorer in actors else self.scorer

    def settle(self, running: Mapping[Any, Any], grace_s: Seconds) -> None:
        """Keep the actors whose calls end without an error in time, and kill the others.

        Args:
            running: reference of a call -> its actor.
            grace_s: longest wait.
        """
        failed = dict(running)
        for ref in ray.wait([*running], num_returns=len(running), timeout=grace_s)[0] if running else []:
            try:
                ray.get(ref)
            except ray.exceptions.RayError:
                continue
            del failed[ref]
        self.drop(list(failed.values()))

    def _new_replica(self) -> Any:
        """Start a replica on the node with the fewest replicas for its cores.

        Ray 2.60's SPREAD, and its soft affinity, may put three of four actors on one node of two.
        """
        counts = Counter(self._nodes[replica] for replica in self.replicas)
        cores: dict[str, float] = {n["NodeID"]: n["Resources"].get("CPU", 1.0) for n in ray.nodes() if n["Alive"]}
        node = min(cores, key=lambda node: (counts[node] + 1) / cores[node])
        # Which node has a free GPU is Ray's to find.
        strategy = "SPREAD" if self._gpus else NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(
            num_cpus=0, num_gpus=self._gpus, scheduling_strategy=strategy, concurrency_groups={messages.CONTROL: 1}
        )
        handle = actor(ReplicaActor).remote()
        self._nodes[handle] = node
        return handle


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
        replace: True if another actor takes the place of a replica that dies.
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
        replace: bool,
    ) -> None:
        self._job, self._cluster, self._actors, self._watch, self._closing = job, cluster, actors, watch, closing
        self._number, self._replicas = number, job.strategy.replicas
        self._replace = replace if job.on_death is None else job.on_death == "replace"
        self._module, state = first_state(job.program, job.running_buffers)
        self._layout = state.layout
        self._job_parts: Any = ray.put(messages.pack(job))
        self._running: dict[Any, ReplicaId] = {}
        """Future result of a replica's actor -> the replica."""
        self._dead: list[Any] = []
        self._spans: list[Span] = []
        self._status = messages.RunStatus("starting", Progress("starting", 0.0), None, ())
        self._status_request: Any = None
        self._requested_s = 0.0
        self._begun = self._interrupted = False
        self._interrupts = interrupts
        # The server answers nobody while it writes the last checkpoint.
        self._patience_s = job.timeout_s + (LAST_SAVE_S if job.checkpoint is not None else 0.0)
        self._told = 0
        """How many of the server's sentences the user was told."""

    def outcome(self) -> Outcome:
        """Run to the end."""
        self._watch(Progress("starting", 0.0))
        interrupts = self._interrupts
        try:
            self._start()
            self._poll(lambda: self._status.phase in ("scoring", "done"))
            self._poll(lambda: not self._running, until=time.monotonic() + self._job.timeout_s)
            running = sorted(self._running.values())  # they did not end by themselves in time
            self._dead += [self._actors.replicas[replica] for replica in running]
            self._running.clear()
            late = [] if interrupts.insisted else running
            enough = min(interrupts.count, 1) + 1
            self._poll(lambda: self._status.phase == "done", enough=enough)
            result: messages.Result = self._get(self._ask("result", late, interrupts.first, self._told))
            self._tell(result.sentences)
        except WorkerError:
            self._save_end()
            raise
        finally:
            # Keep the actors that have finished for the next run, and end the others.
            grace_s, actors = 0.0 if interrupts.insisted else GRACE_S, self._actors
            if self._running:
                self._ask("interrupt")
            actors.settle({ref: actors.replicas[replica] for ref, replica in self._running.items()}, grace_s)
            actors.drop(self._dead)
            actors.settle({actor.close.remote(): actor for actor in (actors.server, actors.scorer) if actor}, grace_s)
        model = write(self._module, messages.state_of(self._layout, result.state))
        spans = training_spans([*self._spans, *result.spans], result.began_ns) if self._job.trace else []
        return Outcome(model.state_dict(), model, result.history, result.account, spans)

    # ------------------------------------------------------------------------------------------------------ the phases

    def _start(self) -> None:
        job, actors, interrupts = self._job, self._actors, self._interrupts
        on_gpus = job.strategy.device.startswith("cuda")
        gpus = 1.0 / math.ceil(self._replicas / self._cluster.gpus) if on_gpus else 0.0
        stop = lambda: interrupts.count > 0  # noqa: E731
        actors.start(job, gpus, stop, lambda part: self._watch(Progress("starting", part / 2)))
        handles = actors.replicas[: self._replicas]
        self._get(actors.server.open.remote(self._number, self._job_parts, handles, actors.scorer))
        actors.scorer.open.remote(self._job_parts)
        if not interrupts.count:
            for replica in range(self._replicas):
                self._run_replica(replica, 0, 0)
            deadline = time.monotonic() + job.timeout_s
            built = lambda: self._status.phase == "starting" and not self._status.waiting  # noqa: E731
            self._poll(built, until=deadline)
            if self._status.waiting and not interrupts.count:
                raise WaitTimeoutError(
                    f"main waited {job.timeout_s:g} s for replicas {list(self._status.waiting)} to build their model; "
                    "write a larger timeout_s="
                )
        others = {"coordinator": actors.server, "scorer": actors.scorer}
        processes = {"main": {"pid": os.getpid()}} | {r: actors.locations[a]._asdict() for r, a in others.items()}
        replicas = {Coordinate(r): actors.locations[a]._asdict() for r, a in enumerate(handles)}
        for path in self._closing.enter_context(workers_file(job.out, processes, replicas)):
            self._cluster.janitor.remove_on_exit(path)
        if not interrupts.count:
            self._get(self._ask("begin"))
            self._begun = True

    def _poll(self, done: Callable[[], bool], *, until: float = math.inf, enough: int = 2) -> None:
        """Handle events until ``done``, the time ``until``, or ``enough`` Ctrl-C; the first one ends training."""
        interrupts = self._interrupts
        while not done() and interrupts.count < enough and time.monotonic() < until:
            if interrupts.count and not self._interrupted:
                self._interrupted = True
                self._get(self._ask("interrupt"))
            if self._status_request is None:
                self._status_request, self._requested_s = self._ask("stand", self._told), time.monotonic()
            ready, _ = ray.wait([self._status_request, *self._running], timeout=GLANCE_S)
            for ref in ready:
                if ref != self._status_request:
                    self._replica_ended(self._running.pop(ref), ref)
                    continue
                self._status_request, self._requested_s = None, time.monotonic()
                self._status = self._get(ref)
                self._tell(self._status.sentences)
                if self._status.failure is not None:
                    raise self._status.failure
                self._watch(self._status.progress)
            if time.monotonic() - self._requested_s > self._patience_s + TICK_S:
                raise WaitTimeoutError(
                    f"main waited {self._patience_s:g} s for the server to report the state of the run, and "
                    "received nothing; write a larger timeout_s= if an update of A takes so long"
                )

    def _replica_ended(self, replica: ReplicaId, ref: Any) -> None:
        """Take the spans of a replica that ended; one that died leaves, or is replaced."""
        try:
            ended: messages.Ended = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._get(self._actors.server.place.remote())  # raises if it is the server that was lost
            raise WorkerError(f"replica {replica} failed: {error}") from error
        except ray.exceptions.RayError as error:
            status = exit_reason(error)
            self._dead.append(self._actors.replicas[replica])
            if not self._begun and not self._interrupted:
                raise WorkerError(f"replica {replica} ended while it started: {status}") from error
            self._died(replica, status)
            return
        if ended.failure is None:
            self._spans += ended.spans
            return
        message = json.loads(ended.failure)
        if not (self._begun and self._job.survives_deaths):
            raise WorkerError(failure_text(message))
        self._dead.append(self._actors.replicas[replica])
        self._died(replica, f"raised {message['what']}")

    def _died(self, replica: ReplicaId, status: str) -> None:
        """Let the run go on without a replica, or with another in its place, or end it."""
        if self._job.on_death == "stop" and self._status.phase == "training" and not self._interrupted:
            raise WorkerError(
                f"replica {replica} died: {status}; write on_death='replace' to have another take its place"
            )
        again = self._get(self._ask("lost", replica, status, self._replace))
        if again is not None:
            self._get(self._ask("replaced", replica, self._actors.replace(replica)))
            self._run_replica(replica, *again)

    def _run_replica(self, replica: ReplicaId, attempt: Clock, micro_steps: int) -> None:
        """Start a replica in its actor, after ``attempt`` attempts and ``micro_steps`` of a dead one."""
        actors = self._actors
        assignment = messages.ReplicaAssignment(
            self._number, replica, attempt, micro_steps, actors.locations[actors.server]
        )
        self._running[actors.replicas[replica].run.remote(self._job_parts, assignment, actors.server)] = replica

    def _save_end(self) -> None:
        """Have the server save the run after a worker has failed, for A itself is good; do nothing where it is lost."""
        if self._begun and self._job.checkpoint is not None:
            with contextlib.suppress(WorkerError, WaitTimeoutError):
                self._tell(self._get(self._ask("save_end", self._told)))

    def _tell(self, sentences: Sequence[str]) -> None:
        """Tell the user what the server says."""
        self._told += len(sentences)
        for sentence in sentences:
            tell(sentence)

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the server's session; return the future result."""
        return self._actors.server.ask.remote(method, *args)

    def _get(self, ref: Any) -> Any:
        """Wait for a result of the server."""
        try:
            return ray.get(ref, timeout=self._patience_s)
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"the server failed: {error.cause}\n\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"the server died, and A with it: {exit_reason(error)}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeoutError(
                f"main waited {self._patience_s:g} s for the server's answer; write a larger timeout_s="
            ) from error


def exit_reason(error: BaseException) -> str:
    """Describe why an actor has died."""
    text = str(error)
    if "its node has died" in text:
        return "its node was lost"
    detail = re.search(r"Worker exit detail: ([^.]*)", text)
    return f"its process ended ({detail[1].strip()})" if detail else text.strip().splitlines()[0]
