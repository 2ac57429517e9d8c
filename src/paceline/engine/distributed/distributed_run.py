"""One run as each of the processes that torchrun started executes it."""

import contextlib
import functools
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from paceline.comm.linux import give_back_freed_memory
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError, PacelineError, WorkerError
from paceline.core.records import Record
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.checkpointing import Checkpointer, Snapshot
from paceline.engine.client_worker import ClientWorker, InstrumentedReplica
from paceline.engine.distributed.agreement import DivergenceCheck, check_job, facts, refuse_differences
from paceline.engine.distributed.async_pipeline import AsyncPipelineClient, AsyncStageShard
from paceline.engine.distributed.client import AllReduceClient, ClientContext
from paceline.engine.distributed.loop_reports import LoopReports
from paceline.engine.distributed.model_parallel_shard import ModelParallelShard
from paceline.engine.distributed.rank_shard import RankShard, WholeModelShard
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator, SyncedClock
from paceline.engine.distributed.replicated_state import RunCopy, SharedRun
from paceline.engine.distributed.sync_batchnorm import batchnorm_over
from paceline.engine.distributed.uneven_inputs import ShadowPasses, ShadowReplica
from paceline.engine.loop import InterruptGuard
from paceline.engine.own_states import restore_replica
from paceline.engine.run_context import RunContext, set_threads_and_seed, threads
from paceline.engine.spmd.rank_context import (
    RankContext,
    RankSetup,
    build_once_per_host,
    extended_timeout,
)
from paceline.engine.worker_metrics import (
    InMemorySink,
    SpanLog,
    WorkerMetrics,
    training_spans,
    worker_figures,
    workers_file,
)
from paceline.replica.base import Replica
from paceline.replica.flat_state import FlatLayout, digest_of, write
from paceline.replica.local_sgd import autograd_of
from paceline.replica.module_utils import materialize
from paceline.replica.single import Single

# Of the engine, in jobs whose ranks torchrun has started; those that another engine has started have its name.
NAME = "distributed"


