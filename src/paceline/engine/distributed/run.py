"""One run, as each of its ranks lives it: meet, train, score, tell."""

import contextlib
import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from paceline.comm.linux import give_back_freed_memory, memfd_create
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.mesh import Coordinate
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.distributed.async_pipeline import AsyncPipelineClient, AsyncStageShard
from paceline.engine.distributed.client import AllReduceClient, ClientContext
from paceline.engine.distributed.evaluation import RankEvaluation
from paceline.engine.distributed.rank_shard import ModelParallelShard, RankShard, WholeModelShard
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator, SyncedClock
from paceline.engine.distributed.sync_batchnorm import batchnorm_over
from paceline.engine.distributed.uneven_inputs import ShadowPasses, ShadowReplica
from paceline.engine.distributed.validation import ended_within_a_delta
from paceline.engine.run_context import RunContext, settle, threads
from paceline.engine.sigint import Interruptible
from paceline.engine.spmd.rank_context import RankContext, RankSetup
from paceline.engine.spmd.shared_model import build_once_per_host
from paceline.engine.worker import ClientWorker, InstrumentedReplica, WorkerMetrics
from paceline.engine.worker_metrics import InMemorySink, timeline, told
from paceline.engine.workers_file import WorkersFile
from paceline.replica.flat_state import FlatLayout, digest_of, write
from paceline.replica.module_utils import materialize
from paceline.replica.single import Single
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import Span

TICK_S: Seconds = 0.2
"""How often the live display is told."""


