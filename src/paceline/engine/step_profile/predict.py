"""Predict a step from its measured components.

What a step will take, from what its pieces take.

::

    stages   the schedule, simulated with what each action of each part takes, and messages between them
    shards   Σ over the pieces between collectives: the slowest shard's; and the collectives, of that size
    plain    what forward and backward take, drawn anew for each step
    then     pull and push, copies and a word to main and back; an update, as often as one is made

Each is measured on as many processes as there will be workers, or cores, all at work at the same time: they share
memory and caches then, too.
"""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.comm.fork_server import ForkServer
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_state, threads
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.rank_context import RankContext, extended_timeout
from paceline.engine.spmd.worker_pool import PRELOAD, Answering, WorkerPool
from paceline.engine.step_profile.comm import Call, Message, collectives, message
from paceline.engine.step_profile.compute import Found, Pass, plain, sharded
from paceline.engine.step_profile.pipeline_actions import staged
from paceline.engine.step_profile.replica_timing import ReplicaTiming
from paceline.schedule import Dependencies
from paceline.schedule.simulate import StageTimes, timeline

WORD = "word"
"""A question that takes no work to answer."""


@dataclass(frozen=True)
class Heard:
    """From one rank."""

    found: Found
    collectives: Mapping[Call, Seconds]
    messages: Mapping[int, Message]
    """By bytes."""


@dataclass(frozen=True)
class Work:
    """To measure the pieces of a job's step."""

    job: Job

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one rank for another."""
        return self.job.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """One rank's."""
        return lambda question: None if question == WORD else self._heard(context)

    def _heard(self, context: RankContext) -> Heard:
        strategy = self.job.strategy
        measure: Any = staged if strategy.pipelined else sharded if strategy.tensor_parallel else plain
        with extended_timeout(context):
            found: Found = measure(RunContext.of(self.job), context)
            every = context.gather(found, "what was measured")
            calls = {call: None for each in every for call in _calls(each)}
            sizes = sorted({size for each in every for sent in each.sent_bytes.values() for size in sent})
            return Heard(found, collectives(context, calls) if calls else {}, {n: message(context, n) for n in sizes})


def _calls(found: Found) -> list[Call]:
    return [*found.calls, *found.last_calls, *(call for each in found.stage_calls.values() for call in each)]


_REPEATS = 9
_WORDS = 51


@dataclass(frozen=True)
class Forecast:
    """Of one job, on this host."""

    compute_s: Sequence[Seconds]
    """Of one Δ's forward and backward passes, by the workers of a replica: as often as it was measured."""
    pull_s: Seconds
    push_s: Seconds
    replica_timing: ReplicaTiming = field(default_factory=ReplicaTiming)
    steps_on: float = 1.0
    """The largest share of A's elements that a worker steps on."""


NEEDS = (*PRELOAD, "paceline.engine.step_profile.predict")
"""What a fork server of a forecast's processes imports."""


def forecast(job: Job, fork_server: ForkServer | None = None) -> Forecast:
    """Measure the pieces of a job's step, in processes of their own, which are gone when it returns.

    Args:
        job: whose.
        fork_server: makes the processes, and has imported :data:`NEEDS`; None: one for this forecast alone.

    Raises:
        InputError: the model can't be cut or divided as the strategy says.
        WorkerError: a process failed.
    """
    heard, word_s = _heard(job, fork_server)
    strategy, passes = job.strategy, [each for one in heard for each in one.found.passes]
    pull, push = (statistics.median(each) for each in ([p.pull for p in passes], [p.push for p in passes]))
    push += sum(_slowest(heard, call) for call in heard[0].found.last_calls)
    ends = pull + word_s / 2, push + word_s / 2
    steps_on = max(each.found.steps_on for each in heard)
    if strategy.pipelined:
        return replace(_staged(job, heard, *ends), steps_on=steps_on)
    if strategy.tensor_parallel:
        return Forecast(_sharded(heard, max(strategy.stage_workers)), *ends, steps_on=steps_on)
    return Forecast([sum(each.pieces) for each in passes], *ends)


def update_s(job: Job, gradients: int, steps_on: float = 1.0) -> Seconds:
    """Of one update of so many gradients: the median of 9 in this process, while the others wait.

    Args:
        job: whose A and optimizer.
        gradients: that are combined.
        steps_on: the share of A that one worker updates, while others update theirs: of the time for all of it.
    """
    setup, (_, state) = RunContext.of(job), first_state(job.program, job.running_buffers)
    owner, found, places = (
        ServerOptimizer(job.program, setup.policy, state.clone()),
        list[Seconds](),
        (state, state.clone()),
    )
    deltas = [(state.clone(), 1 / gradients) for _ in range(gradients)]
    for number in range(_REPEATS):
        began = time.perf_counter()
        owner.apply(deltas, alone=gradients == 1, out=places[number % 2])  # the old A is still being read
        found.append(time.perf_counter() - began)
    return steps_on * statistics.median(found)


