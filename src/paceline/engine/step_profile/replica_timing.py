"""Time of a replica of several workers for its Δ, relative to one process that computes the same.

::

    one process   |------------- 1 -------------|
    stage 0       |F0 F1 ....  B0 .. B1|                  its schedule, simulated: factor = end of the last action
    stage 1          |F0 B0 F1 B1|

A replica of several workers computes the same as one process; so in virtual time one process computes it, and only
the clock accounts for the others. Messages between them take no time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.mesh import StageReplicas
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import first_batch
from paceline.replica.pipeline.prepare import cut_as_named, part_dependencies, prepare_cut
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.prepare import plan_program
from paceline.schedule import Dependencies
from paceline.schedule.simulate import StageTimes, Timed, timeline
from paceline.strategy import Strategy
from paceline.trace.spans import Action, Span


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
    """Time of the replica, relative to that of one process."""
    actions: tuple[Timed, ...] = ()
    """Actions of a pipeline's workers, in billionths of the time of one process."""
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
            alone: what one process would take.
        """
        columns = StageReplicas(self.copies)
        for each in self.actions:
            kind: Action = "backward" if each.action.kind.startswith("backward") else "forward"
            start, end = (at + alone * ns * 1e-9 for ns in (each.start_ns, each.end_ns))
            stage, shard = columns.at(each.worker)
            yield virtual_span(replica, kind, step, start, end, stage, shard, each.action.micro_batch)


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
        times, needs = _stages(job) if measured else (_equal(strategy), _needed(job))
        stages, count, columns = strategy.stage_count, strategy.micro_batch_count, strategy.mesh.stage_replicas
        actions = tuple(timeline(strategy.order, times, stages, count, columns, needs))
        return ReplicaTiming(max(each.end_ns for each in actions) * 1e-9, actions, columns.copies, needs)
    if strategy.tensor_parallel:
        return ReplicaTiming(_busiest(job, counts=not measured))
    return ReplicaTiming()


def _equal(strategy: Strategy) -> StageTimes:
    """Return equal times for all workers: a part with n stage replicas is n times as large as one with one."""
    parts = range(strategy.order.parts(strategy.stage_count))
    sizes = [strategy.copies[strategy.order.worker_of(part, strategy.stage_count)] for part in parts]
    return _times(strategy, [size / sum(sizes) for size in sizes])


def _needed(job: Job) -> Dependencies | None:
    """Return the dependencies of the parts if the strategy names its cuts; else the best cuts need measured times."""
    if not job.strategy.cuts:
        return None
    module, batch = job.program.build(), first_batch(job)
    return part_dependencies(job.program, cut_as_named(job.program, job.strategy, module, batch), module, batch)


def _stages(job: Job) -> tuple[StageTimes, Dependencies]:
    """Measure the parts of the model, as shares of the time of one process; return their dependencies, too."""
    module, batch = job.program.build(), first_batch(job)
    made = prepare_cut(job.program, job.strategy, module, batch, lambda choose: choose())
    assert made.costs is not None, "they were measured here"
    starts = [0, *made.boundaries, len(made.costs.units.seconds)]
    parts = [sum(made.costs.units.seconds[a:b]) for a, b in pairwise(starts)]
    return _times(job.strategy, [part / sum(parts) for part in parts]), part_dependencies(
        job.program, made.cut, module, batch
    )


def _times(strategy: Strategy, shares: Sequence[float]) -> StageTimes:
    """Return the times of parts by their shares of the whole: a third is forward, and k shards take 1/k."""
    shards = [strategy.mesh.shards(stage) for stage in range(strategy.stage_count)]
    owners = [strategy.order.worker_of(part, strategy.stage_count) for part in range(len(shares))]
    count = strategy.micro_batch_count
    each = [share / count / shards[owner] for share, owner in zip(shares, owners, strict=True)]
    third = tuple(seconds / 3 for seconds in each)
    return StageTimes(third, third, third)


def _busiest(job: Job, *, counts: bool) -> float:
    """Return the share of all operations that the busiest shard executes."""
    strategy = job.strategy
    count = max(strategy.stage_workers)
    batch, rules = first_batch(job), strategy.shard_rules
    _, plan = plan_program(job.program, job.program.build(), batch, count, rules, counts=counts)
    total = sum(op_work(step.call) for step in plan.steps)
    return plan.cost.work / total if total else 1.0
