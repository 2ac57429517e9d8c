"""The actors of an engine, which are kept from run to run."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.checkpoint.fingerprint import versions
from paceline.core.errors import InputError, WaitTimeoutError, WorkerError
from paceline.core.types import ReplicaId, Seconds
from paceline.device import CPU
from paceline.engine.base import Job
from paceline.engine.ray.actors import CONTROL, EvaluatorActor, ServerActor, WorkerLocation
from paceline.engine.ray.cluster import missing_package
from paceline.engine.ray.replica import ReplicaActor
from paceline.engine.scaling import next_hosts

# Time that a process that imports torch may take to start with others, in addition to timeout_s.
EACH_S: Seconds = 10.0

# Period at which main checks for Ctrl-C while it waits.
GLANCE_S: Seconds = 0.1


class ActorPool:
    """All actors of an engine."""

    def __init__(self) -> None:
        self._gpus = 0.0
        """GPUs of each replica."""
        self._idle_only = True
        """Whether the evaluator uses only idle cores: nothing waits for an evaluation."""
        self.locations: dict[Any, WorkerLocation] = {}
        """The process and the node of each actor."""
        self._nodes: dict[Any, str] = {}
        """The node that each worker was scheduled on."""
        self._workers = 1
        """Of each replica."""
        self._followers: dict[Any, list[Any]] = {}
        """The other workers of a replica of several, by its first one."""
        self.replicas: list[Any] = []
        self.spare: Any = None
        """Of a replica, to take a dead one's place; None: there is none."""
        self.server: Any = None
        self.others: list[Any] = []
        """The other servers, each of which has a slice of A."""
        self.standby: Any = None
        """Of the first server; None: there is none, or it is not known yet that it has started."""
        self.other_standbys: list[Any] = []
        """Of the other servers, in their order; None: there is none any more."""
        self.scorer: Any = None

    def start(
        self,
        job: Job,
        count: int,
        servers: int,
        gpus: float,
        stop: Callable[[], bool],
        progress: Callable[[float], None],
    ) -> None:
        """Start the actors that a job lacks and wait for them; once ``stop`` returns True, for replicas no longer.

        Replicas that have not started by then are dropped.

        Args:
            job: to run; its ``timeout_s`` is in addition to the time that starting processes takes.
            count: of replicas.
            servers: of A.
            gpus: of each replica; a part of one where replicas share it.
            stop: called all the time.
            progress: called with the fraction of actors that have started.

        Raises:
            WaitTimeoutError: not all have started in time.
            PacelineError: one can't be started.
        """
        idle_only = not job.live
        workers = job.strategy.mesh.per_replica
        if gpus != self._gpus or workers != self._workers:
            self.drop([*self.replicas, self.spare])
        if idle_only != self._idle_only:
            self.drop([self.scorer])
        self._gpus, self._idle_only, self._workers = gpus, idle_only, workers
        if self.server is None:
            self.server = new_server()
        self._spread_servers(servers, standby=job.strategy.standby > 0)
        if self.scorer is None:
            self.scorer = ray.remote(num_cpus=0, scheduling_strategy=here())(EvaluatorActor).remote(idle_only)
        while len(self.replicas) < count:
            self.replicas.append(self._new_replica())

        standbys = [self.standby, *self.other_standbys] if job.strategy.standby else []
        every_server = [self.server, *self.others, *standbys]
        replicas = [worker for replica in self.replicas[:count] for worker in self.workers(replica)]
        actors = [*every_server, self.scorer, *replicas]
        pending = {actor.place.remote(versions()): actor for actor in actors if actor not in self.locations}
        bound = job.timeout_s + EACH_S * len(pending)
        deadline = time.monotonic() + bound
        while pending and not (stop() and all(actor in replicas for actor in pending.values())):
            for ref in ray.wait(list(pending), timeout=GLANCE_S)[0]:
                try:
                    self.locations[pending.pop(ref)] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    if isinstance(refused := getattr(error, "cause", None), InputError):
                        raise refused from None
                    raise missing_package(error) or WorkerError(f"a Ray actor can't be started: {error}") from error
            progress(1 - len(pending) / len(actors))
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {bound:g} s for {len(pending)} of {len(actors)} Ray actors to start; write fewer "
                    "replicas=, or a larger timeout_s="
                )
        self.drop([replica for replica in self.replicas if {*self.workers(replica)} & {*pending.values()}])

    def workers(self, replica: Any) -> list[Any]:
        """Return all actors of a replica, the first one being that which stands for it."""
        return [replica, *self._followers.get(replica, ())]

    def keep_spare(self) -> None:
        """Start an actor that can be a replica at once, if there is none: to import torch takes seconds."""
        if self.spare is None and not self._gpus:
            self.spare = self._new_replica()

    def replace(self, replica: ReplicaId) -> Any:
        """Return an actor in place of one that has died: the spare one, or another."""
        self.end(self.replicas[replica])
        self.replicas[replica], self.spare = self.spare or self._new_replica(), None
        return self.replicas[replica]

    def join(self, replica: ReplicaId) -> Any:
        """Return an actor for a replica that joins: the one of its number that there was, or another."""
        while len(self.replicas) <= replica:
            self.replicas.append(self._new_replica())
        return self.replicas[replica]

    def drop(self, actors: Sequence[Any]) -> None:
        """Kill these actors; the next run starts others."""
        for actor in [a for a in actors if a is not None]:
            self.end(actor)
        self.replicas = [r for r in self.replicas if r not in actors]
        self.spare = None if self.spare in actors else self.spare
        self.server = None if self.server in actors else self.server
        self.others = [other for other in self.others if other not in actors]
        self.standby = None if self.standby in actors else self.standby
        self.other_standbys = [None if standby in actors else standby for standby in self.other_standbys]
        self.scorer = None if self.scorer in actors else self.scorer

    def end(self, actor: Any) -> None:
        """Kill an actor, and the other workers of a replica for which it stands."""
        for worker in self.workers(actor):
            self.locations.pop(worker, None)
            ray.kill(worker)
        self._followers.pop(actor, None)

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

    def _spread_servers(self, servers: int, *, standby: bool) -> None:
        """Have so many servers, on this node and those with higher addresses in turn; each has its standby on the next.

        The standby of an only server is on this node, where another takes its place if it has taken over.
        """
        nodes = nodes_in_turn()

        def on(number: int) -> Any:
            return new_server(NodeAffinitySchedulingStrategy(nodes[number % len(nodes)]["NodeID"], soft=False))

        others = servers - 1
        self.drop([*self.others[others:], *self.other_standbys[others if standby else 0 :]])
        self.others += [on(number) for number in range(len(self.others) + 1, servers)]
        if standby:
            kept = [*self.other_standbys[:others], *[None] * others][:others]
            self.other_standbys = [old or on(number + 1) for number, old in enumerate(kept, 1)]
            self.standby = self.standby or on(1 if others else 0)
        else:
            self.other_standbys = []

    def _new_replica(self) -> Any:
        """Start a replica: all of its workers on one node that has enough cores, or on several.

        Ray 2.60's SPREAD, and its soft affinity, may put three of four actors on one node of two, and its placement
        groups pack by resources of their own, which a node without a core to spare has not.
        """
        placed = Counter(self._nodes[worker] for replica in self.replicas for worker in self.workers(replica))
        cores: dict[str, float] = {n["NodeID"]: n["Resources"].get("CPU", 0.0) for n in nodes_in_turn()}
        workers = list[Any]()
        for node in next_hosts(self._workers, placed, cores):
            workers.append(ray.remote(**worker_options(node, self._gpus))(ReplicaActor).remote())
            self._nodes[workers[-1]] = node
        handle, *followers = workers
        if followers:
            self._followers[handle] = followers
        return handle


