"""Predict the time of a step from its measured components.

::

    stages   the schedule, simulated with the time of each action of each part, and messages between them
    shards   Σ over the pieces between collectives of the slowest shard's time; and the collectives, of that size
    single   forward and backward, drawn from measured passes for each step
    then     pull and push: copies, and a request to main and its answer; an update, as often as one is made

Components are measured on as many processes as there will be workers, or cores, all busy at the same time, so that
they share memory and caches as in training.

In virtual time one process computes what a replica of several workers does, and only the clock accounts for them::

    one process   |------------- 1 -------------|
    stage 0       |F0 F1 ....  B0 .. B1|                  its schedule, simulated: factor = end of the last action
    stage 1          |F0 B0 F1 B1|

Where nothing but compute is measured, messages between them take no time.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

from paceline.comm.fork_server import ForkServer
from paceline.core.mesh import StageReplicas
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_batch, first_state, threads
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.launcher import PRELOAD, Answering, WorkerPool
from paceline.engine.spmd.rank_context import RankContext, extended_timeout
from paceline.engine.step_profile.comm import REPEATS, CollectiveCall, MessageTime, time_collectives, time_message
from paceline.engine.step_profile.compute import RankProfile, profile_worker
from paceline.engine.step_profile.pipeline_actions import profile_stages
from paceline.replica.pipeline.prepare import cut_as_named, part_dependencies, prepare_cut
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.prepare import plan_program
from paceline.schedule import Dependencies
from paceline.schedule.simulate import StageTimes, Timed, timeline
from paceline.strategy import Strategy
from paceline.trace.spans import Action, Span

# A request that takes no work to answer.
EMPTY_REQUEST = "nothing"

EMPTY_REQUESTS = 51


def virtual_span(
    replica: ReplicaId,
    action: Action,
    step: int,
    start_s: Seconds,
    end_s: Seconds,
    stage: int = 0,
    shard: int = 0,
    micro_batch: int = 0,
) -> Span:
    """Return a span of simulated time, in nanoseconds since the start of the run."""
    return Span(replica, stage, shard, action, step, micro_batch, round(start_s * 1e9), round(end_s * 1e9), 0)


@dataclass(frozen=True)
class ReplicaTiming:
    """Timing of the workers of one replica."""

    factor: float = 1.0
    """Time of the replica, relative to that of one process; in seconds, where its actions were measured."""
    actions: tuple[Timed, ...] = ()
    """Actions of a pipeline's workers, in billionths of the same unit."""
    copies: tuple[int, ...] = ()
    """Replicas of each stage."""
    needs: Dependencies | None = None
    """Dependencies of the model's parts; None: its cuts are not known, so each part depends on the one before it."""

    def spans(self, replica: ReplicaId, step: int, at: Seconds, alone: Seconds) -> Iterator[Span]:
        """Yield the spans of a pipeline's workers.

        Args:
            replica: its number.
            step: of its clock.
            at: when it begins to compute.
            alone: the unit of factor and actions, as long as it takes in this step.
        """
        columns = StageReplicas(self.copies)
        for each in self.actions:
            kind: Action = "backward" if each.action.kind.startswith("backward") else "forward"
            start, end = (at + alone * ns * 1e-9 for ns in (each.start_ns, each.end_ns))
            stage, shard = columns.at(each.worker)
            yield virtual_span(replica, kind, step, start, end, stage, shard, each.action.micro_batch)


@dataclass(frozen=True)
class Measurements:
    """What all ranks have measured."""

    profiles: Sequence[RankProfile]
    """Of each rank in turn: one, or several where there are fewer ranks than workers of a pipeline."""
    collectives: Mapping[CollectiveCall, Seconds]
    """Times of the slowest rank."""
    messages: Mapping[int, MessageTime]
    """Bytes -> time of such a message."""


@dataclass(frozen=True)
class MeasureTask:
    """Task of a worker pool: call ``measure`` on every rank at the same time, and answer empty requests."""

    measure: Callable[[RankContext], Any]
    timeout_s: Seconds

    def begin(self, context: RankContext) -> Answering:
        """Return the function that answers requests on one rank."""

        def answer(request: str) -> Any:
            if request == EMPTY_REQUEST:
                return None
            with extended_timeout(context):
                return self.measure(context)

        return answer


