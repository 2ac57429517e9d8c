"""One run on Ray, as main sees it: it starts the actors, watches, notices deaths and Ctrl-C, and gathers the results.

The server decides and counts; main never waits for a Δ.
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
from paceline.engine.ray.actor_pool import GLANCE_S, ActorPool, Needs, how_it_died, share_of_gpus
from paceline.engine.ray.cluster import Cluster
from paceline.engine.ray.messages import Ended, ReplicaAssignment, Result, RunStatus, pack, state_of
from paceline.engine.run_context import first_state
from paceline.engine.worker_metrics import WorkersFile, training_spans
from paceline.replica.flat_state import write
from paceline.trace.spans import Span

GRACE_S: Seconds = 5.0
"""How long actors may take to end what they are at when a run is over, so that the next one need not start others."""


class RayRun:
    """One run.

    Args:
        job: what is run.
        cluster: where.
        crew: the engine's actors.
        watch: told how it stands.
        closing: what has to be let go of, however it ends; for the caller to close.
        number: which run of its engine.
        replace: whether another takes the place of a replica that dies.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        crew: ActorPool,
        watch: Watcher,
        closing: ExitStack,
        *,
        number: int,
        replace: bool,
    ) -> None:
        self._job, self._cluster, self._crew, self._watch, self._closing = job, cluster, crew, watch, closing
        self._number, self._replace, self._replicas = number, replace, job.strategy.replicas
        self._module, state = first_state(job.program, job.running_buffers)
        self._layout = state.layout
        self._parts: Any = ray.put(pack(job))
        self._carried: dict[Any, ReplicaId] = {}
        """What a replica's run comes to, once it has -> which it is."""
        self._dead: list[Any] = []
        self._spans: list[Span] = []
        self._standing = RunStatus("starting", Progress("starting", 0.0), None, ())
        self._standing_asked: Any = None
        self._asked_s = 0.0
        self._begun = self._interrupted = False

    def outcome(self) -> Outcome:
        """Run to the end."""
        with InterruptGuard(lambda: None) as interrupts:
            self._watch(Progress("starting", 0.0))
            try:
                self._start(interrupts)
                self._attend(lambda: self._standing.phase in ("scoring", "done"), interrupts)
                late = self._leave(interrupts)
                enough = min(interrupts.count, 1) + 1
                self._attend(lambda: self._standing.phase == "done", interrupts, enough=enough)
                result: Result = self._answer(self._ask("result", late, interrupts.count > 0))
            finally:
                self._clear_up(0.0 if interrupts.insisted else GRACE_S)
        return self._outcome(result)

    # ------------------------------------------------------------------------------------------------------- the phases

    def _start(self, interrupts: InterruptGuard) -> None:
        job, crew = self._job, self._crew
        gpu = share_of_gpus(self._cluster.gpus, self._replicas) if job.strategy.device.startswith("cuda") else 0.0
        needs = Needs(self._replicas, patient=job.budget.until is None, gpus=gpu)
        crew.muster(
            needs, job.timeout_s, lambda: interrupts.count > 0, lambda part: self._watch(Progress("starting", part / 2))
        )
        handles = crew.replicas[: self._replicas]
        self._answer(crew.server.open.remote(self._number, self._parts, handles, crew.scorer))
        crew.scorer.open.remote(self._parts)
        if not interrupts.count:
            for replica in range(self._replicas):
                self._carry(replica, 0, 0)
            self._await_models(interrupts)
        self._write_roster()
        if not interrupts.count:
            self._answer(self._ask("begin"))
            self._begun = True

    def _await_models(self, interrupts: InterruptGuard) -> None:
        deadline = time.monotonic() + self._job.timeout_s
        self._attend(
            lambda: self._standing.phase == "starting" and not self._standing.waiting, interrupts, until=deadline
        )
        if self._standing.waiting and not interrupts.count:
            raise WaitTimeoutError(
                f"main waited {self._job.timeout_s:g} s for replicas {list(self._standing.waiting)} to build their "
                "model; write a larger timeout_s="
            )

    def _leave(self, interrupts: InterruptGuard) -> list[ReplicaId]:
        """Let the replicas end by themselves; returns those that did not in time."""
        deadline = time.monotonic() + self._job.timeout_s
        self._attend(lambda: not self._carried, interrupts, until=deadline)
        late = sorted(self._carried.values())
        self._dead += [self._crew.replicas[replica] for replica in late]
        self._carried.clear()
        return [] if interrupts.insisted else late

    def _attend(
        self, done: Callable[[], bool], interrupts: InterruptGuard, *, until: float = math.inf, enough: int = 2
    ) -> None:
        """Watch until something is so, the time has come, or there were ``enough`` Ctrl-C; the first ends training."""
        while not done() and interrupts.count < enough and time.monotonic() < until:
            if interrupts.count and not self._interrupted:
                self._interrupted = True
                self._answer(self._ask("interrupt"))
            if self._standing_asked is None:
                self._standing_asked, self._asked_s = self._ask("stand"), time.monotonic()
            ready, _ = ray.wait([self._standing_asked, *self._carried], timeout=GLANCE_S)
            for ref in ready:
                self._hear(ref)
            if time.monotonic() - self._asked_s > self._job.timeout_s + TICK_S:
                raise WaitTimeoutError(
                    f"main waited {self._job.timeout_s:g} s for the server to say how the run stands, and heard "
                    "nothing; write a larger timeout_s= if an update of A takes so long"
                )

    # ------------------------------------------------------------------------------------------------ what main is told

    def _hear(self, ref: Any) -> None:
        if ref != self._standing_asked:
            self._ended(self._carried.pop(ref), ref)
            return
        self._standing_asked, self._asked_s = None, time.monotonic()
        self._standing = self._answer(ref)
        if self._standing.failure is not None:
            raise self._standing.failure
        self._watch(self._standing.progress)

    def _ended(self, replica: ReplicaId, ref: Any) -> None:
        try:
            ended: Ended = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            self._answer(self._crew.server.place.remote())  # raises where it is the server that was lost
            raise WorkerError(f"replica {replica} failed: {error}") from error
        except ray.exceptions.RayError as error:
            self._lost(replica, how_it_died(error))
            return
        if ended.failure is not None:
            raise WorkerError(failure_text(json.loads(ended.failure)))
        self._spans += ended.spans

    def _lost(self, replica: ReplicaId, how: str) -> None:
        self._dead.append(self._crew.replicas[replica])
        if not self._begun and not self._interrupted:
            raise WorkerError(f"replica {replica} ended while it started: {how}")
        again = self._answer(self._ask("lost", replica, how, self._replace))
        if again is not None:
            self._answer(self._crew.server.replaced.remote(replica, self._crew.another(replica)))
            self._carry(replica, *again)

    def _carry(self, replica: ReplicaId, attempt: Clock, micro_steps: int) -> None:
        """Have a replica's actor live its life."""
        crew = self._crew
        post = ReplicaAssignment(self._number, replica, attempt, micro_steps, crew.place(crew.server))
        self._carried[crew.replicas[replica].run.remote(self._parts, post, crew.server)] = replica

    def _ask(self, what: str, *args: Any) -> Any:
        return self._crew.server.ask.remote(what, *args)

    def _answer(self, ref: Any) -> Any:
        """What the server answers."""
        try:
            return ray.get(ref, timeout=self._job.timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"the server failed: {error.cause}\n\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"the server died, and A with it: {how_it_died(error)}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeoutError(
                f"main waited {self._job.timeout_s:g} s for the server's answer; write a larger timeout_s="
            ) from error

    # ----------------------------------------------------------------------------------------------- the end of the run

    def _write_roster(self) -> None:
        crew, out = self._crew, self._job.out
        actors = {"coordinator": crew.server, "scorer": crew.scorer}
        others = {"main": {"pid": os.getpid()}} | {role: crew.place(a)._asdict() for role, a in actors.items()}
        replicas = {Coordinate(r): crew.place(a)._asdict() for r, a in enumerate(crew.replicas[: self._replicas])}
        roster = WorkersFile(out, others, replicas)
        self._closing.callback(roster.close)
        for path in roster.files:
            self._cluster.mind(path)

    def _outcome(self, result: Result) -> Outcome:
        model = write(self._module, state_of(self._layout, result.state))
        spans = training_spans([*self._spans, *result.spans], result.began_ns) if self._job.trace else []
        return Outcome(model.state_dict(), model, result.history, result.account, spans)

    def _clear_up(self, grace_s: Seconds) -> None:
        """Keep the actors that have nothing to do any more, end the others."""
        crew = self._crew
        running = {ref: crew.replicas[replica] for ref, replica in self._carried.items()}
        if running:
            self._ask("interrupt")
        crew.dismiss(running, grace_s)
        crew.drop(self._dead)
        crew.dismiss({actor.close.remote(): actor for actor in (crew.server, crew.scorer) if actor}, grace_s)