class DistributedRun:
    """One rank's.

    Args:
        job: what is run.
        context: with whom.
        backend: moves the bytes.
        watch: told how it stands.
        closing: what has to be let go of, however it ends; for the caller to close.
    """

    def __init__(
        self, job: Job, context: RankContext, backend: str, watch: Watcher, closing: contextlib.ExitStack
    ) -> None:
        self._job, self._context, self._backend, self._watch, self._closing = job, context, backend, watch, closing
        self._setup = setup = RunContext.of(job)
        mesh = job.strategy.mesh
        settle(job, mesh.place(context.world.rank).replica, context.world.local_size)
        with self._model() as module:
            self._layout = FlatLayout.of(module, job.running_buffers)
            digest = digest_of(module, self._layout)
            self._agree(digest)
            self._share = share = _share(RankSetup(setup, context, backend, module, self._layout))
        give_back_freed_memory()
        self._stopwatch = SyncedClock(context.registry.clock_offset_ns)
        self._desk = RankEvaluation(job, context, self._layout.nbytes)
        reads = share.read_version if isinstance(share, AsyncStageShard) else None
        self._course = ReplicatedCoordinator(
            setup, share.update, share.reduce_buffer, self._desk, self._stopwatch, digest, reads, share.noise
        )
        self._attendance = ShadowPasses(setup, share.coordinate.replica, module, share.batchnorm_group, share.fsdp)
        self._notes, self._sink = InMemorySink(), self._new_sink()
        self._recorder: AnyRecorder = Recorder(*share.coordinate, self._sink) if job.trace else NullRecorder()
        self._told_s: Seconds = -1.0

    def outcome(self) -> Outcome:
        """Run to the end."""
        woken = threading.Event()
        with Interruptible(woken.set, (signal.SIGINT, signal.SIGTERM)) as asked:
            self._watch(Progress("starting", 0.0))
            self._write_roster()
            station = self._station(asked, woken)
            worker = self._worker(station)
            self._start()
            with batchnorm_over(self._share.batchnorm_group):
                with self._named(station):
                    worker.run(self._job.loop)
                if self._share.fsdp is not None and not station.begins_delta():
                    raise ended_within_a_delta(self._context.world.rank, self._job.strategy.accumulate)
                station.leave()
            self._course.finish()
            self._watch(replace(self._course.chronicle.progress("scoring", self._course.now), fraction=None))
            records = self._desk.score_rest(lambda: asked.insisted)
            return self._result(records)

    # -------------------------------------------------------------------------------------------------------- the start

    def _model(self) -> contextlib.AbstractContextManager[nn.Module]:
        """With the values of A_0: this rank's own where it is to train all of it."""
        program = self._job.program
        if self._job.strategy.spread:
            return build_once_per_host(functools.partial(materialize, program), self._context)
        return contextlib.nullcontext(program.build())

    def _agree(self, digest: str) -> None:
        """All ranks must be about to do the same."""
        mine = (str(self._job.strategy), str(self._job.budget), self._job.program.seed, digest)
        what = ("strategy", "budget", "seed", "digest of A_0")
        said = self._context.gather(mine, "the others' start")
        for rank, other in enumerate(said):
            for name, first, theirs in zip(what, said[0], other, strict=True):
                if first != theirs:
                    raise PacelineError(
                        f"rank {rank} has {name} {theirs}, but rank 0 has {first}; all ranks must run one script with "
                        "the same arguments, and model() must draw its numbers from torch alone"
                    )

    def _write_roster(self) -> None:
        if self._context.world.rank == 0:
            mesh = self._job.strategy.mesh
            where: dict[Coordinate, dict[str, int | str]] = {
                mesh.place(p.rank): {"pid": p.pid, "node": p.host} for p in self._context.registry.peers
            }
            self._closing.callback(WorkersFile(self._job.out, {}, where).close)

    def _station(self, asked: Interruptible, woken: threading.Event) -> AllReduceClient | AsyncPipelineClient:
        share = self._share
        self._gauge = WorkerMetrics(self._notes, share.coordinate.replica, self._recorder, 0, self._setup.per_step)
        around = ClientContext(
            coordinator=self._course,
            status_sync=share.status_sync,
            reduce_buffer=share.reduce_buffer,
            overlap=share.overlap,
            norms=share.noise.norms if share.noise else None,
            state=share.state,
            clock=self._stopwatch,
            shadow_passes=self._attendance if self._attendance.needed else None,
            metrics=self._gauge,
            store_signals=self._context.store_signals,
            stop_requested=lambda: asked.heard > 0,
            stop_event=woken,
            after_exchange=self._tell,
        )
        if isinstance(share, AsyncStageShard):
            return AsyncPipelineClient(around, share, self._setup.allowance(), self._job.timeout_s)
        return AllReduceClient(share.coordinate.replica, around, self._job.timeout_s)

    def _worker(self, station: AllReduceClient | AsyncPipelineClient) -> ClientWorker:
        inner = self._share.replica(self._course.weight, self._recorder)
        if self._share.overlap is not None:
            assert isinstance(inner, Single), "synchronous training sends gradients"
            assert isinstance(station, AllReduceClient), "a stream has no Δ to send"
            self._closing.enter_context(inner.sending_gradients(station))
        replica = ShadowReplica(inner, self._attendance) if self._attendance.needed else inner
        measured = InstrumentedReplica(replica, self._gauge, station, 0)
        return ClientWorker(self._setup, self._share.coordinate.replica, measured, station, self._gauge)

    def _start(self) -> None:
        self._stopwatch.start(self._context.gather(time.monotonic_ns(), "the others' start")[0])
        self._course.begin()

    @contextlib.contextmanager
    def _named(self, station: AllReduceClient | AsyncPipelineClient) -> Iterator[None]:
        """Of several workers of a replica, which one has failed, and when; of another, its number tells."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            if not self._job.strategy.spread:
                raise
            place, rank = self._share.coordinate, self._context.world.rank
            where = f"rank {rank} (replica {place.replica}, stage {place.stage}, shard {place.shard})"
            told = "".join(traceback.format_exception(error))
            raise WorkerError(
                f"{where} failed at its step {station.attempt}: {type(error).__name__}: {error}\n\n{told}"
            ) from error

    # ----------------------------------------------------------------------------------------------------- what is told

    def _tell(self) -> None:
        """Tell the display how things stand, once a while."""
        if (now := self._course.now) - self._told_s >= TICK_S:
            self._told_s = now
            self._watch(self._course.chronicle.progress("training", now))

    def _result(self, records: list[Record]) -> Outcome:
        course, seconds = self._course, self._course.now
        self._recorder.close()
        communicator = self._context.communicator
        seen = self._notes.seen._replace(payload_bytes=communicator.sent_bytes if communicator else 0)
        figures = told(self._share.coordinate, seen, self._notes.step_times, self._share.parameter_bytes, seconds)
        remembered = self._share.update.optimizer_bytes
        mine = replace(figures, peak_saved_bytes=self._share.peak_saved_bytes, optimizer_bytes=remembered)
        said = self._context.gather((mine, records, self._spans()), "the others' scores and figures")
        history = [record for _, theirs, _ in said for record in theirs]
        history = sorted([*course.chronicle.history, *history], key=lambda record: (record.time_s, record.gradients))
        account = course.chronicle.account(
            seconds, [figures for figures, _, _ in said], (), self._rules(), interrupted=course.interrupted
        )
        state = self._share.update.full_state(wanted=True)
        assert state is not None, "it is wanted here"
        model = write(materialize(self._job.program, SpillAllocator()), state)
        spans = timeline([span for _, _, theirs in said for span in theirs], self._stopwatch.began_ns)
        return Outcome(model.state_dict(), model, history, account, spans)

    def _rules(self) -> dict[str, str | int | float]:
        return {
            "threads": threads(self._job, self._context.world.local_size),
            "backend": self._backend if self._context.world.size > 1 else "none",
            **self._share.notes(),
        }

    def _spans(self) -> list[Span]:
        if not self._job.trace:
            return []
        ahead = self._stopwatch.ahead_ns
        spans = read_packed(self._sink)
        return [replace(s, start_ns=s.start_ns + ahead, end_ns=s.end_ns + ahead) for s in spans] if ahead else spans

    def _new_sink(self) -> int:
        if not self._job.trace:
            return -1
        sink = memfd_create("paceline:spans")
        self._closing.callback(os.close, sink)
        return sink


def _share(rank_setup: RankSetup) -> RankShard:
    """By what the strategy asks for."""
    strategy = rank_setup.run_context.job.strategy
    if strategy.pipelined and not strategy.order.flushes:
        return AsyncStageShard(rank_setup)
    return ModelParallelShard(rank_setup) if strategy.spread else WholeModelShard(rank_setup)


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """What a run sets in this process, which is the user's, is put back at its end."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(before)
