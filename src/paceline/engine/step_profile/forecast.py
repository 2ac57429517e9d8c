"""Predict the time of a step from its measured components.

::

    stages   the schedule, simulated with the time of each action of each part, and messages between them
    shards   Σ over the pieces between collectives of the slowest shard's time; and the collectives, of that size
    single   forward and backward, drawn from measured passes for each step
    then     pull and push: copies, and a request to main and its answer; an update, as often as one is made

Components are measured on as many processes as there will be workers, or cores, all busy at the same time, so that
they share memory and caches as in training.
"""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.comm.fork_server import ForkServer
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_state, threads
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.launcher import PRELOAD, Answering, WorkerPool
from paceline.engine.spmd.rank_context import RankContext, extended_timeout
from paceline.engine.step_profile.comm import CollectiveCall, MessageTime, time_collectives, time_message
from paceline.engine.step_profile.compute import Pass, RankProfile, profile_shard, profile_single
from paceline.engine.step_profile.pipeline_actions import profile_stages
from paceline.engine.step_profile.replica_timing import ReplicaTiming
from paceline.schedule import Dependencies
from paceline.schedule.simulate import StageTimes, timeline

EMPTY_REQUEST = "nothing"
"""A request that takes no work to answer."""

REPEATS = 9
EMPTY_REQUESTS = 51


@dataclass(frozen=True)
class MeasuredRank:
    """Measurements of one rank."""

    profile: RankProfile
    collectives: Mapping[CollectiveCall, Seconds]
    messages: Mapping[int, MessageTime]
    """Bytes -> time of such a message."""


@dataclass(frozen=True)
class ProfileTask:
    """Task of a worker pool: measure the components of a job's step."""

    job: Job

    @property
    def timeout_s(self) -> Seconds:
        """Return the bound on every wait of one rank for another."""
        return self.job.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """Return the function that answers requests on one rank."""
        return lambda request: None if request == EMPTY_REQUEST else self._measure(context)

    def _measure(self, context: RankContext) -> MeasuredRank:
        strategy = self.job.strategy
        measure: Any = profile_single
        if strategy.pipelined or strategy.tensor_parallel:
            measure = profile_stages if strategy.pipelined else profile_shard
        with extended_timeout(context):
            profile: RankProfile = measure(RunContext.of(self.job), context)
            # All ranks measure the collectives and messages of all, since they take part in them together.
            profiles: list[RankProfile] = context.gather(profile, "what was measured")
            calls: dict[CollectiveCall, None] = {}
            for each in profiles:
                calls |= dict.fromkeys([*each.calls, *each.last_calls])
                calls |= dict.fromkeys(call for of_action in each.stage_calls.values() for call in of_action)
            sizes = sorted({size for each in profiles for sent in each.sent_bytes.values() for size in sent})
            times = time_collectives(context, calls) if calls else {}
            return MeasuredRank(profile, times, {nbytes: time_message(context, nbytes) for nbytes in sizes})


@dataclass(frozen=True)
class Forecast:
    """Predicted components of one job's step on this host."""

    compute_s: Sequence[Seconds]
    """Times of one Δ's forward and backward passes by the workers of a replica, one per measured pass."""
    pull_s: Seconds
    push_s: Seconds
    replica_timing: ReplicaTiming = field(default_factory=ReplicaTiming)
    steps_on: float = 1.0
    """Largest share of A's elements that a worker updates."""


NEEDS = (*PRELOAD, "paceline.engine.step_profile.forecast")
"""Modules that the fork server of a forecast's processes imports."""


def forecast(job: Job, fork_server: ForkServer | None = None) -> Forecast:
    """Measure the components of a job's step, in processes that end before it returns.

    Args:
        job: the one to predict.
        fork_server: starts the processes, and has imported :data:`NEEDS`; None: one for this forecast alone.

    Returns:
        The predicted components.

    Raises:
        InputError: the model can't be cut or divided as the strategy says.
        WorkerError: a process failed.
    """
    ranks, request_s = _measure_ranks(job, fork_server)
    strategy, passes = job.strategy, [each for rank in ranks for each in rank.profile.passes]
    pull, push = (statistics.median(each) for each in ([p.pull for p in passes], [p.push for p in passes]))
    push += sum(_slowest(ranks, call) for call in ranks[0].profile.last_calls)
    ends = pull + request_s / 2, push + request_s / 2
    steps_on = max(rank.profile.steps_on for rank in ranks)
    if strategy.pipelined:
        return replace(_forecast_stages(job, ranks, *ends), steps_on=steps_on)
    if strategy.tensor_parallel:
        # All shards meet at each collective, so the piece before it takes as long as the slowest shard's.
        sent = sum(_slowest(ranks, call) for call in ranks[0].profile.calls)
        of_shards: list[list[Pass]] = [list(rank.profile.passes) for rank in ranks[: max(strategy.stage_workers)]]
        seconds = [
            sent + sum(max(pieces) for pieces in zip(*(each.pieces for each in together), strict=True))
            for together in zip(*of_shards, strict=True)
        ]
        return Forecast(seconds, *ends, steps_on=steps_on)
    return Forecast([sum(each.pieces) for each in passes], *ends)


