"""Measure what one rank computes in a step while all others are as busy with theirs.

What one rank of a few times of its own work, while all others are as busy with theirs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.types import Seconds
from paceline.engine.run_context import RunContext, first_batch, first_state
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import Call, FakeShards, meet
from paceline.replica.base import Batch, Replica
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.tensor.placements import shard_layout
from paceline.replica.tensor.prepare import PreparedShard, plan_program
from paceline.replica.tensor.rewrite import add_unused_tensors, rewrite_for_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.schedule import Dependencies

MOST, LEAST, WARM = 15, 3, 2
"""Times that count, and before them times that don't."""

SHARE_S: Seconds = 4.0
"""So long a measurement may take, where the fewest times don't take longer."""


def repeats_within(once_s: Seconds) -> int:
    """How often something can be done that takes so long.

    >>> repeats_within(0.001), repeats_within(0.5), repeats_within(10.0)
    (15, 8, 3)
    """
    return max(LEAST, min(MOST, int(SHARE_S / max(once_s, 1e-9))))


def in_step(context: RankContext) -> Iterator[int]:
    """Numbers of times that all ranks begin together; those below 0 don't count. Ranks agree on how many there are."""
    began = time.perf_counter()
    for number in range(-WARM, 0):
        meet(context)
        yield number
    once_s = (time.perf_counter() - began) / WARM
    for number in range(max(context.gather(repeats_within(once_s), "how often"))):
        meet(context)
        yield number


@dataclass(frozen=True)
class Pass:
    """One pass over a batch, piece by piece; seconds."""

    pull: Seconds
    """To have A."""
    pieces: Sequence[Seconds]
    """Of forward and backward: before, between and after the collectives."""
    push: Seconds
    """To write Δ."""


@dataclass(frozen=True)
class Found:
    """What one rank has measured of its own work."""

    passes: Sequence[Pass] = ()
    """Of a replica without stages."""
    calls: Sequence[Call] = ()
    """The collectives of a pass, in order."""
    last_calls: Sequence[Call] = ()
    """Those that follow when Δ is written."""
    stages: Mapping[tuple[int, str], Sequence[Seconds]] = field(default_factory=dict)
    """(part, kind of action) -> its mean over the micro-batches of each pass."""
    stage_calls: Mapping[tuple[int, str], Sequence[Call]] = field(default_factory=dict)
    """The collectives of such an action."""
    sent_bytes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """Of a micro-batch, by the part that sends and the one that needs it."""
    needs: Dependencies | None = None
    """Of the parts; None: there are none."""
    steps_on: float = 1.0
    """Which share of A's elements."""


def plain(setup: RunContext, context: RankContext) -> Found:
    """A replica that is one worker."""
    module, state = first_state(setup.job.program, setup.job.running_buffers)
    replica = setup.replica(context.world.rank % setup.replicas, module, state.layout)
    return Found(_passes(setup, context, replica, state))


def sharded(setup: RunContext, context: RankContext) -> Found:
    """A replica whose operators are divided: one of its shards."""
    job, count = setup.job, max(setup.job.strategy.stage_workers)
    shard = FakeShards(context.world.rank % count, count)
    module, whole = first_state(job.program, job.running_buffers)
    batch, rules = first_batch(job), job.strategy.shard_rules
    with job.program.autocast("cpu"):
        captured, plan = plan_program(job.program, module, batch, count, rules, context.gather)
        made = rewrite_for_shard(plan, shard)
        add_unused_tensors(made, module)
    layout = shard_layout(whole.layout, made.parameters, shard.rank)
    state = read(made.module, layout.new())
    replica = TensorParallel(job.program, PreparedShard(captured, plan, made), shard, 0, layout)
    passes = _passes(setup, context, replica, state, shard)
    calls, last = _calls(replica, state, batch, shard)
    return Found(passes, calls, last, steps_on=share_of(layout, whole.layout))


def share_of(part: FlatLayout, whole: FlatLayout) -> float:
    """Of a worker's part of A in all of it, by bytes."""
    return part.parameter_bytes / max(1, whole.parameter_bytes)


def _passes(
    setup: RunContext, context: RankContext, replica: Replica, state: FlatState, shard: FakeShards | None = None
) -> Sequence[Pass]:
    batches, out, found = setup.batches(context.world.rank % setup.replicas), state.layout.new(), list[Pass]()
    mine = state.clone()
    for clock, number in enumerate(in_step(context)):
        began = time.perf_counter()
        if shard is not None:  # it has its part of A for itself
            mine.copy_(state)
        replica.adopt(mine)
        adopted = time.perf_counter()
        pieces = _advanced(replica, next(batches), clock, shard)
        finished = time.perf_counter()
        replica.finish(out)
        if shard is not None:
            mine.copy_(out)
        if number >= 0:
            found.append(Pass(adopted - began, pieces, time.perf_counter() - finished))
    return found


def _advanced(replica: Replica, batch: Batch, clock: int, shard: FakeShards | None) -> Sequence[Seconds]:
    began = time.perf_counter()
    if shard is not None:
        shard.begin()
    replica.advance(batch, clock)
    return [time.perf_counter() - began] if shard is None else shard.between()


def _calls(
    replica: Replica, state: FlatState, batch: Batch, shard: FakeShards
) -> tuple[Sequence[Call], Sequence[Call]]:
    """The collectives of a pass, and those of writing Δ."""
    replica.adopt(state)
    shard.begin()
    replica.advance(batch, 0)
    calls = shard.calls
    shard.begin()
    replica.finish(state.layout.new())
    return calls, shard.calls
