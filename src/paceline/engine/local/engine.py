"""The local engine: processes on this host, in three ways.

::

    replicas of one worker            LocalRun: server in main, a worker process each (worker_main.py)
    replicas of several, own pace     LocalRun: the same, with a leader and followers each (replica_group_worker.py)
    replicas of several, synchronous  run_ranks: ranks of the distributed engine, main only waits; unless replicas that
                                      die are to be replaced or left out
"""

import gc
import os
from contextlib import ExitStack

import torch

from paceline.aggregation import Synchronous, text_of
from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import considerate, prompt
from paceline.core.delta import Change, Distance, InPlace
from paceline.core.errors import InputError
from paceline.core.registry import register
from paceline.device import CPU, count, refuse_absent
from paceline.engine import ENGINES
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.engine.local.arena import arena_device
from paceline.engine.local.fault_injection import EventScript
from paceline.engine.local.local_run import LocalRun
from paceline.engine.local.worker_processes import ENTRY
from paceline.engine.run_context import refuse_torchrun
from paceline.engine.spmd import launcher
from paceline.support import ENGINE_FEATURES

# Modules that the fork server imports, so that no worker has to.
PRELOAD = ("torch", "paceline.engine.local.worker_main", "paceline.engine.local.evaluation_process")

# For replicas with optimizers of their own: torch 2.13 imports this for the first one, which takes over a second.
WITH_OPTIMIZERS = (*PRELOAD, "torch._dynamo")

# For workers that compile: together these imports take three seconds.
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")

# For replicas of several workers, which export a model and have optimizers of their own.
SPMD = (*launcher.PRELOAD, ENGINES.modules["distributed"])

# For replicas of several workers, each at its own pace.
GROUPS = (*SPMD, "paceline.engine.local.replica_group_worker", "paceline.engine.local.evaluation_process")


@register("local")
class LocalEngine(Engine):
    """Runs jobs in processes on this host; keeps its fork server from one run to the next.

    Args:
        script: order of arrivals and faults of each run; for tests, and to repeat a run.
        entry: of the worker processes, "package.module:function"; for measurements of the engine without a model.
    """

    name = "local"
    features = ENGINE_FEATURES[name]

    def __init__(self, script: EventScript | None = None, entry: str = ENTRY) -> None:
        self.script, self._entry = script or EventScript(), entry
        self._fork_server: ForkServer | None = None
        self._preloaded: tuple[str, ...] = ()

    def refuse(self, job: Job) -> None:
        refuse_torchrun(self.name)
        refuse_absent(kind := job.strategy.device)
        policy = job.strategy.aggregation
        if kind == CPU.type or not isinstance(policy.delta, InPlace):
            return
        written = f"replicas of aggregation={text_of(policy)} write one A"
        if arena_device(kind) == CPU:
            raise InputError(
                f"{written}, but processes can't share the memory of device={kind}; write device=cpu, or "
                "aggregation=asynchronous"
            )
        if count(kind) > 1:
            raise InputError(
                f"{written}, on one device, but this host has {count(kind)} of device={kind}; write "
                "aggregation=asynchronous, or let this process see one (CUDA_VISIBLE_DEVICES=0)"
            )

    def run(self, job: Job, watch: Watcher) -> Outcome:
        strategy = job.strategy
        policy = strategy.aggregation
        lockstep = isinstance(policy, Synchronous) and not policy.backups and not job.survives_deaths
        if strategy.spread and lockstep and not job.on_losses:
            # All replicas make one update, each worker of its part of A: main has nothing to decide.
            ranks = (*SPMD, *COMPILER) if strategy.compile else SPMD
            return launcher.run_ranks(job, "distributed", self._fork_server_with(ranks), watch)
        own_optimizers = isinstance(policy.delta, (Change, Distance, InPlace))
        preloaded = GROUPS if strategy.spread else WITH_OPTIMIZERS if own_optimizers else PRELOAD
        fork_server = self._fork_server_with((*preloaded, *COMPILER) if strategy.compile else preloaded)
        # Where each worker has a core, main runs as soon as it is woken; else when one of them stops.
        scheduling = considerate() if strategy.workers > len(os.sched_getaffinity(0)) else prompt()
        with scheduling, ExitStack() as closing:
            closing.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # main's updates are of small vectors
            outcome = LocalRun(job, fork_server, watch, self.script, closing, self._entry).outcome()
        if strategy.device != CPU.type:
            gc.collect()  # objects of a run refer to each other, and would keep its memory of the device
        return outcome

    def _fork_server_with(self, modules: tuple[str, ...]) -> ForkServer:
        """Return the fork server; starts another where it lacks modules that this run needs, or was killed.

        A new one also imports the modules of the one before: runs of two kinds may alternate.
        """
        if self._fork_server is None or not self._fork_server.alive or not set(modules) <= set(self._preloaded):
            self.close()
            self._preloaded = tuple(dict.fromkeys((*self._preloaded, *modules)))
            self._fork_server = ForkServer.start(self._preloaded)
        return self._fork_server

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
