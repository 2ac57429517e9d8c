"""A worker process: one replica and its loop."""

import contextlib
import functools
import json
import math
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from paceline.comm import liveness
from paceline.comm.alarm import Alarm
from paceline.comm.bell import Bell
from paceline.comm.kernel import keep_freed_memory
from paceline.comm.shipping import Parcel, unpack
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.local.board import Board
from paceline.engine.local.gauge import Gauge
from paceline.engine.local.roster import remove_roster
from paceline.engine.local.station import Cancelled, Station
from paceline.engine.local.store import Plan, Store
from paceline.engine.setup import Setup
from paceline.engine.worker import TrainingEnded, Worker
from paceline.replica.autograd import step_seed
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.batches import as_batch
from paceline.replica.state import Layout, State
from paceline.step import step
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder

LOOKS = 4
"""How often a forward pass looks whether it has been called off, at least; a hook costs some microseconds."""

LONGEST_TRACEBACK = 20_000
"""Characters that are sent to main, at most six bytes each: one message must hold them."""


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


def failure(replica: ReplicaId, error: BaseException) -> bytes:
    """The message that tells main of an error."""
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    what = traceback.format_exception_only(error)[-1].strip()[:1000]
    return json.dumps({"failed": replica, "what": what, "traceback": text}).encode()


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
    setup = Setup.of(job)
    torch.set_num_threads(threads(job))
    torch.default_generator.manual_seed(step_seed(job.program.seed, replica, -1))  # what samples draw as they are read
    module = job.program.build()
    layout = Layout.of(module, job.running_buffers)
    store, board = lay_out(setup, layout, remembers, store_fd)
    station = Station(
        store, board, replica, Alarm(mine, board.sleeper(replica)), Alarm(coordinator, board.sleeper(None))
    )
    gauge = Gauge(board, replica, recorder, 2 * layout.parameter_bytes if setup.slots else 0, setup.per_step)
    watch(module, station)
    inner = setup.replica(replica, module, layout, recorder)
    worker = LocalWorker(setup, replica, Gauged(inner, gauge, station, layout.parameter_bytes), station, gauge)
    link.send(json.dumps({"ready": replica, "pid": os.getpid()}).encode())
    try:
        (job.loop or plain_loop)(worker)
    except TrainingEnded:
        pass
    finally:
        worker.close()


def lay_out(setup: Setup, layout: Layout, remembers: int, fd: int | None = None) -> tuple[Store, Board]:
    """The shared memory of a run, in any of its processes: new, or what lies behind ``fd``."""
    replicas, slots = setup.replicas, setup.slots
    store = Store(Plan(layout, replicas, slots, remembers, Board.size(replicas, slots)), fd)
    return store, Board(store.words, replicas)


def plain_loop(worker: Worker) -> None:
    """What ``train`` runs on every replica."""
    for batch in worker.batches():
        worker.step(batch)


def threads(job: Job) -> int:
    """CPU threads of one worker: what the strategy says, or an equal share of the cores."""
    return job.strategy.threads or max(1, len(os.sched_getaffinity(0)) // job.strategy.workers)


def watch(module: nn.Module, station: Station) -> None:
    """Let a forward pass end between two layers when its attempt is called off."""

    def look(*_: object) -> None:
        if station.called_off():
            raise Cancelled

    # Scripted layers take no hooks.
    layers = [m for m in module.modules() if next(m.children(), None) is None and not isinstance(m, ScriptModule)]
    for layer in layers[:: max(1, len(layers) // LOOKS)]:
        layer.register_forward_pre_hook(look)


class LocalWorker(Worker):
    """What the loop sees."""

    def __init__(self, setup: Setup, number: ReplicaId, replica: Replica, station: Station, gauge: Gauge) -> None:
        super().__init__(number, setup.replicas)
        self._replica, self._station, self._gauge = replica, station, gauge
        self._source = setup.batches(number)
        delay = setup.job.delay
        self._delays = delay.stream(number, setup.replicas, setup.job.program.seed) if delay else None
        self._clock = self._skip = 0

    @property
    def going(self) -> bool:
        if not self._station.opens():
            return True
        began = time.monotonic_ns()
        on = self._station.going()
        if self._clock == 0:
            self._gauge.start()
        else:
            self._gauge.waited(began, self._station.attempt)
        return on

    def batches(self) -> Iterator[Batch]:
        while self.going:
            skip, self._skip = self._skip, 0
            yield next(islice(self._source, skip, None))

    def step(self, batch: Any) -> float:
        if not self.going:
            raise TrainingEnded
        clock, self._clock = self._clock, self._clock + 1
        try:
            self._slow()
            loss = step(self._replica, self._station, as_batch(batch), clock)
        except Cancelled:
            self._called_off()
            return math.nan
        self._gauge.stepped(pushed=self._station.opens())
        return loss

    def close(self) -> None:
        """The loop has ended: end the loader's own workers, and write the last figures."""
        self._source.close()
        self._gauge.close()

    def _called_off(self) -> None:
        """The attempt ticks as if it had been made whole: its seeds, its delays and its batches are passed over."""
        undone = self._station.confirm()
        self._clock += undone
        self._skip += undone
        if self._delays is not None:
            deque(islice(self._delays, undone), maxlen=0)
        self._gauge.stepped(pushed=False, skipped=undone)

    def _slow(self) -> None:
        if self._delays is not None and (seconds := next(self._delays)) > 0:
            began = time.monotonic_ns()
            self._station.pause(seconds)
            self._gauge.spent("delay", began, self._station.attempt)
        if self._station.called_off():
            raise Cancelled


class Gauged(Replica):
    """A replica, measured."""

    def __init__(self, inner: Replica, gauge: Gauge, station: Station, delta_bytes: int) -> None:
        self._inner, self._gauge, self._station, self._bytes = inner, gauge, station, delta_bytes

    def adopt(self, state: State) -> None:
        began = time.monotonic_ns()
        self._inner.adopt(state)
        self._gauge.spent("pull", began, self._station.attempt, self._bytes)

    def advance(self, batch: Batch, clock: int) -> float:
        return self._inner.advance(batch, clock)

    def finish(self, out: State) -> Measured:
        began = time.monotonic_ns()
        measured = self._inner.finish(out)
        self._gauge.spent("push", began, self._station.attempt, self._bytes)
        return measured