def _heard(job: Job, fork_server: ForkServer | None) -> tuple[Sequence[Heard], Seconds]:
    """What each rank of the crew has measured, and what a word to all and their answers take."""
    if fork_server is not None:
        return _asked(job, fork_server)
    fork_server = ForkServer.start(NEEDS)
    try:
        return _asked(job, fork_server)
    finally:
        fork_server.close()


def _asked(job: Job, fork_server: ForkServer) -> tuple[Sequence[Heard], Seconds]:
    workers, cores = job.strategy.workers, len(os.sched_getaffinity(0))
    size = 1 if workers == 1 else max(2, min(workers, cores))
    with WorkerPool(Work(replace(job, loop=None)), size, threads(job, size), fork_server) as crew:
        heard, taken = crew.ask(None), []
        for _ in range(_WORDS):
            began = time.perf_counter()
            crew.ask(WORD)
            taken.append(time.perf_counter() - began)
        return heard, statistics.median(taken)


def _slowest(heard: Sequence[Heard], call: Call) -> Seconds:
    return max(each.collectives[call] for each in heard)


def _sharded(heard: Sequence[Heard], count: int) -> Sequence[Seconds]:
    """All shards meet at each collective: what comes before it takes what the slowest of them takes."""
    sent = sum(_slowest(heard, call) for call in heard[0].found.calls)
    together: list[list[Pass]] = [list(each.found.passes) for each in heard[:count]]
    return [
        sent + sum(max(pieces) for pieces in zip(*(each.pieces for each in passes), strict=True))
        for passes in zip(*together, strict=True)
    ]


def _staged(job: Job, heard: Sequence[Heard], pull_s: Seconds, push_s: Seconds) -> Forecast:
    strategy = job.strategy
    stages, count, columns = strategy.stage_count, strategy.micro_batch_count, strategy.mesh.columns
    needs = heard[0].found.needs or Dependencies.chain(strategy.order.parts(stages))
    actions = list(timeline(strategy.order, _stage_times(job, heard, needs), stages, count, columns, needs))
    end = max(each.end_ns for each in actions)
    share = [replace(a, start_ns=_of(a.start_ns, end), end_ns=_of(a.end_ns, end)) for a in actions]
    return Forecast([end * 1e-9], pull_s, push_s, ReplicaTiming(1.0, tuple(share), columns.copies, needs))


def _of(ns: int, whole: int) -> int:
    """In billionths of the whole."""
    return round(ns * 10**9 / whole)


def _stage_times(job: Job, heard: Sequence[Heard], needs: Dependencies) -> StageTimes:
    """Of each part: what its actions compute, their collectives, and what sending and taking keeps it busy for."""
    strategy = job.strategy
    parts = range(strategy.order.parts(strategy.stage_count))
    first = heard[0]
    sent = {ends: [first.messages[size] for size in sizes] for ends, sizes in first.found.sent_bytes.items()}

    def of(part: int, kind: str) -> Seconds:
        found = [each for each in heard if (part, kind) in each.found.stages]
        if not found:
            return 0.0
        computed = max(statistics.median(each.found.stages[part, kind]) for each in found)
        return computed + sum(_slowest(heard, call) for call in found[0].found.stage_calls.get((part, kind), ()))

    def mailed(part: int, *, back: bool) -> Seconds:
        """Values go from a part to those that need them, and gradients back."""
        onward = [(part, other) for other in (needs.returning(part) if back else needs.consumers(part))]
        before = [(other, part) for other in (needs.returned(part) if back else needs.sources(part))]
        gives, takes = (before, onward) if back else (onward, before)
        sends = sum(each.send for ends in gives for each in sent.get(ends, ()))
        return sends + sum(each.take for ends in takes for each in sent.get(ends, ()))

    forward = tuple(of(part, "forward") + mailed(part, back=False) for part in parts)
    whole = tuple(of(part, "backward") + of(part, "backward_input") + mailed(part, back=True) for part in parts)
    weight = tuple(of(part, "backward_weight") for part in parts)
    ways = [each.way for messages in sent.values() for each in messages]
    return StageTimes(forward, whole, weight, statistics.fmean(ways) if ways else 0.0)
