"""A worker process: one replica and its loop."""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from paceline.comm import liveness
from paceline.comm.alarm import Alarm
from paceline.comm.bell import Bell
from paceline.comm.kernel import keep_freed_memory
from paceline.comm.shipping import Parcel, unpack
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.failure import failure
from paceline.engine.gauge import Gauge, Gauged
from paceline.engine.local.board import Board
from paceline.engine.local.sheet import Sheet
from paceline.engine.local.station import LocalStation
from paceline.engine.local.store import Plan, Store
from paceline.engine.roster import remove_roster
from paceline.engine.setup import Setup, settle
from paceline.engine.station import watch
from paceline.engine.worker import StationWorker
from paceline.replica.state import Layout
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry: ``args`` name the replica, ``fds`` what it shares with the coordinator."""
    keep_freed_memory()
    store_fd, job_fd, mine, coordinator, link_fd, *trace = fds
    replica: ReplicaId = args["replica"]
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(Parcel(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_roster, job.out))
            recorder = Recorder(replica, 0, 0, trace[0]) if trace else NullRecorder()
            _carry(job, replica, args["remembers"], store_fd, Bell(mine), Bell(coordinator), link, recorder)
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(failure(replica, error))
            raise SystemExit(1) from error


def _carry(
    job: Job,
    replica: ReplicaId,
    remembers: int,
    store_fd: int,
    mine: Bell,
    coordinator: Bell,
    link: socket.socket,
    recorder: AnyRecorder,
) -> None:
    settle(job, replica)
    setup, module = Setup.of(job), job.program.build()
    layout = Layout.of(module, job.running_buffers)
    store, board = lay_out(setup, layout, remembers, store_fd)
    station = LocalStation(
        store, board, replica, Alarm(mine, board.sleeper(replica)), Alarm(coordinator, board.sleeper(None))
    )
    gauge = Gauge(board, replica, recorder, 2 * layout.parameter_bytes if setup.slots else 0, setup.per_step)
    watch(module, station)
    inner = setup.replica(replica, module, layout, recorder)
    worker = StationWorker(setup, replica, Gauged(inner, gauge, station, layout.parameter_bytes), station, gauge)
    link.send(json.dumps({"ready": replica, "pid": os.getpid()}).encode())
    worker.run(job.loop)


def lay_out(setup: Setup, layout: Layout, remembers: int, fd: int | None = None) -> tuple[Store, Board]:
    """The shared memory of a run, in any of its processes: new, or what lies behind ``fd``."""
    replicas, slots = setup.replicas, setup.slots
    words = Board.size(replicas, slots) + Sheet.size(_listed(setup))
    store = Store(Plan(layout, replicas, slots, remembers, words), fd)
    return store, Board(store.words, replicas)


def sheet_of(setup: Setup, store: Store) -> Sheet:
    """The figures of workers that are not the first ones of their replicas, in the shared memory of a run."""
    return Sheet(store.words[8 * Board.size(setup.replicas, setup.slots) :])


def _listed(setup: Setup) -> int:
    """How many workers the sheet has room for: none where the board has a place for each."""
    strategy = setup.job.strategy
    return strategy.workers if strategy.spread else 0
