"""The local engine: processes on this host, in three ways.

::

    replicas of one worker            LocalRun: server in main, a worker process each (worker_main.py)
    replicas of several, own pace     LocalRun: the same, with a leader and followers each (replica_group_worker.py)
    replicas of several, synchronous  run_ranks: ranks of the distributed engine, main only waits; unless replicas that
                                      die are to be replaced or left out
"""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.aggregation import Aggregation, Synchronous, text_of
from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import considerate, prompt
from paceline.core.delta import Change, Distance, InPlace
from paceline.core.errors import InputError, PacelineError
from paceline.core.registry import register
from paceline.device import CPU, count, refuse_absent
from paceline.engine import ENGINES
from paceline.engine.base import Engine, Job, Outcome, Progress, Watcher
from paceline.engine.local.arena import arena_device
from paceline.engine.local.fault_injection import EventScript
from paceline.engine.local.local_run import LocalRun
from paceline.engine.local.worker_processes import ENTRY
from paceline.engine.run_context import refuse_torchrun
from paceline.engine.spmd import launcher
from paceline.engine.spmd.capturing import captured_for_workers
from paceline.strategy import Strategy
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


@contextmanager
def _beside(fork_server: ForkServer) -> Iterator[None]:
    """Context manager: torch leaves one core to a fork server that imports meanwhile.

    Threads that wait for one another do so busily: with one too many, a step of a small model takes ten times as long.
    """
    before = torch.get_num_threads()
    if fork_server.importing:
        torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _lockstep(policy: Aggregation[Any]) -> bool:
    return isinstance(policy, Synchronous) and not policy.backups


def _preload(strategy: Strategy, *, lockstep: bool) -> tuple[str, ...]:
    """Return what the fork server imports for runs under a strategy."""
    modules: tuple[str, ...]
    if strategy.spread:
        modules = SPMD if lockstep else GROUPS
    else:
        modules = WITH_OPTIMIZERS if isinstance(strategy.aggregation.delta, (Change, Distance, InPlace)) else PRELOAD
    if strategy.compile is True:
        modules += COMPILER
    return modules


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
        self._imported: tuple[str, ...] = ()
        """Modules of programs that the fork server has imported."""
        self._left_out = set[str]()
        """Those that it can't import without harm."""

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

    @contextmanager
    def warming_up(self, strategy: Strategy) -> Iterator[None]:
        with _beside(self._fork_server_with(_preload(strategy, lockstep=_lockstep(strategy.aggregation)))):
            yield

    def run(self, job: Job, watch: Watcher) -> Outcome:
        strategy = job.strategy
        # All replicas make one update, each worker of its part of A: main has nothing to decide.
        lockstep = _lockstep(strategy.aggregation) and not job.survives_deaths and not job.on_losses
        fork_server = self._fork_server_with(_preload(strategy, lockstep=lockstep), job.modules)

        def capture() -> bytes | None:
            watch(Progress("starting", None, work="capturing"))
            with _beside(fork_server):
                captured = captured_for_workers(job)
            say_if_importing()
            return captured

        def say_if_importing() -> None:
            if fork_server.importing:
                watch(Progress("starting", None, work="importing"))

        if strategy.spread and lockstep:
            return launcher.run_ranks(job, "distributed", partial(self._safe_fork_server, fork_server), watch, capture)
        if strategy.spread:
            job = replace(job, captured=capture())
        else:
            say_if_importing()
        fork_server = self._safe_fork_server(fork_server)
        # Where each worker has a core, main runs as soon as it is woken; else when one of them stops.
        scheduling = considerate() if strategy.workers > len(os.sched_getaffinity(0)) else prompt()
        with scheduling, ExitStack() as closing:
            closing.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # main's updates are of small vectors
            outcome = LocalRun(job, fork_server, watch, self.script, closing, self._entry).outcome()
        if strategy.device != CPU.type:
            gc.collect()  # objects of a run refer to each other, and would keep its memory of the device
        return outcome

    def _fork_server_with(self, modules: tuple[str, ...], of_program: tuple[str, ...] = ()) -> ForkServer:
        """Return the fork server, which imports in the background what it lacks; starts another if it was killed.

        A new one also imports the modules of the one before: runs of two kinds may alternate.

        Args:
            modules: that this run needs.
            of_program: that its workers would import.
        """
        if self._fork_server is None or not self._fork_server.alive:
            self.close()
            self._preloaded = tuple(dict.fromkeys((*self._preloaded, *modules)))
            self._fork_server, self._imported = ForkServer.start(self._preloaded), ()
        lacking = [name for name in modules if name not in self._preloaded]
        self._preloaded = (*self._preloaded, *lacking)
        added = [name for name in of_program if name not in self._imported and name not in self._left_out]
        self._imported = (*self._imported, *added)
        if lacking or added:
            self._fork_server.begin_import([*lacking, *added])
        return self._fork_server

    def _safe_fork_server(self, fork_server: ForkServer) -> ForkServer:
        """Wait until all is imported; return another fork server, without the programs' modules, where those do harm.

        They do if they end the fork server, keep it for long or leave threads in it: then workers import them.
        """
        try:
            report = fork_server.imported()
        except PacelineError:
            if not self._imported:
                raise
            report = None
        else:
            if report is None or not report.threads or not self._imported:
                return fork_server
        self._left_out.update(self._imported)
        self.close()
        return self._fork_server_with(self._preloaded)

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
