"""A worker process of a replica that has several: a stage, a shard, or both.

::

    main --- orders, bell ---> leader (stage 0, shard 0): the loop, the batches, the reports
                                  |  words, batches
                                  +---> follower (stage 0, shard 1), follower (stage 1, shard 0), ...

Of each replica the workers have a process group of their own. Where one of them has ended, the others do so without a
word: main has seen it.
"""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.comm import liveness
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_pickle import SharedObject, unpack
from paceline.comm.wakeup import EventFd, Wakeup
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
from paceline.engine.local.client import SharedMemoryClient
from paceline.engine.local.control_block import MetricsBlock
from paceline.engine.local.replica_group import CommandPipe, End, Follower, PeerExited, ReplicaLeader, ShardIO, say_all
from paceline.engine.local.worker import metrics_block, open_arena
from paceline.engine.local.worker_processes import PEER_DIED, label
from paceline.engine.run_context import RunContext, set_threads_and_seed
from paceline.engine.spmd.pipeline_rank import PipelineRank, pipelined
from paceline.engine.spmd.process_group import BACKEND, LaunchEnv, file_rendezvous
from paceline.engine.spmd.rank_context import RankContext, RankSetup, open_rank_context
from paceline.engine.spmd.shard_views import owned_names
from paceline.engine.spmd.sharded_local_sgd import ShardedLocalSGD
from paceline.engine.spmd.shared_model import build_once_per_host
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics
from paceline.engine.worker_metrics import remove_workers_file
from paceline.replica.base import Replica, micro_steps
from paceline.replica.flat_state import FlatLayout
from paceline.replica.module_utils import materialize
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry.

    Args:
        args: ``place``, of this worker; ``store``, the path of a file by which its replica meets;
            ``remembers``, of the run's memory; ``traced``, whether there is a file for spans.
        fds: what it shares with the coordinator, then lines: the leader's to each follower, a follower's to its leader.
    """
    keep_freed_memory()
    store_fd, job_fd, mine, coordinator, link_fd, *rest = fds
    trace = rest.pop(0) if args["traced"] else None
    with socket.socket(fileno=link_fd) as link:
        try:
            job: Job = unpack(SharedObject(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_workers_file, job.out))
            place = Coordinate(*args["place"])
            recorder = Recorder(*place, trace) if trace is not None else NullRecorder()
            _Member(job, place, args, store_fd, rest, recorder).live(EventFd(mine), EventFd(coordinator), link)
        except SystemExit:
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(_said(args["place"], error))
            raise SystemExit(1) from error


def _said(place: Sequence[int], error: BaseException) -> bytes:
    """The message that tells main of an error, and at least of which replica it is."""
    if not isinstance(error, PacelineError):
        return encode_failure(label(Coordinate(*place)), error)
    text = str(error)
    if isinstance(error, (WaitTimeoutError, WorkerError)) and not text.startswith("replica "):
        text = f"replica {place[0]}: {text}"
    if len(text) > LONGEST_TRACEBACK:
        text = f"{text[:1000]}\n...\n{text[-LONGEST_TRACEBACK:]}"
    return json.dumps({"kind": type(error).__name__, "said": text}).encode()


class _Member:
    """One worker.

    Args:
        job: of the run.
        place: which worker.
        args: of the process.
        store_fd: of the run's memory.
        lines: to the others of its replica.
        recorder: of its spans.
    """

    def __init__(
        self,
        job: Job,
        place: Coordinate,
        args: dict[str, Any],
        store_fd: int,
        lines: Sequence[int],
        recorder: AnyRecorder,
    ) -> None:
        self._job, self._place, self._recorder = job, place, recorder
        self._worker = job.strategy.mesh.rank(place)
        self._setup, self._mesh = RunContext.of(job), job.strategy.mesh
        ranks = self._mesh.replica_ranks(place.replica)
        self._rank, self._size = self._worker - ranks.start, len(ranks)
        self._leads = self._rank == 0
        set_threads_and_seed(job, place.replica)
        self._remembers, self._store_fd = args["remembers"], store_fd
        others = [rank for rank in ranks if rank != self._worker] if self._leads else [ranks.start]
        who = [f"replica {label(self._mesh.place(rank))}" for rank in others]
        self._lines = (
            [CommandPipe(fd, whom, job.timeout_s) for fd, whom in zip(lines, who, strict=True)] if lines else []
        )
        self._path: str = args["store"]

    def live(self, mine: EventFd, coordinator: EventFd, link: socket.socket) -> None:
        """From meeting the others to the end."""
        if self._size > 1:
            file_rendezvous(self._rank, self._size, self._path, self._job.timeout_s)
        world = LaunchEnv(self._rank, self._size, self._job.strategy.workers, one_host=True)
        try:
            with (
                open_rank_context(world, BACKEND, "cpu", self._job.timeout_s, watched=True) as context,
                self._named(context),
            ):
                with build_once_per_host(functools.partial(materialize, self._job.program), context) as module:
                    part = self._part(context, module)
                work = self._led(context, part, mine, coordinator) if self._leads else self._following(context, part)
                link.send(json.dumps({"ready": self._worker, "pid": os.getpid()}).encode())
                work()
        finally:
            if self._size > 1:
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _named(self, context: RankContext) -> Iterator[None]:
        """Say who has failed; say nothing where another one of the replica has ended."""
        try:
            yield
        except PeerExited as parted:
            raise SystemExit(PEER_DIED) from parted
        except Exception as error:
            if context.registry.first_exited() is not None:
                raise SystemExit(PEER_DIED) from error
            if isinstance(error, WorkerError) and _first_to_fail(context):
                raise WorkerError(f"replica {label(self._place)}: {error}") from error
            if isinstance(error, PacelineError):
                raise
            raise WorkerError(failure_text(json.loads(encode_failure(label(self._place), error)))) from error

    # ----------------------------------------------------------------------------------------------- what it works with

    def _part(self, context: RankContext, module: nn.Module) -> ShardIO:
        """Its part of the replica; all workers of that make theirs together."""
        layout = FlatLayout.of(module, self._job.running_buffers)
        self._store, self._board = open_arena(self._setup, layout, self._remembers, self._store_fd)
        rank_setup = RankSetup(self._setup, context, BACKEND, module, layout, self._place.replica)
        held = PipelineRank(rank_setup) if self._job.strategy.pipelined else TensorParallelRank(rank_setup)
        self._bytes = held.layout.parameter_bytes
        metrics_block(self._setup, self._store).set_parameter_bytes(self._worker, self._bytes)
        steps = 1 if self._setup.local_sgd else micro_steps(self._setup.delta)
        if isinstance(held, PipelineRank):
            inner: Replica = pipelined(held, steps, self._recorder)
        else:
            inner = held.worker(steps, self._recorder)
        if not self._setup.local_sgd:
            return ShardIO(self._store, self._board, self._place, held, inner, _nothing)
        own = self._walking(context, held, inner)
        return ShardIO(self._store, self._board, self._place, held, own, own.forget)

    def _walking(
        self, context: RankContext, held: PipelineRank | TensorParallelRank, inner: Replica
    ) -> ShardedLocalSGD:
        def summed(mine: float) -> float:
            return float(sum(context.gather(mine, "the norm of a gradient")))

        return ShardedLocalSGD(
            self._job.program,
            inner,
            held.whole,
            held.layout,
            owned_names(held.stages, held.mesh, held.place),
            summed,
            self._setup.policy.adopt,
            distance=isinstance(self._setup.delta, Distance),
        )

    def _led(self, context: RankContext, part: ShardIO, mine: EventFd, coordinator: EventFd) -> Callable[[], None]:
        setup, replica, board = self._setup, self._place.replica, self._board
        alarms = Wakeup(mine, board.sleep_flag(replica)), Wakeup(coordinator, board.sleep_flag(None))
        station = SharedMemoryClient(self._store, board, replica, *alarms)
        gauge = WorkerMetrics(board, replica, self._recorder, 2 * self._bytes, setup.per_step)
        told = len(self._mesh.stage_workers) > 1
        led = ReplicaLeader(part, self._lines, context.communicator, station, told=told)
        worker = ClientWorker(setup, replica, InstrumentedReplica(led, gauge, station, self._bytes), station, gauge)

        def work() -> None:
            worker.run(self._job.loop)
            say_all(self._lines, End())
            seen = board.figures(replica)
            board.measure(replica, seen._replace(payload_bytes=seen.payload_bytes + _sent(context)))

        return work

    def _following(self, context: RankContext, part: ShardIO) -> Callable[[], None]:
        assert context.communicator is not None, "a follower has a leader"
        sheet: MetricsBlock = metrics_block(self._setup, self._store)
        gauge = WorkerMetrics(sheet, self._worker, self._recorder, 0, self._setup.per_step)
        last = self._rank == self._size - 1 and len(self._mesh.stage_workers) > 1
        follower = Follower(part, self._lines[0], context.communicator, gauge, tells=last)

        def work() -> None:
            try:
                follower.run()
            finally:
                gauge.close()
            seen = sheet.figures(self._worker)
            sheet.measure(self._worker, seen._replace(payload_bytes=2 * self._bytes * follower.step + _sent(context)))

        return work


def _first_to_fail(context: RankContext) -> bool:
    """Whether no other worker of the replica has said why it ends."""
    return context.store_signals is None or context.store_signals.first_failure() is None


def _nothing() -> None:
    """A gradient begins anew with each A."""


def _sent(context: RankContext) -> int:
    return context.communicator.sent_bytes if context.communicator is not None else 0
