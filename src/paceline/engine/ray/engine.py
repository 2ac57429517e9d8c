"""The Ray engine: replicas, the evaluator and the parameter server as actors."""

import importlib.util
from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.device import CPU, refuse_absent
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.loop import InterruptGuard
from paceline.engine.ray.cluster import Cluster
from paceline.engine.run_context import refuse_torchrun
from paceline.support import ENGINE_FEATURES

if TYPE_CHECKING:
    from paceline.engine.ray.actor_pool import ActorPool


@register("ray")
class RayEngine(Engine):
    """Runs jobs on Ray; keeps its connection and its actors from one run to the next.

    The server's actor runs on the host of the driver, and writes the checkpoints there: no other host reads or writes
    their folder.

    Args:
        address: ``auto`` or ``HOST:PORT`` of a cluster that is running, on whose nodes paceline is installed; it is
            left running. None: a Ray of its own, which is reachable from this host alone and ends with the engine.

    Raises:
        InputError: Ray is not installed.
    """

    name = "ray"
    features = ENGINE_FEATURES[name]

    def __init__(self, address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise InputError(
                "engine='ray' needs Ray, which is not installed; write pip install 'paceline[ray]', or engine='local'"
            )
        self._address = address
        self._cluster: Cluster | None = None
        self._pool: ActorPool | None = None
        self._runs = 0

    @classmethod
    def from_address(cls, address: str | None) -> "RayEngine":
        if address == "":
            raise InputError("engine='ray:' names no cluster; write engine='ray:auto' or engine='ray:HOST:PORT'")
        return cls(address)

    def refuse(self, job: Job) -> None:
        strategy = job.strategy
        refuse_torchrun(self.name)
        if self._address is None:
            refuse_absent(job.strategy.device)  # its own Ray has this host's; none is started to learn that
        elif strategy.device != CPU.type:
            self._cluster = self._cluster or Cluster(self._address)
            if not self._cluster.gpus:
                raise InputError(f"device={strategy.device}, but the Ray cluster has no GPU; write device=cpu")

    def run(self, job: Job, watch: Watcher) -> Outcome:
        from paceline.engine.ray.actor_pool import ActorPool
        from paceline.engine.ray.ray_run import RayRun

        with InterruptGuard(lambda: None, watch.heard) as interrupts, ExitStack() as closing:
            self._cluster = self._cluster or Cluster(self._address)
            self._pool = self._pool or ActorPool()
            self._runs += 1
            parts = job, self._cluster, self._pool, watch, interrupts, closing
            return RayRun(*parts, number=self._runs).outcome()

    def close(self) -> None:
        if self._pool is not None:
            pool = self._pool
            pool.drop(
                [*pool.replicas, pool.spare, pool.scorer, pool.server, *pool.others, pool.standby, *pool.other_standbys]
            )
            self._pool = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
