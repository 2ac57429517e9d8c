"""The local engine: real processes on this host."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from paceline.aggregation import Synchronous
from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import considerate, prompt
from paceline.core.delta import Change, Distance, InPlace
from paceline.core.registry import register
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.local.fault_injection import EventScript
from paceline.engine.local.run import LocalRun
from paceline.engine.local.worker_processes import ENTRY
from paceline.engine.run_context import refuse_absent_gpu, refuse_torchrun
from paceline.engine.spmd.launcher import SpmdLauncher, preload
from paceline.support import ENGINES

PRELOAD = ("torch", "paceline.engine.local.worker", "paceline.engine.local.evaluation")
"""What the fork server imports, so that no worker has to."""

WITH_OPTIMIZERS = (*PRELOAD, "torch._dynamo")
"""Where replicas have optimizers of their own: at the first, torch 2.13 imports this, which takes over a second."""

HOSTING = preload("distributed")
"""Where a replica is several processes, each with an optimizer of its own, and with a model to export."""

TEAMS = (*HOSTING, "paceline.engine.local.replica_group_worker", "paceline.engine.local.evaluation")
"""The same, and each replica goes on by itself."""


@register("local")
class LocalEngine(Engine):
    """Keeps its fork server from one run to the next.

    Args:
        script: the order of arrivals and the faults of each run; for tests, and to tell a run again.
        entry: of the worker processes, "package.module:function"; for measurements of the engine without a model.
    """

    name = "local"
    features = ENGINES[name]

    def __init__(self, script: EventScript | None = None, entry: str = ENTRY) -> None:
        self.script, self._entry = script or EventScript(), entry
        self._fork_server: ForkServer | None = None
        self._preloaded: tuple[str, ...] = ()

    def refuse(self, job: Job) -> None:
        refuse_torchrun(self.name)
        refuse_absent_gpu(job)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        if job.strategy.spread and _in_step(job):
            return SpmdLauncher(job, "distributed", self._fork_server_with(HOSTING), watch).outcome()
        fork_server = self._fork_server_for(job)
        with _one_thread(), _manners(job), ExitStack() as closing:
            return LocalRun(job, fork_server, watch, self.script, closing, self._entry).outcome()

    def _fork_server_for(self, job: Job) -> ForkServer:
        if job.strategy.spread:
            return self._fork_server_with(TEAMS)
        own = isinstance(job.strategy.aggregation.delta, (Change, Distance, InPlace))
        return self._fork_server_with(WITH_OPTIMIZERS if own else PRELOAD)

    def _fork_server_with(self, wanted: tuple[str, ...]) -> ForkServer:
        """The fork server, which stays from one run to the next unless it lacks what this one needs, or was killed.

        A new one also imports what the one before had: runs of two kinds may take turns.
        """
        if self._fork_server is None or not self._fork_server.alive or not set(wanted) <= set(self._preloaded):
            self.close()
            self._preloaded = tuple(dict.fromkeys((*self._preloaded, *wanted)))
            self._fork_server = ForkServer.start(self._preloaded)
        return self._fork_server

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


@contextmanager
def _one_thread() -> Iterator[None]:
    """The owner's part of the work is small vectors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _manners(job: Job) -> AbstractContextManager[None]:
    """How main comes in between its workers: at once where there is a core for each, else when one of them stops."""
    return considerate() if job.strategy.workers > len(os.sched_getaffinity(0)) else prompt()


def _in_step(job: Job) -> bool:
    """Whether all replicas make one update together, each worker of its part of A: then main has nothing to decide."""
    policy = job.strategy.aggregation
    return isinstance(policy, Synchronous) and not policy.backups
