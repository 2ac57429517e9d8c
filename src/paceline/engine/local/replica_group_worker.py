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
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from paceline.core import errors
from paceline.core.mesh import Coordinate
from paceline.core.types import Clock
from paceline.engine.local import replica_group
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.own_state import OwnStates
from paceline.engine.local.worker_main import SharedMemoryClient, connected
from paceline.engine.local.worker_processes import PEER_DIED, label
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.process_group import BACKEND, LaunchEnv, file_rendezvous
from paceline.engine.spmd.rank_context import RankContext, RankSetup, build_once_per_host, open_rank_context
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics
from paceline.replica.base import Replica, micro_steps
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import KeepsState
from paceline.replica.module_utils import materialize
from paceline.trace.recorder import NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Run a worker process of a replica of several.

    Args:
        args: ``place``, of this worker; ``store``, the path of the file by which its replica's workers rendezvous;
            ``remembers``, vectors of optimizer state in the arena; ``traced``, whether there is a file for spans;
            ``first``, micro-steps of replicas before it that have died, and ``kept``, what those had chosen.
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
                    layout = FlatLayout.of(module, job.running_buffers)
                    run = RunContext(job)
                    arena = ParameterArena(ArenaLayout.of(run, layout, args["remembers"]), arena_fd)
                    setup = RankSetup(run, context, BACKEND, module, layout, place.replica, args["kept"])
                    member = _Member(setup, place, arena, recorder)
                others = [other for other in ranks if other != worker] if rank == 0 else [ranks.start]
                names = [f"replica {label(mesh.coordinate(other))}" for other in others] if rest else []
                peers = zip(rest, names, strict=True)
                pipes = [replica_group.CommandPipe(Connection(fd), name, job.timeout_s) for fd, name in peers]
                told = {"ready": worker, "pid": os.getpid(), "kept": dict(member.kept)}
                ready = functools.partial(link.send, json.dumps(told).encode())
                if rank == 0:
                    member.lead(pipes, own_fd, main_fd, ready, args["first"])
                else:
                    member.follow(pipes[0], ready)
        finally:
            if size > 1:
                dist.destroy_process_group()


def _message(place: Coordinate, error: BaseException) -> bytes | None:
    """Return the message to main of an error, which names the replica at least; None: the process exits quietly."""
    if isinstance(error, SystemExit):
        return None
    if not isinstance(error, errors.PacelineError):
        return errors.encode_failure(label(place), error)
    text = str(error)
    if isinstance(error, (errors.WaitTimeoutError, errors.WorkerError)) and not text.startswith("replica "):
        text = f"replica {place.replica}: {text}"
    if len(text) > errors.LONGEST_TRACEBACK:
        text = f"{text[:1000]}\n...\n{text[-errors.LONGEST_TRACEBACK :]}"
    return json.dumps({"kind": type(error).__name__, "said": text, "replica": place.replica}).encode()


@contextlib.contextmanager
def _named(place: Coordinate, context: RankContext) -> Iterator[None]:
    """Context manager: errors name this worker; it exits quietly where another one of the replica has exited."""
    try:
        yield
    except replica_group.PeerExited as error:
        raise SystemExit(PEER_DIED) from error
    except Exception as error:
        if context.registry.first_exited() is not None:
            raise SystemExit(PEER_DIED) from error
        first = context.store_signals is None or context.store_signals.first_failure() is None
        if isinstance(error, errors.WorkerError) and first:
            raise errors.WorkerError(f"replica {label(place)}: {error}") from error
        if isinstance(error, errors.PacelineError):
            raise
        raise errors.WorkerError(errors.failure_text(json.loads(errors.encode_failure(label(place), error)))) from error


