"""The scorer process: scores snapshots off the training path."""

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.shipping import Parcel, unpack
from paceline.engine.base import Job
from paceline.engine.failure import SCORER, failure
from paceline.engine.local.desk import snapshot_in
from paceline.engine.scoring import Moment, Scorer
from paceline.replica.state import Layout


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry: scores what it is sent until the other end hangs up."""
    job_fd, link_fd, slot_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            _serve(unpack(Parcel(job_fd)), link, slot_fd, patient=args["patient"])
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(failure(SCORER, error))
            raise SystemExit(1) from error


def _serve(job: Job, link: socket.socket, slot_fd: int, *, patient: bool) -> None:
    torch.set_num_threads(1)
    if patient:
        # Only cycles that nobody else wants, so that scoring never bends the timing of the workers.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    module = job.program.build()
    snapshot = snapshot_in(slot_fd, Layout.of(module, job.running_buffers))
    scorer = Scorer(job.program, module)
    while moment := link.recv(1 << 16):
        record = scorer.score(snapshot, Moment(**json.loads(moment)))
        link.send(json.dumps(record.row()).encode())
