"""A worker process: one replica and its loop."""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from paceline.comm import liveness
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_pickle import SharedObject, unpack
from paceline.comm.wakeup import EventFd, Wakeup
from paceline.core.errors import encode_failure
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.client import SharedMemoryClient
from paceline.engine.local.control_block import ControlBlock, MetricsBlock
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics, check_in_forward
from paceline.engine.worker_metrics import remove_workers_file
from paceline.replica.flat_state import FlatLayout
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry: ``args`` name the replica, ``fds`` what it shares with the coordinator."""
    keep_freed_memory()
    store_fd, job_fd, mine, coordinator, link_fd, *trace = fds
    replica: ReplicaId = args["replica"]
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_workers_file, job.out))
            recorder = Recorder(replica, 0, 0, trace[0]) if trace else NullRecorder()
            _carry(job, replica, args["remembers"], store_fd, EventFd(mine), EventFd(coordinator), link, recorder)
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(encode_failure(replica, error))
            raise SystemExit(1) from error


def _carry(
    job: Job,
    replica: ReplicaId,
    remembers: int,
    store_fd: int,
    mine: EventFd,
    coordinator: EventFd,
    link: socket.socket,
    recorder: AnyRecorder,
) -> None:
    set_threads_and_seed(job, replica)
    setup, module = RunContext.of(job), job.program.build()
    layout = FlatLayout.of(module, job.running_buffers)
    store, board = open_arena(setup, layout, remembers, store_fd)
    station = SharedMemoryClient(
        store, board, replica, Wakeup(mine, board.sleep_flag(replica)), Wakeup(coordinator, board.sleep_flag(None))
    )
    gauge = WorkerMetrics(
        board, replica, recorder, 2 * layout.parameter_bytes if setup.delta_slots else 0, setup.per_step
    )
    check_in_forward(module, station)
    inner = setup.replica(replica, module, layout, recorder)
    worker = ClientWorker(
        setup, replica, InstrumentedReplica(inner, gauge, station, layout.parameter_bytes), station, gauge
    )
    link.send(json.dumps({"ready": replica, "pid": os.getpid()}).encode())
    worker.run(job.loop)


def open_arena(
    setup: RunContext, layout: FlatLayout, remembers: int, fd: int | None = None
) -> tuple[ParameterArena, ControlBlock]:
    """The shared memory of a run, in any of its processes: new, or what lies behind ``fd``."""
    replicas, slots = setup.replicas, setup.delta_slots
    words = ControlBlock.size(replicas, slots) + MetricsBlock.size(_listed(setup))
    store = ParameterArena(ArenaLayout(layout, replicas, slots, remembers, words), fd)
    return store, ControlBlock(store.words, replicas)


def metrics_block(setup: RunContext, store: ParameterArena) -> MetricsBlock:
    """The figures of workers that are not the first ones of their replicas, in the shared memory of a run."""
    return MetricsBlock(store.words[8 * ControlBlock.size(setup.replicas, setup.delta_slots) :])


def _listed(setup: RunContext) -> int:
    """How many workers the sheet has room for: none where the board has a place for each."""
    strategy = setup.job.strategy
    return strategy.workers if strategy.spread else 0
