"""The loop of a replica of one worker that pushes to servers, and its spans in their time."""

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from paceline.core.types import Nanoseconds
from paceline.engine.base import Job
from paceline.engine.client_worker import ClientWorker, ForwardChecks, InstrumentedReplica
from paceline.engine.own_states import OwnState, own_bytes
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.messages import Ended, ReplicaAssignment
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.push_client import CancelFlag, PushClient
from paceline.engine.server.server_link import ServerLink, ServerLinks
from paceline.engine.server_optimizer import server_slices
from paceline.engine.worker_metrics import InMemorySink, SpanLog, WorkerMetrics
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import LocalSGD, autograd_of
from paceline.replica.operator_list import WARM_S
from paceline.trace.spans import Span

# Requests for another host's clock; the fastest answer counts.
PINGS = 8


def run_replica(job: Job, assignment: ReplicaAssignment, links: ServerLinks, cancel: CancelFlag) -> Ended:
    """Run the loop, and return once training has ended."""
    context, replica = RunContext(job), assignment.replica
    set_threads_and_seed(job, replica)
    module, sink = job.program.build(), InMemorySink()
    with ExitStack() as closing:
        spans = SpanLog(job.trace, replica)
        closing.callback(spans.close)
        layout = FlatLayout.of(module, job.running_buffers)
        attempt, most = max(assignment.attempt, context.positions[replica].attempt), own_bytes(context, layout)
        ahead = job.strategy.pull_ahead
        buffers = PushBuffers(layout, own_bytes=most, pull_ahead=ahead)
        slices = server_slices(context, layout, links.count)
        codecs = [DeltaCodec.of(context, part) for part in slices]
        client = PushClient(
            links, slices, codecs, assignment, attempt, buffers, cancel, sink, job.timeout_s, pull_ahead=ahead
        )
        closing.callback(client.close)
        pushed = sum(codec.nbytes for codec in codecs if codec is not None) or layout.parameter_bytes
        metrics = WorkerMetrics(sink, replica, spans.recorder, layout.parameter_bytes + pushed, context.per_step)
        client.waited = metrics.waited
        inner = context.replica(replica, module, layout, spans.recorder, graphs_after=WARM_S)
        checks = None if job.strategy.compile else ForwardChecks(module, client)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes, checks)
        own, made = autograd_of(inner), assignment.micro_steps
        report = functools.partial(links.first.call, "reported")
        worker = ClientWorker(
            context, replica, measured, client, metrics, made, report=report, autograd=own, servers=links.count
        )
        if most and isinstance(inner, LocalSGD):
            kept = client.go_on(functools.partial(OwnState.of, inner))
            if kept is not None:
                kept.restore(inner, layout)
        links.first.call("ready", replica, assignment.incarnation)
        worker.run(job.loop)
        links.first.call("done", replica, assignment.incarnation, sink.newest, list(sink.step_times))
        return Ended(None, spans.read())


def on_servers_clock(spans: Sequence[Span], link: ServerLink) -> list[Span]:
    """Return spans of this host in the time of the server's clock, by the fastest of some answers (Cristian 1989)."""
    pings = list[tuple[Nanoseconds, Nanoseconds]]()
    for _ in range(PINGS):
        sent = time.monotonic_ns()
        remote: Nanoseconds = link.call("clock")
        received = time.monotonic_ns()
        pings.append((received - sent, remote - (sent + received) // 2))
    _, ahead_ns = min(pings)
    return [replace(span, start_ns=span.start_ns + ahead_ns, end_ns=span.end_ns + ahead_ns) for span in spans]