def measure_on_ranks(
    measure: Callable[[RankContext], Any], job: Job, size: int, fork_server: ForkServer | None = None
) -> tuple[Sequence[Any], Seconds]:
    """Measure on processes of this host that end before it returns.

    Args:
        measure: called on every rank; it can be pickled.
        job: gives the ranks' threads, and the timeout.
        size: number of ranks.
        fork_server: starts them; None: one for them alone.

    Returns:
        What each rank has measured, and the time of a request to all ranks and their answers.

    Raises:
        InputError: the model can't be measured so.
        WorkerError: a process failed.
    """
    with ExitStack() as stack:
        server = fork_server or stack.enter_context(closing(ForkServer.start(NEEDS)))
        pool = stack.enter_context(
            WorkerPool(MeasureTask(measure, job.timeout_s), size, threads(job.strategy, size), server)
        )
        ranks, samples = pool.ask("measure"), list[Seconds]()
        for _ in range(EMPTY_REQUESTS):
            began = time.perf_counter()
            pool.ask(EMPTY_REQUEST)
            samples.append(time.perf_counter() - began)
        return ranks, statistics.median(samples)


def _measure(job: Job, context: RankContext) -> Measurements:
    measure = profile_stages if job.strategy.pipelined else profile_worker
    profiles = list(chain(*context.gather(measure(RunContext(job), context), "what was measured")))
    # All ranks measure the collectives and messages of all, since they take part in them together.
    calls: dict[CollectiveCall, None] = {}
    for each in profiles:
        calls |= dict.fromkeys([*each.calls, *each.last_calls, *chain(*each.stage_calls.values())])
    times = context.gather(time_collectives(context, calls) if calls else {}, "times of collectives")
    sizes = sorted({size for each in profiles for sent in each.sent_bytes.values() for size in sent})
    messages = {nbytes: time_message(context, nbytes) for nbytes in sizes}
    return Measurements(profiles, {call: max(each[call] for each in times) for call in calls}, messages)


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


