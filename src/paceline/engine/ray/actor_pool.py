"""The actors of an engine: started once, kept from run to run, made anew where one was lost."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.ray.cluster import missing_here
from paceline.engine.ray.evaluation import EvaluatorActor
from paceline.engine.ray.messages import WorkerLocation
from paceline.engine.ray.replica import ReplicaActor
from paceline.engine.ray.server import CONTROL, ServerActor

EACH_S: Seconds = 10.0
"""How long a process that imports torch may take to start beside others, on top of ``timeout_s``."""

GLANCE_S: Seconds = 0.1
"""How often main looks for Ctrl-C while it waits."""


@dataclass(frozen=True)
class Needs:
    """What actors a run needs."""

    replicas: int
    patient: bool
    """Whether nobody waits for a score."""
    gpus: float
    """Of each replica."""


class ActorPool:
    """All actors of an engine."""

    def __init__(self) -> None:
        self._needs = Needs(0, True, 0.0)
        self._places: dict[Any, WorkerLocation] = {}
        self._nodes: dict[Any, str] = {}
        """Where replicas were sent."""
        self.replicas: list[Any] = []
        self.server: Any = None
        self.scorer: Any = None

    def muster(self, needs: Needs, timeout_s: Seconds, stop: Callable[[], bool], told: Callable[[float], None]) -> None:
        """Start whoever is not there, and wait for them; not for replicas once ``stop`` says so, which then are fewer.

        Args:
            needs: of the run.
            timeout_s: beside what starting processes takes.
            stop: asked all the time.
            told: called with the fraction that is there.

        Raises:
            WaitTimeoutError: not all are there in time.
            PacelineError: one can't be started.
        """
        if needs.gpus != self._needs.gpus:
            self.drop(self.replicas)
        if needs.patient != self._needs.patient:
            self.drop([self.scorer])
        self._needs = needs
        self._start()
        self._wait(timeout_s, stop, told)

    def place(self, actor: Any) -> WorkerLocation:
        """Where an actor lives."""
        return self._places[actor]

    def another(self, replica: ReplicaId) -> Any:
        """A new actor in the place of one that has died."""
        self._forget(self.replicas[replica])
        self.replicas[replica] = self._new_replica()
        return self.replicas[replica]

    def drop(self, actors: Sequence[Any]) -> None:
        """End these; the next run has others."""
        for actor in [a for a in actors if a is not None]:
            self._forget(actor)
            ray.kill(actor)
        self.replicas = [r for r in self.replicas if r not in actors]
        self.server = None if self.server in actors else self.server
        self.scorer = None if self.scorer in actors else self.scorer

    def dismiss(self, running: Mapping[Any, Any], grace_s: Seconds) -> None:
        """Keep the actors that end well what they are at, and end the others.

        Args:
            running: what is to come of it -> the actor.
            grace_s: how long that may take.
        """
        ended = ray.wait([*running], num_returns=len(running), timeout=grace_s)[0] if running else []
        self.drop([actor for ref, actor in running.items() if ref not in ended or not _well(ref)])

    def close(self) -> None:
        """End all."""
        self.drop([*self.replicas, self.scorer, self.server])

    def _forget(self, actor: Any) -> None:
        self._places.pop(actor, None)

    def _start(self) -> None:
        near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if self.server is None:
            self.server = ray.remote(num_cpus=0, scheduling_strategy=near)(ServerActor).remote()
        if self.scorer is None:
            actor = ray.remote(num_cpus=0, scheduling_strategy=near)(EvaluatorActor)
            self.scorer = actor.remote(self._needs.patient)
        while len(self.replicas) < self._needs.replicas:
            self.replicas.append(self._new_replica())

    def _new_replica(self) -> Any:
        node = self._emptiest()
        # A GPU's node is for Ray to find.
        where = "SPREAD" if self._needs.gpus else NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(
            num_cpus=0, num_gpus=self._needs.gpus, scheduling_strategy=where, concurrency_groups={CONTROL: 1}
        )
        handle = actor(ReplicaActor).remote()
        self._nodes[handle] = node
        return handle

    def _emptiest(self) -> str:
        """The node with the fewest replicas for its cores.

        Ray 2.60's SPREAD, and its soft affinity, may put three of four actors on one node of two.
        """
        counts = Counter(self._nodes[replica] for replica in self.replicas)
        cores: dict[str, float] = {n["NodeID"]: n["Resources"].get("CPU", 1.0) for n in ray.nodes() if n["Alive"]}
        return min(cores, key=lambda node: (counts[node] + 1) / cores[node])

    def _wait(self, timeout_s: Seconds, stop: Callable[[], bool], told: Callable[[float], None]) -> None:
        everybody = [self.server, self.scorer, *self.replicas[: self._needs.replicas]]
        asked = {actor.place.remote(): actor for actor in everybody if actor not in self._places}
        bound = timeout_s + EACH_S * len(asked)
        deadline = time.monotonic() + bound
        while asked and not (stop() and self._only_replicas(asked.values())):
            there, _ = ray.wait(list(asked), timeout=GLANCE_S)
            for ref in there:
                actor = asked.pop(ref)
                self._places[actor] = self._answered(ref)
            told(1 - len(asked) / len(everybody))
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {bound:g} s for {len(asked)} of {len(everybody)} Ray actors to start; write fewer "
                    "replicas=, or a larger timeout_s="
                )
        self.drop(list(asked.values()))

    def _only_replicas(self, actors: Iterable[Any]) -> bool:
        return all(actor in self.replicas for actor in actors)

    def _answered(self, ref: Any) -> WorkerLocation:
        try:
            place: WorkerLocation = ray.get(ref)
            return place
        except ray.exceptions.RayError as error:
            raise missing_here(error) or _cant_start(error) from error


def _well(ref: Any) -> bool:
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return False
    return True


def how_it_died(error: BaseException) -> str:
    """Why an actor is no more, in words."""
    text = str(error)
    if "its node has died" in text:
        return "its node was lost"
    found = re.search(r"Worker exit detail: ([^.]*)", text)
    return f"its process ended ({found[1].strip()})" if found else text.strip().splitlines()[0]


def _cant_start(error: BaseException) -> PacelineError:
    return WorkerError(f"a Ray actor can't be started: {error}")


def share_of_gpus(gpus: int, replicas: int) -> float:
    """How much of a GPU each replica has.

    >>> share_of_gpus(2, 2), share_of_gpus(2, 3)
    (1.0, 0.5)
    """
    return 1.0 / math.ceil(replicas / gpus)
