"""The actor of one worker: the loop of a replica, or a follower of one that has several workers."""

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray

from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import encode_failure
from paceline.core.types import Nanoseconds
from paceline.engine.base import Job
from paceline.engine.own_states import OwnState, own_bytes
from paceline.engine.ray import messages
from paceline.engine.ray.delta_codec import DeltaCodec
from paceline.engine.ray.messages import ReplicaAssignment
from paceline.engine.ray.push_buffers import PushBuffers
from paceline.engine.ray.replica_client import CancelFlag, RayClient
from paceline.engine.ray.replica_group import Gang, follow, lead
from paceline.engine.ray.server_link import ServerLink, ServerLinks
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.server_optimizer import server_slices
from paceline.engine.spmd.group_member import error_message
from paceline.engine.spmd.replica_group import PeerExited
from paceline.engine.worker import ClientWorker, InMemorySink, InstrumentedReplica, WorkerMetrics, check_in_forward
from paceline.engine.worker_metrics import SpanLog
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import LocalSGD

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
        servers: Sequence[Any],
        node: str,
        versions: Mapping[str, str],
        number: int = 0,
    ) -> messages.Ended:
        """Be a replica, or a worker of one, to the end of a run, whose first server's node has these versions."""
        self._cancel = cancel = CancelFlag(assignment.run)
        tell: Callable[[BaseException], bytes] = functools.partial(encode_failure, assignment.replica)
        gang: Gang | None = None
        try:
            messages.refuse_other_versions(versions)  # this node may have joined the cluster later
            job: Job = messages.unpack(parts)
            links = ServerLinks(assignment.run, servers, job.timeout_s if job.strategy.standby else 0.0)
            self._link = link = links.first
            link.turn_to(*self._newest)  # it may have been named before
            if not job.strategy.spread:
                ended = _run_loop(job, assignment, links, cancel)
            else:
                gang = Gang(job, assignment.replica, assignment.token)
                tell = functools.partial(error_message, gang.places[number])
                ended = follow(gang, assignment, number) if number else lead(gang, assignment, links, cancel)
            if node != self.place().node and ended.spans:
                # How far the server's clock is ahead of this host's, by the fastest of some answers (Cristian 1989).
                pings: list[tuple[Nanoseconds, Nanoseconds]] = []
                for _ in range(PINGS):
                    sent = time.monotonic_ns()
                    remote = link.call("clock")
                    received = time.monotonic_ns()
                    pings.append((received - sent, remote - (sent + received) // 2))
                _, ahead_ns = min(pings)
                moved = [replace(s, start_ns=s.start_ns + ahead_ns, end_ns=s.end_ns + ahead_ns) for s in ended.spans]
                ended = ended._replace(spans=moved)
            return ended
        except ray.exceptions.RayError:
            raise  # the server has ended
        except PeerExited:
            return messages.Ended(None, [])  # main sees which it was
        except BaseException as error:
            return messages.Ended(tell(error), [])
        finally:
            gc.collect()  # modules are in reference cycles, which would keep arrays in the object store
            if gang is not None:
                gang.leave()


def _run_loop(job: Job, assignment: ReplicaAssignment, links: ServerLinks, cancel: CancelFlag) -> messages.Ended:
    """Run the loop of a replica of one worker."""
    context, replica = RunContext(job), assignment.replica
    set_threads_and_seed(job, replica)
    module, sink = job.program.build(), InMemorySink()
    with ExitStack() as closing:
        spans = SpanLog(job.trace, replica)
        closing.callback(spans.close)
        layout = FlatLayout.of(module, job.running_buffers)
        attempt, most = max(assignment.attempt, context.positions[replica].attempt), own_bytes(context, layout)
        buffers = PushBuffers(layout, own_bytes=most)
        slices = server_slices(context, layout, links.count)
        codecs = [DeltaCodec.of(context, part) for part in slices]
        client = RayClient(links, slices, codecs, assignment, attempt, buffers, cancel, sink, job.timeout_s)
        closing.callback(client.close)
        pushed = sum(codec.nbytes for codec in codecs if codec is not None) or layout.parameter_bytes
        metrics = WorkerMetrics(sink, replica, spans.recorder, layout.parameter_bytes + pushed, context.per_step)
        check_in_forward(module, client)
        inner = context.replica(replica, module, layout, spans.recorder)
        measured = InstrumentedReplica(inner, metrics, client, layout.parameter_bytes)
        worker = ClientWorker(context, replica, measured, client, metrics, assignment.micro_steps)
        if most and isinstance(inner, LocalSGD):
            kept = client.go_on(functools.partial(OwnState.of, inner))
            if kept is not None:
                kept.restore(inner, layout)
        links.first.call("ready", replica, assignment.incarnation)
        worker.run(job.loop)
        links.first.call("done", replica, assignment.incarnation, sink.newest, list(sink.step_times))
        return messages.Ended(None, spans.read())