# Modules that the fork server of a forecast's processes imports.
NEEDS = (*PRELOAD, "paceline.engine.step_profile.forecast")


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
    strategy, cores = job.strategy, len(os.sched_getaffinity(0))
    size = 1 if strategy.workers == 1 else max(2, min(strategy.workers, cores))
    ranks, request_s = measure_on_ranks(partial(_measure, replace(job, loop=None)), job, size, fork_server)
    measured: Measurements = ranks[0]
    profiles, collectives = measured.profiles, measured.collectives
    passes = [each for profile in profiles for each in profile.passes]
    pull, push = (statistics.median(each) for each in ([p.pull for p in passes], [p.push for p in passes]))
    push += sum(collectives[call] for call in profiles[0].last_calls)
    # a request goes out with the grant, and its answer comes back with Δ: half of the time belongs to each
    ends = pull + request_s / 2, push + request_s / 2
    steps_on = max(each.steps_on for each in profiles)
    if strategy.pipelined:
        parts = strategy.order.parts(strategy.stage_count)
        needs = profiles[0].needs or Dependencies.chain(parts)
        timing = _schedule(strategy, _stage_times(range(parts), measured, needs), needs)
        return Forecast([timing.factor], *ends, timing, steps_on)
    if strategy.tensor_parallel:
        # All shards meet at each collective, so the piece before it takes as long as the slowest shard's.
        sent = sum(collectives[call] for call in profiles[0].calls)
        seconds = [
            sent + sum(max(pieces) for pieces in zip(*(each.pieces for each in together), strict=True))
            for together in zip(*(each.passes for each in profiles[: max(strategy.stage_workers)]), strict=True)
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
    context, (_, state) = RunContext(job), first_state(job.program, job.running_buffers)
    optimizer = ServerOptimizer(job.program, context.policy, state.clone())
    buffers, samples = (state, state.clone()), list[Seconds]()
    deltas = [(state.clone(), 1 / gradients) for _ in range(gradients)]
    for number in range(REPEATS):
        began = time.perf_counter()
        read = [buffers[1 - number % 2]] * gradients if context.keeps_read else []
        optimizer.apply(
            deltas, alone=gradients == 1, out=buffers[number % 2], read=read
        )  # the old A is still being read
        samples.append(time.perf_counter() - began)
    return steps_on * statistics.median(samples)


def _schedule(strategy: Strategy, times: StageTimes, needs: Dependencies | None) -> ReplicaTiming:
    """Simulate a pipeline's schedule with the times of its parts' actions."""
    stages, count, columns = strategy.stage_count, strategy.micro_batch_count, strategy.mesh.stage_replicas
    actions = tuple(timeline(strategy.order, times, stages, count, columns, needs))
    return ReplicaTiming(max(each.end_ns for each in actions) * 1e-9, actions, columns.copies, needs)


def _stage_times(parts: range, measured: Measurements, needs: Dependencies) -> StageTimes:
    """Return for each part the time of its actions, their collectives, and of sending and receiving."""
    sizes_sent = measured.profiles[0].sent_bytes
    sent = {ends: [measured.messages[size] for size in sizes] for ends, sizes in sizes_sent.items()}

    def action(part: int, kind: str) -> Seconds:
        profiles = [each for each in measured.profiles if (part, kind) in each.stages]
        if not profiles:
            return 0.0
        calls = profiles[0].stage_calls.get((part, kind), ())
        computed = max(statistics.median(profile.stages[part, kind]) for profile in profiles)
        return computed + sum(measured.collectives[call] for call in calls)

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
    # between stages no worker is busy: the simulator delays an arrival by the mean of all messages
    transits = [each.transit for of_ends in sent.values() for each in of_ends]
    return StageTimes(forward, backward, weight, statistics.fmean(transits) if transits else 0.0)


def replica_timing(job: Job, *, measured: bool) -> ReplicaTiming:
    """Compute the timing of a job's replicas.

    Args:
        job: its strategy says how a replica is divided.
        measured: True to give each stage the time measured for its part of the model; else all take the same, and the
            run is reproducible.

    Raises:
        InputError: the model can't be cut or divided so.
    """
    strategy = job.strategy
    if strategy.pipelined:
        sizes, needs = _part_sizes(job, measured=measured)
        stages, count = strategy.stage_count, strategy.micro_batch_count
        shards = [strategy.mesh.shards(strategy.order.worker_of(part, stages)) for part in range(len(sizes))]
        # a third of a part's time is forward, and k shards take 1/k
        third = tuple(size / sum(sizes) / count / k / 3 for size, k in zip(sizes, shards, strict=True))
        return _schedule(strategy, StageTimes(third, third, third), needs)
    if strategy.tensor_parallel:  # the share of all operations that the busiest shard executes
        batch, rules, largest = first_batch(job), strategy.shard_rules, max(strategy.stage_workers)
        _, plan = plan_program(job.program, job.program.build(), batch, largest, rules, counts=not measured)
        total = sum(op_work(step.call) for step in plan.steps)
        return ReplicaTiming(plan.cost.work / total if total else 1.0)
    return ReplicaTiming()


def _part_sizes(job: Job, *, measured: bool) -> tuple[Sequence[float], Dependencies | None]:
    """Return the relative times of a pipeline's parts, and which parts need which.

    Those that are not measured take as long as each other on one worker, so one with n stage replicas is n times as
    large. Without named cuts the best ones need measured times, and the dependencies are not known.
    """
    program, strategy = job.program, job.strategy
    parts = range(strategy.order.parts(strategy.stage_count))
    sizes: list[float] = [strategy.copies[strategy.order.worker_of(part, strategy.stage_count)] for part in parts]
    if not (measured or strategy.cuts):
        return sizes, None
    module, batch = program.build(), first_batch(job)
    if measured:
        made = prepare_cut(program, strategy, module, batch, lambda choose: choose())
        assert made.costs is not None, "they were measured here"
        starts = [0, *made.boundaries, len(made.costs.units.seconds)]
        sizes, cut = [sum(made.costs.units.seconds[a:b]) for a, b in pairwise(starts)], made.cut
    else:
        cut = cut_as_named(program, strategy, module, batch)
    return sizes, part_dependencies(program, cut, module, batch)
