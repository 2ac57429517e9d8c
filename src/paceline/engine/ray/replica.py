"""The actor of one replica: its loop, and its parameter client of the server's actor."""

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

import ray

from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import encode_failure
from paceline.core.types import Clock, Nanoseconds, Seconds, Version
from paceline.engine.base import Job
from paceline.engine.own_states import OwnState, own_bytes
from paceline.engine.ray import messages
from paceline.engine.ray.messages import ReplicaAssignment
from paceline.engine.ray.push_stream import PushBuffers
from paceline.engine.ray.server_link import PendingPush, ServerLink
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.worker import (
    ClientWorker,
    GrantedClient,
    InMemorySink,
    InstrumentedReplica,
    WorkerMetrics,
    check_in_forward,
)
from paceline.engine.worker_metrics import SpanLog
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.local_sgd import KeepsState, LocalSGD
from paceline.trace.spans import Span


class CancelFlag:
    """The newest cancelled attempt of a replica, set by another thread while it computes.

    Args:
        run: number of the run; calls for another run are ignored.
    """

    def __init__(self, run: int) -> None:
        self._run, self._changed = run, threading.Condition()
        self.newest: float = 0

    def cancel(self, run: int, attempt: float) -> None:
        """Cancel an attempt; infinity ends training."""
        if run == self._run:
            with self._changed:
                self.newest = attempt
                self._changed.notify_all()

    def wait(self, attempt: Clock, timeout_s: Seconds) -> None:
        """Wait until the attempt is cancelled, or for the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= attempt, timeout_s)


@final
class RayClient(GrantedClient):
    """The client of one replica: each push is answered with the next grant and its A.

    Args:
        link: to the server.
        assignment: of this replica.
        attempt: the newest that is complete; 0: there was none.
        layout: of A.
        cancel: flag of this replica.
        metrics: sent with each Δ.
        timeout_s: of the server's wait for this replica.
        own_bytes: most bytes of what the replica keeps; 0: the server is not told of it.
    """

    def __init__(
        self,
        link: ServerLink,
        assignment: ReplicaAssignment,
        attempt: Clock,
        layout: FlatLayout,
        cancel: CancelFlag,
        metrics: InMemorySink,
        timeout_s: Seconds,
        own_bytes: int = 0,
    ) -> None:
        super().__init__(attempt)
        self._link, self._replica, self._layout = link, (assignment.replica, assignment.incarnation), layout
        self._cancel, self._metrics, self._timeout_s = cancel, metrics, timeout_s
        self._buffers = PushBuffers(layout, own_bytes=own_bytes)
        """Memory of Δ and A, and of what the replica keeps."""
        self._own: KeepsState | None = None
        """Keeps something that the server is told of."""
        self._state: FlatState | None = None
        self._version: Version = 0
        self._pending: PendingPush | None = None
        self._ended = False
        self._last_contact_s = 0.0

    def wait_for_grant(self) -> bool:
        """Wait for the server's reply and return whether to go on."""
        if self._under_way or self._ended:
            return self._under_way
        self._state = None  # frees the old A where that is in the object store before the new one comes
        pending, self._pending = self._pending or self._link.begin("first", *self._replica, self.attempt), None
        reply: messages.Reply = pending.result()
        grant, arrays = reply
        if grant is None:
            self._ended = True
            return False
        by_stream = arrays is self._buffers.sent_arrays
        self._state = self._buffers.sent if by_stream else messages.state_of(self._layout, arrays)
        self.attempt, self._batches, self._version = grant
        self._state.version = self._version
        self._done, self._under_way, self._last_contact_s = 0, True, time.monotonic()
        return True

    def pull(self) -> FlatState:
        assert self._state is not None, "nothing was sent"
        return self._state

    def delta_buffer(self) -> FlatState:
        return self._buffers.delta

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""
        return self._cancel.newest >= self.attempt

    def pause(self, seconds: Seconds) -> None:
        """Sleep for a delay of the job, or until cancelled; a long one is announced to the server."""
        until = time.monotonic() + seconds
        if until - self._last_contact_s > self._timeout_s / 4:
            self._last_contact_s = until
            self._link.call("excuse", *self._replica, seconds)
        self._cancel.wait(self.attempt, seconds)

    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        self._under_way = False
        facts = measured.samples, measured.finite, measured.loss, self._metrics.newest
        (replica, incarnation), version = self._replica, self._version
        left = OwnState.of(self._own) if self._own is not None and not cancelled else None
        size = self._buffers.leave(self.attempt, left) if left is not None else 0
        completion = messages.RayCompletion(replica, incarnation, self.attempt, version, *facts, size)
        self._pending = PendingPush(self._link, completion, self._buffers, cancelled=cancelled)

    def go_on(self, own: KeepsState) -> None:
        """Let the replica go on with what it kept, in this run or the one before; tell the server from now on."""
        kept: messages.Bytes | None = self._link.call("own_state", *self._replica, self.attempt)
        if kept is not None:
            OwnState.read(kept.data).restore(own, self._layout)
        self._own = own

    def close(self) -> None:
        """Release the memory of Δ and A, and the stream."""
        self._link.drop_stream()
        self._buffers.close()


