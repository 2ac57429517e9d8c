"""The actor of one replica: its loop, and its client of the server.

The actor of one replica: its loop, and its side of the server.
"""

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import encode_failure
from paceline.core.types import Clock, Nanoseconds, Seconds
from paceline.engine.base import Job
from paceline.engine.ray.messages import (
    Bytes,
    Ended,
    RayCompletion,
    RayGrant,
    ReplicaAssignment,
    Reply,
    WorkerLocation,
    arrays_of,
    state_of,
    unpack,
)
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics, check_in_forward
from paceline.engine.worker_metrics import InMemorySink, SpanLog
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.trace.spans import Span


class CancelFlag:
    """What another thread tells a replica while it computes.

    Args:
        run: of which run.
    """

    def __init__(self, run: int) -> None:
        self._run, self._changed = run, threading.Condition()
        self._cancelled: float = 0

    def cancel(self, run: int, attempt: float) -> None:
        """An attempt is called off."""
        if run == self._run:
            with self._changed:
                self._cancelled = attempt
                self._changed.notify_all()

    def end(self, run: int) -> None:
        """Training has ended."""
        self.cancel(run, math.inf)

    def off(self, attempt: Clock) -> bool:
        """Whether an attempt is called off."""
        return self._cancelled >= attempt

    def pause(self, seconds: Seconds, attempt: Clock) -> None:
        """Wait so long, or until the attempt is called off."""
        with self._changed:
            self._changed.wait_for(lambda: self.off(attempt), seconds)


class RayClient:
    """The server, by way of calls to its actor.

    Args:
        ask: calls a method of the server; the answer has to be waited for by ``wait``.
        wait: an answer -> what it is.
        post: which replica this is, and where it begins.
        layout: of A.
        switch: says what is called off.
        notes: told with each Δ.
        timeout_s: how long the server hears nothing before it gives up.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        wait: Callable[[Any], Reply],
        post: ReplicaAssignment,
        layout: FlatLayout,
        switch: CancelFlag,
        notes: InMemorySink,
        timeout_s: Seconds,
    ) -> None:
        self._ask, self._wait, self._replica, self._layout = ask, wait, post.replica, layout
        self._switch, self._notes, self._timeout_s = switch, notes, timeout_s
        self._out = layout.new()
        self._read: FlatState | None = None
        self._answer: Any = None
        self._order: RayGrant | None = RayGrant(post.attempt, 0, 0)
        self._made = 0
        self._under_way = False
        self._heard_of = 0.0
        self.attempt: Clock = post.attempt
        """Which Δ this replica is at."""

    def wait_for_grant(self) -> bool:
        """Wait until the server answers; whether it is to go on."""
        if self._under_way or self._order is None:
            return self._order is not None
        if self._answer is None:
            self._answer = self._ask("first", self._replica)
        self._read = None  # let go of it before the next one comes
        self._order, arrays = self._wait(self._answer)
        if self._order is None:
            return False
        self._read = state_of(self._layout, arrays)
        self.attempt = self._order.attempt
        self._made, self._under_way, self._heard_of = 0, True, time.monotonic()
        return True

    def begins_delta(self) -> bool:
        return self._made == 0

    def pull(self) -> FlatState:
        assert self._read is not None, "nothing was sent"
        return self._read

    def ends_delta(self) -> bool:
        self._made += 1
        assert self._order is not None
        if self._made < self._order.micro_steps:
            return False
        self._made = 0
        return True

    def delta_buffer(self) -> FlatState:
        return self._out

    def push(self, measured: Measured) -> None:
        self._report(measured, arrays_of(self._out))

    def cancelled(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""
        return self._switch.off(self.attempt)

    def ack_cancel(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""
        assert self._order is not None
        undone = max(0, self._order.micro_steps - self._made - 1)
        self._made = 0
        self._report(Measured(math.nan, 0, True), [])
        return undone

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until called off."""
        until = time.monotonic() + seconds
        if until - self._heard_of > self._timeout_s / 4:
            self._heard_of = until
            self._ask("excuse", self._replica, seconds)
        self._switch.pause(seconds, self.attempt)

    def _report(self, measured: Measured, arrays: list[Bytes]) -> None:
        assert self._order is not None
        self._under_way = False
        report = RayCompletion(
            self._replica,
            self.attempt,
            self._order.version,
            measured.samples,
            measured.finite,
            measured.loss,
            self._notes.newest,
        )
        self._answer = self._ask("push", report, *arrays)


PINGS = 8
"""How often another host's clock is asked for; the quickest answer counts."""


def place() -> WorkerLocation:
    """Where this process is."""
    return WorkerLocation(os.getpid(), ray.get_runtime_context().get_node_id())


class ReplicaActor:
    """Carries one replica after the other; ``cancel`` and ``end`` are called while ``run`` is at work."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._switch = CancelFlag(-1)

    def place(self) -> WorkerLocation:
        """Where it lives."""
        return place()

    def cancel(self, run: int, attempt: Clock) -> None:
        """Call an attempt off."""
        self._switch.cancel(run, attempt)

    def end(self, run: int) -> None:
        """Training has ended."""
        self._switch.end(run)

    def run(self, parts: Sequence[Bytes], post: ReplicaAssignment, server: Any) -> Ended:
        """Live one replica's life in one run."""
        self._switch = CancelFlag(post.run)
        try:
            spans = _run_replica(unpack(parts), post, server, self._switch)
            ahead = clock_ahead(server) if post.server.node != place().node else 0
            return Ended(None, [_moved(span, ahead) for span in spans])
        except ray.exceptions.RayError:
            raise  # the server's end, not this one's
        except BaseException as error:
            return Ended(encode_failure(post.replica, error), [])
        finally:
            gc.collect()  # a job's modules refer to themselves, and would keep the store's memory


def _run_replica(job: Job, post: ReplicaAssignment, server: Any, switch: CancelFlag) -> list[Span]:
    context, replica = RunContext.of(job), post.replica
    set_threads_and_seed(job, replica)
    module, sink, spans = job.program.build(), InMemorySink(), SpanLog(job.trace, replica)
    try:
        layout = FlatLayout.of(module, job.running_buffers)
        client = RayClient(server.ask.remote, ray.get, post, layout, switch, sink, job.timeout_s)
        metrics = WorkerMetrics(sink, replica, spans.recorder, 2 * layout.parameter_bytes, context.per_step)
        check_in_forward(module, client)
        inner = context.replica(replica, module, layout, spans.recorder)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes)
        worker = ClientWorker(context, replica, measured, client, metrics, post.micro_steps)
        ray.get(server.ask.remote("ready", replica))
        worker.run(job.loop)
        ray.get(server.ask.remote("done", replica, sink.newest, list(sink.step_times)))
        return spans.read()
    finally:
        spans.close()


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