class _Member:
    """One worker with its part of the replica; all workers of the replica build theirs together.

    Args:
        setup: the worker among those of the replica.
        place: of the worker in the run.
        arena: of the run.
        recorder: of this worker's spans.
    """

    def __init__(
        self, setup: RankSetup, place: Coordinate, arena: ParameterArena, recorder: Recorder | NullRecorder
    ) -> None:
        self._run, self._context, self._place, self._arena = setup.run_context, setup.context, place, arena
        self._recorder, run, strategy = recorder, setup.run_context, setup.run_context.job.strategy
        self._worker, self._staged = strategy.mesh.rank(place), len(strategy.mesh.stage_workers) > 1
        ranks = PipelineRank(setup) if strategy.pipelined else TensorParallelRank(setup)
        self._bytes = ranks.layout.parameter_bytes
        self.kept = ranks.state_json
        """What other workers need to take the place of this one."""
        arena.control.metrics.parameter_bytes[self._worker] = self._bytes

        steps = 1 if run.local_sgd else micro_steps(run.delta)
        inner: Replica = ranks.worker(steps, recorder)
        reset: Callable[[], None] = lambda: None  # noqa: E731 (a gradient keeps no state from Δ to Δ)
        self._own: KeepsState | None = None
        if run.local_sgd:
            gather = setup.context.gather
            inner = stepping = ranks.stepping(inner, lambda square: sum(gather(square, "the norm of a gradient")))
            reset, self._own = stepping.forget, stepping
        self._part = replica_group.ShardIO(arena, place, ranks, inner, reset)

    def lead(
        self,
        pipes: Sequence[replica_group.CommandPipe],
        own_fd: int,
        main_fd: int,
        ready: Callable[[], object],
        first: int,
    ) -> None:
        """Run the replica's loop after ``first`` micro-steps of replicas before it, after a call of ``ready``."""
        client = SharedMemoryClient(self._arena, self._place.replica, own_fd, main_fd)
        metrics, communicator = self._metrics(2 * self._bytes), self._context.communicator
        leave = self._go_on(client.attempt)
        leader = replica_group.ReplicaLeader(self._part, pipes, communicator, client, self._staged, leave)
        measured = InstrumentedReplica(leader, metrics, client, self._bytes)
        worker = ClientWorker(self._run, self._place.replica, measured, client, metrics, first)
        ready()
        worker.run(self._run.job.loop)
        replica_group.send_all(pipes, replica_group.EndCommand())
        self._add_payload(0)  # pulls and pushes of the leader are counted step by step

    def follow(self, pipe: replica_group.CommandPipe, ready: Callable[[], object]) -> None:
        """Execute the leader's commands, after a call of ``ready``."""
        communicator, world, metrics = self._context.communicator, self._context.world, self._metrics(0)
        assert communicator is not None, "a follower has a leader"
        sends_loss = self._staged and world.rank == world.size - 1
        leave = self._go_on(self._arena.control.completed[self._place.replica])
        follower = replica_group.Follower(self._part, pipe, communicator, metrics, sends_loss, leave)
        ready()
        try:
            follower.run()
        finally:
            metrics.close()
        self._add_payload(2 * self._bytes * follower.step)

    def _go_on(self, attempt: Clock) -> Callable[[Clock], None]:
        """Go on with what the replica kept after an attempt; return what leaves a copy after the next ones."""
        states = OwnStates.of(self._arena)
        if states is None or self._own is None:
            return lambda _: None
        states.begin(self._run, self._worker, attempt, self._own)
        return functools.partial(states.leave, self._worker, own=self._own)

    def _add_payload(self, nbytes: int) -> None:
        """Count bytes of A and Δ that this worker has moved, and those that it has sent within the replica."""
        metrics, communicator = self._arena.control.metrics, self._context.communicator
        figures = metrics.figures(self._worker)
        payload = figures.payload_bytes + nbytes + (communicator.traffic.sent_bytes if communicator is not None else 0)
        metrics.measure(self._worker, figures._replace(payload_bytes=payload))

    def _metrics(self, step_bytes: int) -> WorkerMetrics:
        metrics = self._arena.control.metrics
        return WorkerMetrics(metrics, self._worker, self._recorder, step_bytes, self._run.per_step)
