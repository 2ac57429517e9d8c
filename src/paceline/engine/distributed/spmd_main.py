"""One rank of a run whose processes somebody else on this host has made, who hears how it goes and what came of it."""

import contextlib
import functools
import pickle
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from paceline.comm import liveness
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import SharedObject, share, unpack
from paceline.engine.base import Job, Outcome, Progress
from paceline.engine.distributed.engine import DistributedEngine
from paceline.engine.remote_errors import kind_and_text
from paceline.engine.spmd.process_group import BACKEND, file_rendezvous
from paceline.engine.workers_file import remove_workers_file


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry.

    Args:
        args: ``rank``, ``size`` and ``store``, the path of a file by which ranks meet.
        fds: the job, and a socket on which is told how it goes, as pickled tuples.
    """
    keep_freed_memory()
    job_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_workers_file, job.out))
            file_rendezvous(args["rank"], args["size"], args["store"], job.timeout_s)
            _tell(link, args["rank"], _carried(job, args["rank"], link))
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(pickle.dumps(("failed", *kind_and_text(args["rank"], error))))
            raise SystemExit(1) from error


def _carried(job: Job, rank: int, link: socket.socket) -> Outcome:
    def watch(progress: Progress) -> None:
        if rank == 0:
            link.send(pickle.dumps(("progress", progress)))

    try:
        with DistributedEngine(BACKEND) as engine:
            return engine.run(job, watch)
    finally:
        dist.destroy_process_group()


def _tell(link: socket.socket, rank: int, outcome: Outcome) -> None:
    if rank:
        return
    parcel = share((dict(outcome.state), list(outcome.history), outcome.account, list(outcome.spans)), SpillAllocator())
    socket.send_fds(link, [pickle.dumps(("done",))], [parcel.fd])
