"""Measure what one rank computes in a step, while all other ranks are equally busy."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.types import Seconds
from paceline.engine.run_context import RunContext, first_batch, first_state
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import CollectiveCall, FakeShards, barrier
from paceline.replica.base import Batch, Replica
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.tensor.placements import shard_layout
from paceline.replica.tensor.prepare import prepare_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.schedule import Dependencies

MOST, LEAST, WARM = 15, 3, 2
"""Bounds on the repeats that count, and how many before them do not."""

SHARE_S: Seconds = 4.0
"""Time that a measurement may take, unless the fewest repeats take longer."""


def repeats_within(once_s: Seconds) -> int:
    """Return how often to repeat something that takes so long.

    >>> repeats_within(0.001), repeats_within(0.5), repeats_within(10.0)
    (15, 8, 3)
    """
    return max(LEAST, min(MOST, int(SHARE_S / max(once_s, 1e-9))))


def synchronized_repeats(context: RankContext) -> Iterator[int]:
    """Yield numbers of repeats, which all ranks begin together and agree on; those below 0 do not count."""
    began = time.perf_counter()
    for number in range(-WARM, 0):
        barrier(context)
        yield number
    once_s = (time.perf_counter() - began) / WARM
    for number in range(max(context.gather(repeats_within(once_s), "how often"))):
        barrier(context)
        yield number


@dataclass(frozen=True)
class Pass:
    """Times of one pass over a batch."""

    pull: Seconds
    """Time to read A."""
    pieces: Sequence[Seconds]
    """Times of forward and backward before, between and after their collectives."""
    push: Seconds
    """Time to write Δ."""


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank's own work."""

    passes: Sequence[Pass] = ()
    """Passes, of a replica without stages whole, else without forward and backward."""
    calls: Sequence[CollectiveCall] = ()
    """Collectives of a pass, in order."""
    last_calls: Sequence[CollectiveCall] = ()
    """Collectives that follow when Δ is written."""
    stages: Mapping[tuple[int, str], Sequence[Seconds]] = field(default_factory=dict)
    """(part, kind of action) -> its mean over the micro-batches of each pass."""
    stage_calls: Mapping[tuple[int, str], Sequence[CollectiveCall]] = field(default_factory=dict)
    """(part, kind of action) -> its collectives."""
    sent_bytes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """(sending part, receiving part) -> sizes of the messages of a micro-batch."""
    needs: Dependencies | None = None
    """Dependencies of the parts; None: there are no parts."""
    steps_on: float = 1.0
    """Share of A's elements that the rank updates."""


def profile_single(setup: RunContext, context: RankContext) -> RankProfile:
    """Measure a replica of one worker."""
    module, state = first_state(setup.job.program, setup.job.running_buffers)
    replica = setup.replica(context.world.rank % setup.replicas, module, state.layout)
    return RankProfile(_passes(setup, context, replica, state))


def profile_shard(setup: RunContext, context: RankContext) -> RankProfile:
    """Measure one shard of a replica whose operators are divided."""
    job, count = setup.job, max(setup.job.strategy.stage_workers)
    shard = FakeShards(context.world.rank % count, count)
    module, whole = first_state(job.program, job.running_buffers)
    batch, rules = first_batch(job), job.strategy.shard_rules
    prepared = prepare_shard(job.program, module, batch, shard, context.gather, rules, check=False)
    layout = shard_layout(whole.layout, prepared.shard.parameters, shard.rank)
    state = read(prepared.shard.module, layout.new())
    replica = TensorParallel(prepared, layout, 0)
    passes = _passes(setup, context, replica, state, shard)
    calls, last = _collectives(replica, state, batch, shard)
    return RankProfile(passes, calls, last, steps_on=parameter_share(layout, whole.layout))


def parameter_share(part: FlatLayout, whole: FlatLayout) -> float:
    """Return the share of a worker's part in all of A, by bytes."""
    return part.parameter_bytes / max(1, whole.parameter_bytes)


def _passes(
    setup: RunContext, context: RankContext, replica: Replica, state: FlatState, shard: FakeShards | None = None
) -> Sequence[Pass]:
    batches, out, passes = setup.batches(context.world.rank % setup.replicas), state.layout.new(), list[Pass]()
    local = state.clone()
    for clock, number in enumerate(synchronized_repeats(context)):
        began = time.perf_counter()
        if shard is not None:  # a shard copies its part of A
            local.copy_(state)
        replica.adopt(local)
        pull = time.perf_counter() - began
        batch = next(batches)
        began = time.perf_counter()
        if shard is not None:
            shard.begin()
        replica.advance(batch, clock)
        finished = time.perf_counter()
        pieces = [finished - began] if shard is None else shard.segments()
        began = time.perf_counter()
        replica.finish(out)
        if shard is not None:
            local.copy_(out)
        if number >= 0:
            passes.append(Pass(pull, pieces, time.perf_counter() - began))
    return passes


def _collectives(
    replica: Replica, state: FlatState, batch: Batch, shard: FakeShards
) -> tuple[Sequence[CollectiveCall], Sequence[CollectiveCall]]:
    """Return the collectives of a pass, and those of writing Δ."""
    replica.adopt(state)
    shard.begin()
    replica.advance(batch, 0)
    calls = shard.calls
    shard.begin()
    replica.finish(state.layout.new())
    return calls, shard.calls
