"""A worker process of a replica that has several: a stage, a shard, or both.

::

    main --- grants, wakeups ---> leader (stage 0, shard 0): the loop, the batches, the completions
                                    |  commands, batches
                                    +---> follower (stage 0, shard 1), follower (stage 1, shard 0), ...

The workers of each replica have a process group of their own. Where one of them has exited, the others exit without a
message, since main has seen it.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.core.delta import Distance
from paceline.core.errors import (
    LONGEST_TRACEBACK,
    PacelineError,
    WaitTimeoutError,
    WorkerError,
    encode_failure,
    failure_text,
)
from paceline.core.mesh import Coordinate
from paceline.engine.base import Job
from paceline.engine.local.replica_group import (
    CommandPipe,
    EndCommand,
    Follower,
    PeerExited,
    ReplicaLeader,
    ShardIO,
    send_all,
)
from paceline.engine.local.worker_main import connect, connected, open_arena
from paceline.engine.local.worker_processes import PEER_DIED, label
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.process_group import BACKEND, LaunchEnv, file_rendezvous
from paceline.engine.spmd.rank_context import RankContext, RankSetup, build_once_per_host, open_rank_context
from paceline.engine.spmd.shard_views import owned_names
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics
from paceline.replica.base import Replica, micro_steps
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import ShardedLocalSGD
from paceline.replica.module_utils import materialize
from paceline.trace.recorder import NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Run a worker process of a replica of several.

    Args:
        args: ``place``, of this worker; ``store``, the path of the file by which its replica's workers rendezvous;
            ``remembers``, vectors of optimizer state in the arena; ``traced``, whether there is a file for spans.
        fds: arena, job, eventfds of the replica and of main, link to main, the file for spans, then pipes: the
            leader's to each follower, a follower's to its leader.
    """
    arena_fd, job_fd, own_fd, main_fd, link_fd, *rest = fds
    place = Coordinate(*args["place"])
    with connected(job_fd, link_fd, functools.partial(_message, place)) as (job, link):
        recorder = Recorder(*place, rest.pop(0)) if args["traced"] else NullRecorder()
        set_threads_and_seed(job, place.replica)
        mesh = job.strategy.mesh
        worker, ranks = mesh.rank(place), mesh.replica_ranks(place.replica)
        size, rank = len(ranks), worker - ranks.start
        if size > 1:
            file_rendezvous(rank, size, args["store"], job.timeout_s)
        world = LaunchEnv(rank, size, job.strategy.workers, one_host=True)
        group = open_rank_context(world, BACKEND, "cpu", job.timeout_s, watched=True)
        try:
            with group as context, _named(place, context):
                with build_once_per_host(functools.partial(materialize, job.program), context) as module:
                    member = _Member(job, place, context, module, recorder, args["remembers"], arena_fd)
                others = [other for other in ranks if other != worker] if rank == 0 else [ranks.start]
                names = [f"replica {label(mesh.coordinate(other))}" for other in others] if rest else []
                pipes = [CommandPipe(fd, name, job.timeout_s) for fd, name in zip(rest, names, strict=True)]
                work = member.leader(pipes, own_fd, main_fd) if rank == 0 else member.follower(pipes[0])
                link.send(json.dumps({"ready": worker, "pid": os.getpid()}).encode())
                work()
        finally:
            if size > 1:
                dist.destroy_process_group()


def _message(place: Coordinate, error: BaseException) -> bytes | None:
    """Return the message to main of an error, which names the replica at least; None: the process exits quietly."""
    if isinstance(error, SystemExit):
        return None
    if not isinstance(error, PacelineError):
        return encode_failure(label(place), error)
    text = str(error)
    if isinstance(error, (WaitTimeoutError, WorkerError)) and not text.startswith("replica "):
        text = f"replica {place.replica}: {text}"
    if len(text) > LONGEST_TRACEBACK:
        text = f"{text[:1000]}\n...\n{text[-LONGEST_TRACEBACK:]}"
    return json.dumps({"kind": type(error).__name__, "said": text}).encode()