def gpus_of_worker(device: str, workers: int, gpus: int) -> float:
    """Return the part of a GPU that Ray is to reserve for each worker: several share one where there are fewer GPUs.

    Ray sets ``CUDA_VISIBLE_DEVICES``, or what other types have, so each worker sees its own GPU alone, as number 0.
    What Ray does not count as GPUs (those of Apple, say) workers of a host take in turn.

    >>> gpus_of_worker("cuda", 4, 4), gpus_of_worker("cuda", 4, 8), gpus_of_worker("cuda", 5, 4)
    (1.0, 1.0, 0.5)
    >>> gpus_of_worker("cpu", 4, 4), gpus_of_worker("mps", 2, 0)
    (0.0, 0.0)

    Args:
        device: type of device that workers compute on.
        workers: of all replicas.
        gpus: of all nodes.
    """
    return 1.0 / math.ceil(workers / gpus) if device != CPU.type and gpus else 0.0


def worker_options(node: str, gpus: float) -> dict[str, Any]:
    """Return Ray's options of a worker's actor, which is on this node; with GPUs on any that has enough of one free."""
    # Which node that is, is Ray's to find.
    strategy = "SPREAD" if gpus else NodeAffinitySchedulingStrategy(node, soft=False)
    placed = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy}
    return placed | {"concurrency_groups": {CONTROL: 1}}


def nodes_in_turn() -> list[dict[str, Any]]:
    """Return the nodes that live, by their addresses in turn, this one first: so `paceline plan` expects them."""
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
    first = [n["NodeID"] for n in nodes].index(own)
    return [*nodes[first:], *nodes[:first]]


def here() -> NodeAffinitySchedulingStrategy:
    """Return what keeps an actor on the node of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def new_server(place: NodeAffinitySchedulingStrategy | None = None) -> Any:
    """Start and return the actor of a server, or of its standby, on this node unless another place is named."""
    return ray.remote(num_cpus=0, scheduling_strategy=place or here())(ServerActor).remote()


def exit_reason(error: BaseException) -> str:
    """Describe why an actor has died."""
    text = str(error)
    if "its node has died" in text:
        return "its node was lost"
    detail = re.search(r"Worker exit detail: ([^.]*)", text)
    return f"its process ended ({detail[1].strip()})" if detail else text.strip().splitlines()[0]