# Requests for another host's clock; the fastest answer counts.
PINGS = 8


class ReplicaActor(messages.Actor):
    """The actor of a replica, kept from run to run; ``cancel`` and ``turn_to`` are called while ``run`` computes."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._cancel = CancelFlag(-1)
        self._link = ServerLink(-1, None, 0.0)
        self._newest: tuple[int, Any] = -1, None
        """The newest server that was named, and the run that it is of."""

    def cancel(self, run: int, attempt: float) -> None:
        """Cancel an attempt; infinity ends training."""
        self._cancel.cancel(run, attempt)

    def turn_to(self, run: int, server: Any) -> None:
        """Call this server from now on."""
        self._newest = run, server
        self._link.turn_to(run, server)

    def run(
        self,
        parts: Sequence[messages.Bytes],
        assignment: ReplicaAssignment,
        server: Any,
        node: str,
        versions: Mapping[str, str],
    ) -> messages.Ended:
        """Run one replica's loop to the end of a run, whose server is on a node with these versions."""
        self._cancel = CancelFlag(assignment.run)
        try:
            messages.refuse_other_versions(versions)  # this node may have joined the cluster later
            job: Job = messages.unpack(parts)
            self._link = link = ServerLink(assignment.run, server, job.timeout_s if job.strategy.standby else 0.0)
            link.turn_to(*self._newest)  # it may have been named before
            spans = _run_loop(job, assignment, link, self._cancel)
            if node != self.place().node and spans:
                # How far the server's clock is ahead of this host's, by the fastest of some answers (Cristian 1989).
                pings: list[tuple[Nanoseconds, Nanoseconds]] = []
                for _ in range(PINGS):
                    sent = time.monotonic_ns()
                    remote = link.call("clock")
                    received = time.monotonic_ns()
                    pings.append((received - sent, remote - (sent + received) // 2))
                _, ahead_ns = min(pings)
                spans = [replace(s, start_ns=s.start_ns + ahead_ns, end_ns=s.end_ns + ahead_ns) for s in spans]
            return messages.Ended(None, spans)
        except ray.exceptions.RayError:
            raise  # the server has ended
        except BaseException as error:
            return messages.Ended(encode_failure(assignment.replica, error), [])
        finally:
            gc.collect()  # modules are in reference cycles, which would keep arrays in the object store


def _run_loop(job: Job, assignment: ReplicaAssignment, link: ServerLink, cancel: CancelFlag) -> list[Span]:
    context, replica = RunContext(job), assignment.replica
    set_threads_and_seed(job, replica)
    module, sink = job.program.build(), InMemorySink()
    with ExitStack() as closing:
        spans = SpanLog(job.trace, replica)
        closing.callback(spans.close)
        layout = FlatLayout.of(module, job.running_buffers)
        attempt = max(assignment.attempt, context.positions[replica].attempt)
        most = own_bytes(context, layout)
        client = RayClient(link, assignment, attempt, layout, cancel, sink, job.timeout_s, most)
        closing.callback(client.close)
        metrics = WorkerMetrics(sink, replica, spans.recorder, 2 * layout.parameter_bytes, context.per_step)
        check_in_forward(module, client)
        inner = context.replica(replica, module, layout, spans.recorder)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes)
        worker = ClientWorker(context, replica, measured, client, metrics, assignment.micro_steps)
        if most and isinstance(inner, LocalSGD):
            client.go_on(inner)
        link.call("ready", replica, assignment.incarnation)
        worker.run(job.loop)
        link.call("done", replica, assignment.incarnation, sink.newest, list(sink.step_times))
        return spans.read()
