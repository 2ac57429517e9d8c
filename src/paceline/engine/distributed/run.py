"""One run, as each of its ranks lives it: meet, train, score, tell."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from paceline.aggregation import Synchronous
from paceline.comm.compression import parse
from paceline.comm.kernel import memfd_create
from paceline.core.errors import PacelineError
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.distributed.attendance import Attendance, Attentive
from paceline.engine.distributed.batchnorm import Meeting, SynchronisedBatchNorm, meeting
from paceline.engine.distributed.course import Course
from paceline.engine.distributed.desk import Desk
from paceline.engine.distributed.divided import Divided, only_buffers
from paceline.engine.distributed.dividing import ended_within_a_delta
from paceline.engine.distributed.exchange import Exchange, ring_bytes
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.fully_sharded import FullySharded, Partial
from paceline.engine.distributed.overlap import Overlap, overlapped
from paceline.engine.distributed.sharded import Sharded, pays
from paceline.engine.distributed.station import DistributedStation, Surroundings
from paceline.engine.distributed.stopwatch import Stopwatch
from paceline.engine.distributed.team import Team
from paceline.engine.distributed.update import Compressed, Together, Update
from paceline.engine.figures import Notes, timeline, told
from paceline.engine.gauge import Gauge, Gauged
from paceline.engine.interrupt import Interruptible
from paceline.engine.owner import Owner
from paceline.engine.roster import Roster
from paceline.engine.setup import Setup, first_state, settle, threads
from paceline.engine.worker import StationWorker
from paceline.replica.autograd import Autograd
from paceline.replica.base import Replica
from paceline.replica.single import Single
from paceline.replica.state import write
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import Span

TICK_S: Seconds = 0.2
"""How often the live display is told."""


class DistributedRun:
    """One rank's.

    Args:
        job: what is run.
        team: with whom.
        backend: moves the bytes.
        watch: told how it stands.
        closing: what has to be let go of, however it ends; for the caller to close.
    """

    def __init__(self, job: Job, team: Team, backend: str, watch: Watcher, closing: contextlib.ExitStack) -> None:
        self._job, self._team, self._backend, self._watch, self._closing = job, team, backend, watch, closing
        self._rank, world = team.world.rank, team.world
        self._setup = setup = Setup.of(job)
        self._module = settle(job, self._rank, world.local_size)
        _, state = first_state(job.program, job.running_buffers)
        digest, self._layout = state.digest(), state.layout
        self._agree(digest)
        self._divided = self._cut()
        self._state = state if self._divided is None else only_buffers(state)
        self._freight = Freight(self._state.layout, world.size)
        self._stopwatch = Stopwatch(team.peers.ahead_ns)
        self._desk = Desk(job, team, self._layout.nbytes)
        self._update = self._way()
        self._course = Course(setup, self._update, self._freight, self._desk, self._stopwatch, digest)
        self._meeting = self._met()
        self._overlap = self._beforehand()
        self._attendance = Attendance(setup, self._rank, self._module, self._meeting, self._divided)
        self._notes, self._sink = Notes(), self._new_sink()
        self._recorder: AnyRecorder = Recorder(self._rank, 0, 0, self._sink) if job.trace else NullRecorder()
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
            with meeting(self._meeting):
                worker.run(self._job.loop)
                if self._divided is not None and not station.opens():
                    raise ended_within_a_delta(self._rank, self._job.strategy.accumulate)
                station.leave()
            self._course.finish()
            self._watch(replace(self._course.chronicle.progress("scoring", self._course.now), fraction=None))
            records = self._desk.score_rest(lambda: asked.insisted)
            return self._result(records)

    # -------------------------------------------------------------------------------------------------------- the start

    def _agree(self, digest: str) -> None:
        """All ranks must be about to do the same."""
        mine = (str(self._job.strategy), str(self._job.budget), self._job.program.seed, digest)
        what = ("strategy", "budget", "seed", "digest of A_0")
        said = self._team.gather(mine, "the others' start")
        for rank, other in enumerate(said):
            for name, first, theirs in zip(what, said[0], other, strict=True):
                if first != theirs:
                    raise PacelineError(
                        f"rank {rank} has {name} {theirs}, but rank 0 has {first}; all ranks must run one script with "
                        "the same arguments, and model() must draw its numbers from torch alone"
                    )

    def _cut(self) -> Divided | None:
        """The parameters, where they are divided; with nobody else there they stay whole."""
        traffic = self._team.traffic
        if traffic is None or not self._job.strategy.shard_parameters:
            return None
        return Divided(self._module, self._layout, self._team.world.size, traffic)

    def _way(self) -> Update:
        """How updates are made."""
        job, traffic, ranks = self._job, self._team.traffic, self._team.world.size
        if traffic is not None and self._divided is not None:
            return FullySharded(job.program, self._divided, self._freight, self._state, traffic)
        if traffic is not None and self._divides():
            return Sharded(job.program, self._freight, self._state, self._rank, ranks, traffic)
        owner = Owner(job.program, self._setup.policy, self._state)
        if traffic is None or job.strategy.compression == "none":
            return Together(self._freight, owner)
        return Compressed(self._freight, owner, parse(job.strategy.compression), traffic)

    def _divides(self) -> bool:
        """Whether each rank keeps a part of the optimizer's state."""
        strategy = self._job.strategy
        if strategy.shard_optimizer is not None:
            return strategy.shard_optimizer
        apart = strategy.compression == "none" and strategy.device == "cpu"
        return apart and pays(self._job.program, self._state, self._backend, self._team.world.size)

    def _met(self) -> Meeting | None:
        """Where layers look at all ranks' samples; None where there is no such layer, or nobody else."""
        if self._team.traffic is None or not any(isinstance(m, SynchronisedBatchNorm) for m in self._module.modules()):
            return None
        policy = self._setup.policy
        added = isinstance(policy, Synchronous) and policy.combine == "sum"
        summed = self._job.strategy.accumulate > 1 or added or self._divided is not None
        return Meeting(self._team.traffic, self._rank, self._team.world.size, summed=summed)

    def _beforehand(self) -> Overlap | None:
        """What sends Δ during the backward pass; None where it is sent after it."""
        whole = isinstance(self._update, Together) and self._meeting is None and not self._course.may_repeat
        return overlapped(self._job, self._team, self._backend, self._freight) if whole else None

    def _write_roster(self) -> None:
        if self._rank == 0:
            where: dict[int, dict[str, int | str]] = {
                p.rank: {"pid": p.pid, "node": p.host} for p in self._team.peers.all
            }
            self._closing.callback(Roster(self._job.out, {}, where).close)

    def _station(self, asked: Interruptible, woken: threading.Event) -> DistributedStation:
        gauge = Gauge(self._notes, self._rank, self._recorder, 0, self._setup.per_step)
        self._gauge = gauge
        vectors = self._update.meeting if self._overlap is None else self._freight.tails
        around = Surroundings(
            course=self._course,
            exchange=Exchange(self._freight, vectors, self._rank, self._team.traffic),
            freight=self._freight,
            overlap=self._overlap,
            state=self._state,
            stopwatch=self._stopwatch,
            attendance=self._attendance,
            gauge=gauge,
            notices=self._team.notices,
            asked_to_end=lambda: asked.heard > 0,
            woken=woken,
            after=self._tell,
        )
        return DistributedStation(self._rank, around, self._job.timeout_s)

    def _worker(self, station: DistributedStation) -> StationWorker:
        inner = self._replica()
        if self._overlap is not None:
            assert isinstance(inner, Single), "synchronous training sends gradients"
            self._closing.enter_context(inner.giving(station))
        measured = Gauged(Attentive(inner, self._attendance), self._gauge, station, 0)
        return StationWorker(self._setup, self._rank, measured, station, self._gauge)

    def _replica(self) -> Replica:
        if self._divided is None:
            return self._setup.replica(self._rank, self._module, self._layout, self._recorder)
        program, device = self._job.program, self._setup.device(self._rank)
        autograd = Autograd(program, self._module, self._state.layout, self._rank, device, self._recorder)
        return Partial(autograd, self._divided, self._course.weight)

    def _start(self) -> None:
        self._stopwatch.start(self._team.gather(time.monotonic_ns(), "the others' start")[0])
        self._course.begin()

    # ----------------------------------------------------------------------------------------------------- what is told

    def _tell(self) -> None:
        """Tell the display how things stand, once a while."""
        if (now := self._course.now) - self._told_s >= TICK_S:
            self._told_s = now
            self._watch(self._course.chronicle.progress("training", now))

    def _result(self, records: list[Record]) -> Outcome:
        course, seconds = self._course, self._course.now
        self._recorder.close()
        traffic = self._team.traffic
        part_bytes = self._layout.parameter_bytes if self._divided is None else self._divided.nbytes
        seen = self._notes.seen._replace(payload_bytes=traffic.sent_bytes if traffic else 0)
        mine = told(self._rank, seen, self._notes.step_times, part_bytes, seconds)
        said = self._team.gather((mine, records, self._spans()), "the others' scores and figures")
        history = [record for _, theirs, _ in said for record in theirs]
        history = sorted([*course.chronicle.history, *history], key=lambda record: (record.time_s, record.gradients))
        account = course.chronicle.account(
            seconds, [figures for figures, _, _ in said], (), self._rules(), interrupted=course.interrupted
        )
        state = self._update.whole(wanted=True)
        assert state is not None, "it is wanted here"
        model = write(self._job.program.build(), state)
        spans = timeline([span for _, _, theirs in said for span in theirs], self._stopwatch.began_ns)
        return Outcome(model.state_dict(), model, history, account, spans)

    def _rules(self) -> dict[str, str | int | float]:
        ranks, size = self._team.world.size, self._layout.parameter_bytes
        rules: dict[str, str | int | float] = {
            "threads": threads(self._job, self._team.world.local_size),
            "backend": self._backend if ranks > 1 else "none",
            "shard_optimizer": isinstance(self._update, Sharded),
            "buckets": self._overlap.buckets if self._overlap is not None else 0,
            "payload_ring_formula_bytes_per_step": ranks * ring_bytes(size, ranks),
        }
        if self._divided is not None:  # gathered for forward, gathered for backward, and gradients summed
            rules["payload_sharded_formula_bytes_per_step"] = 3 * (ranks - 1) * size * self._setup.per_step
        return rules

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


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """What a run sets in this process, which is the user's, is put back at its end."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(before)
