"""A worker process: one replica and its loop."""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
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
from paceline.engine.local.control_block import ControlBlock
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics, check_in_forward
from paceline.engine.worker_metrics import remove_workers_file
from paceline.replica.flat_state import FlatLayout
from paceline.trace.recorder import NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Run a worker process that is a replica of its own.

    Args:
        args: ``replica``, and ``remembers``, vectors of optimizer state in the arena.
        fds: arena, job, eventfds of this worker and of main, link to main, and a file for spans if there is one.
    """
    arena_fd, job_fd, own_fd, main_fd, link_fd, *trace = fds
    replica: ReplicaId = args["replica"]
    with connected(job_fd, link_fd, functools.partial(encode_failure, replica)) as (job, link):
        recorder = Recorder(replica, 0, 0, trace[0]) if trace else NullRecorder()
        set_threads_and_seed(job, replica)
        context, module = RunContext(job), job.program.build()
        layout = FlatLayout.of(module, job.running_buffers)
        arena, control = open_arena(context, layout, args["remembers"], arena_fd)
        client = connect(arena, control, replica, own_fd, main_fd)
        step_bytes = 2 * layout.parameter_bytes if context.delta_slots else 0
        metrics = WorkerMetrics(control.metrics, replica, recorder, step_bytes, context.per_step)
        check_in_forward(module, client)
        inner = context.replica(replica, module, layout, recorder)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes)
        worker = ClientWorker(context, replica, measured, client, metrics)
        link.send(json.dumps({"ready": replica, "pid": os.getpid()}).encode())
        worker.run(job.loop)


@contextlib.contextmanager
def connected(
    job_fd: int, link_fd: int, message: Callable[[BaseException], bytes | None]
) -> Iterator[tuple[Job, socket.socket]]:
    """Context manager of a worker process: its job and its link to main.

    An error inside is sent over the link and ends the process with exit code 1.

    Args:
        job_fd: of the job.
        link_fd: of the socket to main.
        message: error -> message for main; None: the error is raised as it is.
    """
    keep_freed_memory()
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_workers_file, job.out))
            yield job, link
        except BaseException as error:
            text = message(error)
            if text is None:
                raise
            with contextlib.suppress(OSError):  # main has exited, or has closed the link
                link.send(text)
            raise SystemExit(1) from error


def open_arena(
    context: RunContext, layout: FlatLayout, optimizer_vectors: int, fd: int | None = None
) -> tuple[ParameterArena, ControlBlock]:
    """Map the shared memory of a run in any of its processes: new, or that of ``fd``."""
    replicas, slots, workers = context.replicas, context.delta_slots, context.job.strategy.workers
    words = ControlBlock.size(replicas, slots, workers)
    arena = ParameterArena(ArenaLayout(layout, replicas, slots, optimizer_vectors, words), fd)
    return arena, ControlBlock(arena.words, replicas, workers)


def connect(
    arena: ParameterArena, control: ControlBlock, replica: ReplicaId, own_fd: int, main_fd: int
) -> SharedMemoryClient:
    """Build the client of a replica, with the eventfds that it and main are woken by."""
    wakeup = Wakeup(EventFd(own_fd), control.sleep_flag(replica))
    return SharedMemoryClient(arena, control, replica, wakeup, Wakeup(EventFd(main_fd), control.sleep_flag(None)))