@contextlib.contextmanager
def _named(place: Coordinate, context: RankContext) -> Iterator[None]:
    """Context manager: errors name this worker; it exits quietly where another one of the replica has exited."""
    try:
        yield
    except PeerExited as error:
        raise SystemExit(PEER_DIED) from error
    except Exception as error:
        if context.registry.first_exited() is not None:
            raise SystemExit(PEER_DIED) from error
        first = context.store_signals is None or context.store_signals.first_failure() is None
        if isinstance(error, WorkerError) and first:
            raise WorkerError(f"replica {label(place)}: {error}") from error
        if isinstance(error, PacelineError):
            raise
        raise WorkerError(failure_text(json.loads(encode_failure(label(place), error)))) from error


class _Member:
    """One worker with its part of the replica; all workers of the replica build theirs together.

    Args:
        job: of the run.
        place: of this worker.
        context: the workers of the replica.
        module: with the values of A_0.
        recorder: of this worker's spans.
        optimizer_vectors: of the arena.
        arena_fd: of the arena.
    """

    def __init__(
        self,
        job: Job,
        place: Coordinate,
        context: RankContext,
        module: nn.Module,
        recorder: Recorder | NullRecorder,
        optimizer_vectors: int,
        arena_fd: int,
    ) -> None:
        self._job, self._place, self._context, self._recorder = job, place, context, recorder
        self._run = run = RunContext(job)
        self._worker, self._staged = job.strategy.mesh.rank(place), len(job.strategy.mesh.stage_workers) > 1
        layout = FlatLayout.of(module, job.running_buffers)
        self._arena, self._control = open_arena(run, layout, optimizer_vectors, arena_fd)
        setup = RankSetup(run, context, BACKEND, module, layout, place.replica)
        ranks = PipelineRank(setup) if job.strategy.pipelined else TensorParallelRank(setup)
        self._bytes = ranks.layout.parameter_bytes
        self._control.metrics.parameter_bytes[self._worker] = self._bytes

        steps = 1 if run.local_sgd else micro_steps(run.delta)
        inner: Replica = ranks.worker(steps, recorder)
        reset: Callable[[], None] = _no_reset
        if run.local_sgd:
            inner = stepping = ShardedLocalSGD(
                job.program,
                inner,
                ranks.whole,
                ranks.layout,
                owned_names(ranks.stages, ranks.mesh, ranks.place),
                lambda square: float(sum(context.gather(square, "the norm of a gradient"))),
                run.policy.adopt,
                distance=isinstance(run.delta, Distance),
            )
            reset = stepping.forget
        self._part = ShardIO(self._arena, self._control, place, ranks, inner, reset)

    def leader(self, pipes: Sequence[CommandPipe], own_fd: int, main_fd: int) -> Callable[[], None]:
        """Build the replica's worker and return its work."""
        client = connect(self._arena, self._control, self._place.replica, own_fd, main_fd)
        metrics = self._metrics(2 * self._bytes)
        leader = ReplicaLeader(self._part, pipes, self._context.communicator, client, receives_loss=self._staged)
        measured = InstrumentedReplica(leader, metrics, client, self._bytes)
        worker = ClientWorker(self._run, self._place.replica, measured, client, metrics)

        def work() -> None:
            worker.run(self._job.loop)
            send_all(pipes, EndCommand())
            self._add_payload(0)

        return work

    def follower(self, pipe: CommandPipe) -> Callable[[], None]:
        """Build a follower and return its work."""
        assert self._context.communicator is not None, "a follower has a leader"
        metrics = self._metrics(0)
        last = self._context.world.rank == self._context.world.size - 1
        follower = Follower(self._part, pipe, self._context.communicator, metrics, sends_loss=last and self._staged)

        def work() -> None:
            try:
                follower.run()
            finally:
                metrics.close()
            self._add_payload(2 * self._bytes * follower.step)

        return work

    def _metrics(self, step_bytes: int) -> WorkerMetrics:
        return WorkerMetrics(self._control.metrics, self._worker, self._recorder, step_bytes, self._run.per_step)

    def _add_payload(self, nbytes: int) -> None:
        """Add the parts of A and Δ that a follower moved, and the bytes that this worker sent within the replica."""
        metrics, communicator = self._control.metrics, self._context.communicator
        figures = metrics.figures(self._worker)
        payload = figures.payload_bytes + nbytes + (communicator.sent_bytes if communicator is not None else 0)
        metrics.measure(self._worker, figures._replace(payload_bytes=payload))


def _no_reset() -> None:
    """Do nothing: a gradient keeps no state from Δ to Δ."""
