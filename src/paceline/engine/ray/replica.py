"""The actor of one replica: its loop, and its parameter client of the server's actor."""

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
from paceline.engine.worker import ClientWorker, InMemorySink, InstrumentedReplica, WorkerMetrics, check_in_forward
from paceline.engine.worker_metrics import SpanLog
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.trace.spans import Span


class CancelFlag:
    """The newest cancelled attempt of a replica, set by another thread while it computes.

    Args:
        run: number of the run; calls for another run are ignored.
    """

    def __init__(self, run: int) -> None:
        self._run, self._changed = run, threading.Condition()
        self._cancelled: float = 0

    def cancel(self, run: int, attempt: float) -> None:
        """Cancel an attempt; infinity ends training."""
        if run == self._run:
            with self._changed:
                self._cancelled = attempt
                self._changed.notify_all()

    def is_set(self, attempt: Clock) -> bool:
        """Return whether an attempt is cancelled."""
        return self._cancelled >= attempt

    def wait(self, attempt: Clock, timeout_s: Seconds) -> None:
        """Wait until the attempt is cancelled, or for the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_set(attempt), timeout_s)


class RayClient:
    """The client of one replica: each push is a call of the server's actor, whose reply is the next grant.

    Args:
        call: calls a method of the server and returns a reference.
        wait: reference -> reply.
        assignment: of this replica.
        layout: of A.
        cancel: flag of this replica.
        metrics: sent with each Δ.
        timeout_s: of the server's wait for this replica.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        wait: Callable[[Any], Reply],
        assignment: ReplicaAssignment,
        layout: FlatLayout,
        cancel: CancelFlag,
        metrics: InMemorySink,
        timeout_s: Seconds,
    ) -> None:
        self._call, self._wait, self._replica, self._layout = call, wait, assignment.replica, layout
        self._cancel, self._metrics, self._timeout_s = cancel, metrics, timeout_s
        self._delta = layout.new()
        self._state: FlatState | None = None
        self._reply: Any = None
        self._grant: RayGrant | None = RayGrant(assignment.attempt, 0, 0)
        self._micro_steps = 0
        self._under_way = False
        self._last_contact_s = 0.0
        self.attempt: Clock = assignment.attempt
        """The Δ that this replica computes, counted from 1."""

    def wait_for_grant(self) -> bool:
        """Wait for the server's reply and return whether to go on."""
        if self._under_way or self._grant is None:
            return self._grant is not None
        if self._reply is None:
            self._reply = self._call("first", self._replica)
        self._state = None  # frees the old A in the object store before the new one comes
        self._grant, arrays = self._wait(self._reply)
        if self._grant is None:
            return False
        self._state = state_of(self._layout, arrays)
        self.attempt = self._grant.attempt
        self._micro_steps, self._under_way, self._last_contact_s = 0, True, time.monotonic()
        return True

    def begins_delta(self) -> bool:
        return self._micro_steps == 0

    def pull(self) -> FlatState:
        assert self._state is not None, "nothing was sent"
        return self._state

    def ends_delta(self) -> bool:
        assert self._grant is not None
        self._micro_steps += 1
        if self._micro_steps < self._grant.micro_steps:
            return False
        self._micro_steps = 0
        return True

    def delta_buffer(self) -> FlatState:
        return self._delta

    def push(self, measured: Measured) -> None:
        self._complete(measured, arrays_of(self._delta))

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""
        return self._cancel.is_set(self.attempt)

    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; returns how many micro-steps after this one it skips."""
        assert self._grant is not None
        skipped = max(0, self._grant.micro_steps - self._micro_steps - 1)
        self._micro_steps = 0
        self._complete(Measured(math.nan, 0, True), [])
        return skipped

    def pause(self, seconds: Seconds) -> None:
        """Sleep for a delay of the job, or until cancelled; a long one is announced to the server."""
        until = time.monotonic() + seconds
        if until - self._last_contact_s > self._timeout_s / 4:
            self._last_contact_s = until
            self._call("excuse", self._replica, seconds)
        self._cancel.wait(self.attempt, seconds)

    def _complete(self, measured: Measured, arrays: list[Bytes]) -> None:
        assert self._grant is not None
        self._under_way = False
        facts = measured.samples, measured.finite, measured.loss
        completion = RayCompletion(self._replica, self.attempt, self._grant.version, *facts, self._metrics.newest)
        self._reply = self._call("push", completion, *arrays)


PINGS = 8
"""Requests for another host's clock; the fastest answer counts."""


def own_location() -> WorkerLocation:
    """Return the location of this process."""
    return WorkerLocation(os.getpid(), ray.get_runtime_context().get_node_id())


class ReplicaActor:
    """The actor of a replica, kept from run to run; ``cancel`` and ``end`` are called while ``run`` computes."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._cancel = CancelFlag(-1)

    def place(self) -> WorkerLocation:
        """Return the location of this actor."""
        return own_location()

    def cancel(self, run: int, attempt: Clock) -> None:
        """Cancel an attempt."""
        self._cancel.cancel(run, attempt)

    def end(self, run: int) -> None:
        """End training."""
        self._cancel.cancel(run, math.inf)

    def run(self, parts: Sequence[Bytes], assignment: ReplicaAssignment, server: Any) -> Ended:
        """Run one replica's loop to the end of a run."""
        self._cancel = CancelFlag(assignment.run)
        try:
            spans = _run_loop(unpack(parts), assignment, server, self._cancel)
            if assignment.server.node != own_location().node and spans:
                ahead_ns = _clock_offset(server)
                spans = [replace(s, start_ns=s.start_ns + ahead_ns, end_ns=s.end_ns + ahead_ns) for s in spans]
            return Ended(None, spans)
        except ray.exceptions.RayError:
            raise  # the server has ended
        except BaseException as error:
            return Ended(encode_failure(assignment.replica, error), [])
        finally:
            gc.collect()  # modules are in reference cycles, which would keep arrays in the object store


def _run_loop(job: Job, assignment: ReplicaAssignment, server: Any, cancel: CancelFlag) -> list[Span]:
    context, replica = RunContext(job), assignment.replica
    set_threads_and_seed(job, replica)
    module, sink, spans = job.program.build(), InMemorySink(), SpanLog(job.trace, replica)
    try:
        layout = FlatLayout.of(module, job.running_buffers)
        client = RayClient(server.ask.remote, ray.get, assignment, layout, cancel, sink, job.timeout_s)
        metrics = WorkerMetrics(sink, replica, spans.recorder, 2 * layout.parameter_bytes, context.per_step)
        check_in_forward(module, client)
        inner = context.replica(replica, module, layout, spans.recorder)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes)
        worker = ClientWorker(context, replica, measured, client, metrics, assignment.micro_steps)
        ray.get(server.ask.remote("ready", replica))
        worker.run(job.loop)
        ray.get(server.ask.remote("done", replica, sink.newest, list(sink.step_times)))
        return spans.read()
    finally:
        spans.close()


def _clock_offset(server: Any) -> Nanoseconds:
    """Return how far the server's clock is ahead of this host's, by the fastest of some answers (Cristian 1989)."""
    pings: list[tuple[Nanoseconds, Nanoseconds]] = []
    for _ in range(PINGS):
        asked = time.monotonic_ns()
        remote = ray.get(server.ask.remote("clock"))
        answered = time.monotonic_ns()
        pings.append((answered - asked, remote - (asked + answered) // 2))
    return min(pings)[1]