def update_s(job: Job, gradients: int, steps_on: float = 1.0) -> Seconds:
    """Measure one update of so many gradients: the median of 9 in this process, while the others wait.

    Args:
        job: gives A and optimizer.
        gradients: that are combined.
        steps_on: the share of A that one worker updates, while others update theirs: of the time for all of it.
    """
    context, (_, state) = RunContext.of(job), first_state(job.program, job.running_buffers)
    optimizer = ServerOptimizer(job.program, context.policy, state.clone())
    buffers, samples = (state, state.clone()), list[Seconds]()
    deltas = [(state.clone(), 1 / gradients) for _ in range(gradients)]
    for number in range(REPEATS):
        began = time.perf_counter()
        optimizer.apply(deltas, alone=gradients == 1, out=buffers[number % 2])  # the old A is still being read
        samples.append(time.perf_counter() - began)
    return steps_on * statistics.median(samples)


def _measure_ranks(job: Job, fork_server: ForkServer | None) -> tuple[Sequence[MeasuredRank], Seconds]:
    """Return the measurements of each rank, and the time of a request to all ranks and their answers."""
    workers, cores = job.strategy.workers, len(os.sched_getaffinity(0))
    size = 1 if workers == 1 else max(2, min(workers, cores))
    with ExitStack() as closing:
        if fork_server is None:
            fork_server = ForkServer.start(NEEDS)
            closing.callback(fork_server.close)
        pool = WorkerPool(ProfileTask(replace(job, loop=None)), size, threads(job, size), fork_server)
        with pool:
            ranks, samples = pool.ask(None), []
            for _ in range(EMPTY_REQUESTS):
                began = time.perf_counter()
                pool.ask(EMPTY_REQUEST)
                samples.append(time.perf_counter() - began)
            return ranks, statistics.median(samples)


def _slowest(ranks: Sequence[MeasuredRank], call: CollectiveCall) -> Seconds:
    return max(rank.collectives[call] for rank in ranks)


def _forecast_stages(job: Job, ranks: Sequence[MeasuredRank], pull_s: Seconds, push_s: Seconds) -> Forecast:
    """Simulate the schedule with the measured times of its actions."""
    strategy = job.strategy
    stages, count, columns = strategy.stage_count, strategy.micro_batch_count, strategy.mesh.stage_replicas
    needs = ranks[0].profile.needs or Dependencies.chain(strategy.order.parts(stages))
    actions = list(timeline(strategy.order, _stage_times(job, ranks, needs), stages, count, columns, needs))
    end = max(each.end_ns for each in actions)

    def share(ns: int) -> int:  # in billionths of the whole
        return round(ns * 10**9 / end)

    shares = tuple(replace(a, start_ns=share(a.start_ns), end_ns=share(a.end_ns)) for a in actions)
    return Forecast([end * 1e-9], pull_s, push_s, ReplicaTiming(1.0, shares, columns.copies, needs))


def _stage_times(job: Job, ranks: Sequence[MeasuredRank], needs: Dependencies) -> StageTimes:
    """Return for each part the time of its actions, their collectives, and of sending and receiving."""
    strategy = job.strategy
    parts = range(strategy.order.parts(strategy.stage_count))
    first = ranks[0]
    sent = {ends: [first.messages[size] for size in sizes] for ends, sizes in first.profile.sent_bytes.items()}

    def action(part: int, kind: str) -> Seconds:
        profiles = [rank.profile for rank in ranks if (part, kind) in rank.profile.stages]
        if not profiles:
            return 0.0
        computed = max(statistics.median(profile.stages[part, kind]) for profile in profiles)
        return computed + sum(_slowest(ranks, call) for call in profiles[0].stage_calls.get((part, kind), ()))

    def messages(part: int, *, back: bool) -> Seconds:
        """Values go from a part to those that need them, and gradients back."""
        onward = [(part, other) for other in (needs.returning(part) if back else needs.consumers(part))]
        before = [(other, part) for other in (needs.returned(part) if back else needs.sources(part))]
        gives, takes = (before, onward) if back else (onward, before)
        sends = sum(each.send for ends in gives for each in sent.get(ends, ()))
        return sends + sum(each.receive for ends in takes for each in sent.get(ends, ()))

    forward = tuple(action(part, "forward") + messages(part, back=False) for part in parts)
    backward = tuple(
        action(part, "backward") + action(part, "backward_input") + messages(part, back=True) for part in parts
    )
    weight = tuple(action(part, "backward_weight") for part in parts)
    transits = [each.transit for of_ends in sent.values() for each in of_ends]
    return StageTimes(forward, backward, weight, statistics.fmean(transits) if transits else 0.0)