class DistributedRun:
    """One rank's part of a run.

    Args:
        job: what is run.
        context: of this rank among the others.
        backend: of the process group.
        watch: receives progress.
        closing: what has to be released, however the run ends; for the caller to close.
    """

    def __init__(
        self, job: Job, context: RankContext, backend: str, watch: Watcher, closing: contextlib.ExitStack
    ) -> None:
        arrival: RunCopy | None = None if context.survival is None else context.survival.arrival
        if arrival is not None:  # the others' state is newer than any checkpoint
            job = replace(job, resume=None)
        self._job, self._context, self._backend, self._watch, self._closing = job, context, backend, watch, closing
        self._arrival = arrival
        self._run_context = run_context = RunContext(job)
        program, world = job.program, context.world
        set_threads_and_seed(job, job.strategy.mesh.coordinate(world.rank).replica, world.local_size)
        # The values of A_0: a rank that trains a part of the model shares the whole one with the others on its host.
        model = (
            build_once_per_host(functools.partial(materialize, program), context)
            if job.strategy.spread
            else contextlib.nullcontext(program.build())
        )
        with model as module:
            layout = FlatLayout.of(module, job.running_buffers)
            digest = digest_of(module, layout)
            self._facts = facts(job, digest)
            if arrival is None:
                check_job(job, digest, context)
            else:
                refuse_differences(arrival.facts, self._facts, ("the others", f"rank {world.rank}, which joins,"))
            flushes = not job.strategy.pipelined or job.strategy.order.flushes
            build = (ModelParallelShard if flushes else AsyncStageShard) if job.strategy.spread else WholeModelShard
            self._shard: RankShard = build(RankSetup(run_context, context, backend, module, layout))
            shard = self._shard
        closing.callback(self._shard.release)
        give_back_freed_memory()
        self._clock = SyncedClock(context.registry.clock_offset_ns)
        self._coordinator = ReplicatedCoordinator(run_context, context, shard, self._clock, layout, digest, watch)
        if context.survival is not None and shard.batchnorm_group is not None:
            raise InputError(
                f"on_death={job.on_death} makes a round again, but synchronised BatchNorm exchanges sums within "
                "forward and backward; leave synchronised_batchnorm out, or write checkpoint='ckpt', resume=True under "
                "torchrun --max-restarts=3"
            )
        place = shard.coordinate
        communicating = [each for each in (shard.batchnorm_group, shard.fsdp) if each is not None]
        self._shadow_passes = ShadowPasses(run_context, place.replica, module, communicating) if communicating else None
        self._sink, self._spans = InMemorySink(), SpanLog(job.trace, *place)
        closing.callback(self._spans.close)
        self._metrics = WorkerMetrics(self._sink, place.replica, self._spans.recorder, 0, run_context.per_step)
        compared = shard.state.vectors if shard.shared is None else shard.state.buffers  # there is one memory of A
        self._divergence = DivergenceCheck(context, compared, job.strategy.mesh.parts)
        self._reports = LoopReports(job, context, watch, by_store=job.engine == NAME)
        self._stop_event = threading.Event()
        """Set by the first Ctrl-C."""
        self._interrupts = InterruptGuard(self._interrupted, self._heard)
        context.registry.tells = job.engine == NAME

    def _heard(self, first: str) -> None:
        """Have it said that a signal ends training, unless the death of a rank does."""
        if self._context.registry.first_exited() is None:
            self._watch.heard(first)

    def _interrupted(self) -> None:
        """Note a signal that asks to end; torchrun sends SIGTERM when another rank of this host has died."""
        self._stop_event.set()
        survival, dead = self._context.survival, self._context.registry.first_exited()
        if survival is None and dead is not None:
            self._context.registry.ended_while(dead, f"was at its step {max(self._coordinator.attempts)}")

    def outcome(self) -> Outcome:
        """Run to the end."""
        shard, coordinator = self._shard, self._coordinator
        with self._interrupts as interrupts:
            self._watch(Progress("starting", 0.0))
            if self._context.world.rank == 0:
                processes = self._context.registry.workers(self._job.strategy.mesh)
                self._closing.enter_context(workers_file(self._job.out, {}, processes))
            with extended_timeout(self._context):  # it may compile
                replica = shard.replica(coordinator.weight, self._spans.recorder)
            if self._job.resume is not None:
                shard.held().restore(self._job.resume)
                if shard.own is not None:
                    restore_replica(self._run_context, shard.coordinate.replica, shard.own, shard.state.layout)
            if self._arrival is not None:
                coordinator.replicate(self._arrival.coordinator)
            self._checkpointer = self._new_checkpointer()
            self._coordinator.before_change = self._checkpointer.settle
            self._closing.callback(self._checkpointer.close)
            if shard.takes_over is not None:
                shard.takes_over.ready = coordinator.settle
            client, worker = self._client_and_worker(replica)
            self._begin()
            with batchnorm_over(shard.batchnorm_group):
                with self._named(client):
                    worker.run(self._job.loop)
                if shard.fsdp is not None and not client.begins_delta():
                    raise InputError(
                        f"the loop of replica {shard.coordinate.replica} ended between two of the accumulate="
                        f"{self._job.strategy.accumulate} batches of one update, but shard_parameters=True has summed "
                        "the first of them already; end it after the last"
                    )
                client.leave()
            self._reports.collect(at_once=True)
            self._checkpointer.finish(coordinator.now)
            coordinator.finish()
            shard.release()
            self._watch(replace(coordinator.loop.history.progress("scoring", coordinator.now), fraction=None))
            return self._gather_outcome(coordinator.evaluate_rest(lambda: interrupts.insisted))

    def _begin(self) -> None:
        """Begin together with the others, or where they are."""
        context, coordinator = self._context, self._coordinator
        if context.survival is not None:  # a death before this ends the run
            context.survival.state = shared = SharedRun(
                context, coordinator, self._shard, self._clock, self._checkpointer, self._divergence, self._facts
            )
            if self._arrival is not None:
                shared.join(self._arrival)
                self._arrival = context.survival.arrival = None  # it holds A once more
                return
        began_ns = context.gather(time.monotonic_ns(), "the others' start")[0]
        self._clock.began_ns = began_ns - int(coordinator.loop.start_s * 1e9)
        coordinator.begin()

    def _new_checkpointer(self) -> Checkpointer:
        """Return what saves this rank's part of a checkpoint; of the ranks with something to write, each writes one."""
        context, coordinator, run_context = self._context, self._coordinator, self._run_context

        def gather(value: Any) -> list[Any]:
            return context.gather(value, "the others' checkpoint")

        def take() -> Snapshot:
            coordinator.settle()
            coordinator.loop.history.read_late()
            held = self._shard.held()
            # Compression changes residuals with the next Δ, BatchNorm its running buffers and a replica what is its own
            # with the next forward pass.
            settles = held.kept is None and not held.own and not self._job.running_buffers
            return Snapshot(held.written(), held.state_json(), self._shard.engine_json(), settles=settles)

        writers, token = [True] * context.world.size, uuid.uuid4().hex
        if self._arrival is not None:
            writers[context.world.rank] = False  # another one writes
        elif self._job.checkpoint is not None:
            gathered = gather((self._shard.held().writes_any, token))
            writers, token = [writes for writes, _ in gathered], gathered[0][1]
        part = sum(writers[: context.world.rank]) if writers[context.world.rank] else None
        return Checkpointer(
            run_context,
            coordinator.loop,
            take,
            part=part,
            parts=sum(writers),
            run=token,
            gather=gather,
        )

    def _client_and_worker(self, inner: Replica) -> tuple[AllReduceClient | AsyncPipelineClient, ClientWorker]:
        shard, run_context, replica = self._shard, self._run_context, self._shard.coordinate.replica
        context = ClientContext(
            coordinator=self._coordinator,
            shard=shard,
            clock=self._clock,
            metrics=self._metrics,
            shadow_passes=self._shadow_passes,
            store_signals=self._context.store_signals,
            interrupts=self._interrupts,
            stop_event=self._stop_event,
            timeout_s=self._job.timeout_s,
            checkpointer=self._checkpointer,
            divergence=self._divergence,
            survival=self._context.survival,
            suspect_after_s=self._job.suspect_after_s,
            collect_reports=self._reports.collect,
        )
        client: AllReduceClient | AsyncPipelineClient
        if isinstance(shard, AsyncStageShard):
            client = AsyncPipelineClient(context, shard, run_context.dispatcher())
        else:
            client = AllReduceClient(context)
        if shard.overlap is not None:
            assert isinstance(inner, Single), "synchronous training sends gradients"
            assert isinstance(client, AllReduceClient), "an asynchronous pipeline sends no Δ"
            self._closing.enter_context(inner.sending_gradients(client, early=shard.overlap.early))
        computing = inner if self._shadow_passes is None else ShadowReplica(inner, self._shadow_passes)
        measured = InstrumentedReplica(computing, self._metrics, client, 0)
        own, optimizer = autograd_of(inner), shard.update.optimizer

        def states() -> Sequence[Any]:
            self._coordinator.settle()
            return optimizer.states() if optimizer is not None else []

        worker = ClientWorker(
            run_context,
            replica,
            measured,
            client,
            self._metrics,
            report=self._reports.report,
            autograd=own,
            states=None if run_context.local_sgd else states,
        )
        return client, worker

    @contextlib.contextmanager
    def _named(self, client: AllReduceClient | AsyncPipelineClient) -> Iterator[None]:
        """Context manager: an error of the user's code names the rank and its step if a replica has several workers."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            if not self._job.strategy.spread:
                raise
            place, rank = self._shard.coordinate, self._context.world.rank
            name = f"rank {rank} (replica {place.replica}, stage {place.stage}, shard {place.shard})"
            text = "".join(traceback.format_exception(error))
            raise WorkerError(
                f"{name} failed at its step {client.attempt}: {type(error).__name__}: {error}\n\n{text}"
            ) from error

    def _gather_outcome(self, local_records: list[Record]) -> Outcome:
        shard, coordinator, context = self._shard, self._coordinator, self._context
        history, seconds = coordinator.loop.history, coordinator.now
        communicator, spans, ahead = context.communicator, self._spans.read(), self._clock.ahead_ns
        if ahead:
            spans = [replace(s, start_ns=s.start_ns + ahead, end_ns=s.end_ns + ahead) for s in spans]
        optimizer = shard.update.optimizer
        if isinstance(shard, AsyncStageShard):  # its replica steps by itself
            optimizer = None if shard.stage.stash is None else shard.stage.stash.optimizer
        figures = self._sink.newest._replace(payload_bytes=communicator.traffic.sent_bytes if communicator else 0)
        local_figures = replace(
            worker_figures(
                shard.coordinate,
                figures,
                self._sink.step_times,
                shard.parameter_bytes,
                seconds - coordinator.loop.start_s,
            ),
            peak_saved_bytes=shard.worker.memory.peak_bytes if shard.worker is not None else None,
            optimizer_bytes=0 if optimizer is None else optimizer.nbytes,
        )
        notes = self._checkpointer.notes()
        own = (local_figures, local_records, spans, self._interrupts.first, notes, history.stopped)
        gathered = context.gather(own, "the others' scores and figures")
        if context.survival is not None and context.is_first:
            context.survival.membership.end()
        workers, scored, recorded, signals, saved, stopped = zip(*gathered, strict=True)
        history.stopped = next(filter(None, stopped), None)
        notes = {
            "threads": threads(self._job.strategy, context.world.local_size),
            "backend": self._backend if context.world.size > 1 else "none",
            **shard.notes(),
            **saved[0],
        }
        account = history.account(
            seconds,
            workers,
            coordinator.loop.exits,
            notes,
            interrupted=coordinator.interrupted,
            signal=next(filter(None, signals), None),
        )
        state = shard.full_state(wanted=True)
        assert state is not None, "it is wanted here"
        known, records = set(map(id, history.records)), history.complete(chain(*scored))
        for record in records:
            if id(record) not in known:
                coordinator.loop.tell(record)
        model = write(materialize(self._job.program, SpillAllocator()), state)
        return Outcome(
            model.state_dict(),
            model,
            records,
            account,
            training_spans(list(chain(*recorded)), self._clock.began_ns),
        )
