"""The actor of one replica: its loop, and its side of the server."""

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from paceline.comm.kernel import keep_freed_memory, memfd_create
from paceline.core.types import Clock, Nanoseconds
from paceline.engine.base import Job
from paceline.engine.failure import failure
from paceline.engine.figures import Notes
from paceline.engine.gauge import Gauge, Gauged
from paceline.engine.ray.freight import Bytes, unpack
from paceline.engine.ray.messages import Ended, Place, Post
from paceline.engine.ray.station import RayStation, Switch
from paceline.engine.setup import Setup, settle
from paceline.engine.station import watch
from paceline.engine.worker import StationWorker
from paceline.replica.state import Layout
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import Span

PINGS = 8
"""How often another host's clock is asked for; the quickest answer counts."""


def place() -> Place:
    """Where this process is."""
    return Place(os.getpid(), ray.get_runtime_context().get_node_id())


class ReplicaActor:
    """Carries one replica after the other; ``cancel`` and ``end`` are called while ``run`` is at work."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._switch = Switch(-1)

    def place(self) -> Place:
        """Where it lives."""
        return place()

    def cancel(self, run: int, attempt: Clock) -> None:
        """Call an attempt off."""
        self._switch.cancel(run, attempt)

    def end(self, run: int) -> None:
        """Training has ended."""
        self._switch.end(run)

    def run(self, parts: Sequence[Bytes], post: Post, server: Any) -> Ended:
        """Live one replica's life in one run."""
        self._switch = Switch(post.run)
        sink = memfd_create("paceline:spans")
        try:
            _carry(unpack(parts), post, server, self._switch, sink)
            ahead = clock_ahead(server) if post.server.node != place().node else 0
            return Ended(None, [_moved(span, ahead) for span in read_packed(sink)])
        except ray.exceptions.RayError:
            raise  # the server's end, not this one's
        except BaseException as error:
            return Ended(failure(post.replica, error), [])
        finally:
            os.close(sink)
            gc.collect()  # a job's modules refer to themselves, and would keep the store's memory


def _carry(job: Job, post: Post, server: Any, switch: Switch, sink: int) -> None:
    setup, replica = Setup.of(job), post.replica
    settle(job, replica)
    module, notes = job.program.build(), Notes()
    layout = Layout.of(module, job.running_buffers)
    station = RayStation(server.ask.remote, ray.get, post, layout, switch, notes, job.timeout_s)
    recorder: AnyRecorder = Recorder(replica, 0, 0, sink) if job.trace else NullRecorder()
    gauge = Gauge(notes, replica, recorder, 2 * layout.parameter_bytes, setup.per_step)
    watch(module, station)
    measured = Gauged(setup.replica(replica, module, layout, recorder), gauge, station, layout.parameter_bytes)
    worker = StationWorker(setup, replica, measured, station, gauge, post.micro_steps)
    ray.get(server.ask.remote("ready", replica))
    worker.run(job.loop)
    ray.get(server.ask.remote("done", replica, notes.seen, list(notes.step_times)))


def clock_ahead(server: Any) -> Nanoseconds:
    """How far the server's clock is ahead of this host's, from the quickest of some answers."""
    pings: list[tuple[Nanoseconds, Nanoseconds]] = []
    for _ in range(PINGS):
        asked = time.monotonic_ns()
        there = ray.get(server.ask.remote("clock"))
        answered = time.monotonic_ns()
        pings.append((answered - asked, there - (asked + answered) // 2))
    return min(pings)[1]


def _moved(span: Span, by_ns: Nanoseconds) -> Span:
    return span if not by_ns else replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)
