"""Measure what one rank computes in a step, while all other ranks are equally busy."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_batch, first_state
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import REPEATS, CollectiveCall, FakeShards, barrier
from paceline.replica.base import Batch, Replica
from paceline.replica.flat_state import FlatState, read
from paceline.replica.local_sgd import autograd_of
from paceline.replica.pipeline.micro_batches import select_rows
from paceline.replica.short_steps import ShortStepGraphs
from paceline.replica.tensor.placements import shard_layout
from paceline.replica.tensor.prepare import prepare_shard
from paceline.replica.tensor.runtime import TensorParallel
from paceline.schedule import Dependencies

# Bounds on the repeats that count, and how many before them do not.
MOST, LEAST, WARM = 15, 3, 2

# Passes until it is decided whether a step is a graph: one as it is, and one for each batch that they are compared on.
_UNDECIDED = 3

# Time that a measurement may take, unless the fewest repeats take longer.
SHARE_S: Seconds = 4.0

# Rows and columns of the matrices whose product measures floating-point operations per second.
SIDE = 512


def repeats_within(once_s: Seconds) -> int:
    """Return how often to repeat something that takes so long.

    >>> repeats_within(0.001), repeats_within(0.5), repeats_within(10.0)
    (15, 8, 3)
    """
    return max(LEAST, min(MOST, int(SHARE_S / max(once_s, 1e-9))))


def synchronized_repeats(context: RankContext, once_s: Seconds | None = None) -> Iterator[int]:
    """Yield numbers of repeats, which all ranks begin together and agree on; those below 0 do not count.

    Args:
        context: of the rank.
        once_s: how long one takes; None: it is measured in some that do not count.
    """
    if once_s is None:
        began = time.perf_counter()
        for number in range(-WARM, 0):
            barrier(context)
            yield number
        once_s = (time.perf_counter() - began) / WARM
    # all ranks repeat as often as the one that repeats most, or their barriers would not match
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


class PassTimer:
    """Times the passes of one replica.

    Args:
        replica: of one worker, or one shard.
        state: A, or the shard's part of it; stays as it is.
        shard: the shard's collectives; it also copies its part of A and of Δ.
        graphs: of the replica's short steps; None: it has none.
    """

    def __init__(
        self,
        replica: Replica,
        state: FlatState,
        shard: FakeShards | None = None,
        graphs: ShortStepGraphs | None = None,
    ) -> None:
        self._replica, self._state, self._shard, self._graphs = replica, state, shard, graphs
        self._local, self._out = state.clone(), state.layout.new()
        self.calls: Sequence[CollectiveCall] = ()
        """Collectives of the last pass, in order."""
        self.last_calls: Sequence[CollectiveCall] = ()
        """Collectives that followed when Δ was written."""

    @classmethod
    def of_whole(cls, setup: RunContext, number: ReplicaId, module: nn.Module, state: FlatState) -> "PassTimer":
        """Return the timer of a replica that is one worker, whose short steps are graphs as in a run."""
        replica = setup.replica(number, module, state.layout, graphs_after=0.0)
        autograd = autograd_of(replica)
        graphs = autograd.graphs if autograd is not None else None
        return cls(replica, state, graphs=graphs if isinstance(graphs, ShortStepGraphs) else None)

    def warm(self, batch: Batch) -> None:
        """Make passes over a batch until its form has a graph, or will have none."""
        for _ in range(_UNDECIDED):
            if self._graphs is None or not self._graphs.undecided(batch):
                break
            self.time(batch)

    def time(self, batch: Batch, clock: int = 0) -> Pass:
        """Time one pass over a batch."""
        # A copy of A in any case: a replica may step on the parameters that it has adopted.
        replica, shard, local = self._replica, self._shard, self._local
        began = time.perf_counter()
        if shard is not None:
            local.copy_(self._state)
        replica.adopt(local)
        pull = time.perf_counter() - began
        began = time.perf_counter()
        if shard is not None:
            shard.begin()
        replica.advance(batch, clock)
        finished = time.perf_counter()
        pieces = [finished - began]
        if shard is not None:
            pieces, self.calls = shard.segments(), shard.calls
            shard.begin()  # writing Δ may take collectives, too: sums of partial gradients
        began = time.perf_counter()
        replica.finish(self._out)
        if shard is not None:
            local.copy_(self._out)
            self.last_calls = shard.calls
        return Pass(pull, pieces, time.perf_counter() - began)


def profile_worker(setup: RunContext, context: RankContext) -> Sequence[RankProfile]:
    """Measure a replica of one worker, or one shard of a replica whose operators are divided."""
    job, number = setup.job, context.world.rank % setup.replicas
    module, whole = first_state(job.program, job.running_buffers)
    first, layout = first_batch(job), whole.layout
    if job.strategy.tensor_parallel:
        count, rules = max(job.strategy.stage_workers), job.strategy.shard_rules
        shard = FakeShards(context.world.rank % count, count)
        prepared = prepare_shard(job.program, module, first, shard, context.gather, rules, check=False)
        layout = shard_layout(whole.layout, prepared.shard.parameters, shard.rank)
        timer = PassTimer(TensorParallel(prepared, layout, 0), read(prepared.shard.module, layout.new()), shard)
    else:
        timer = PassTimer.of_whole(setup, number, module, whole)
        timer.warm(first)
    batches, repeats = setup.batches().stream(number), enumerate(synchronized_repeats(context))
    passes = [(repeat, timer.time(next(batches), clock)) for clock, repeat in repeats]
    timer.time(first)  # its collectives are those of a whole batch; the last one timed may be an epoch's short end
    counted = [each for repeat, each in passes if repeat >= 0]
    steps_on = layout.parameter_bytes / max(1, whole.layout.parameter_bytes)
    return [RankProfile(counted, timer.calls, timer.last_calls, steps_on=steps_on)]


def time_sizes(context: RankContext, job: Job, sizes: Sequence[int]) -> Mapping[int, Sequence[Seconds]]:
    """Time passes over the first samples of a batch, forward and backward, on all ranks at the same time.

    Every size is timed in turn, so that a temporary disturbance of the machine affects all alike.

    Args:
        context: of the rank.
        job: whose replicas are single workers.
        sizes: numbers of samples. The model may refuse one below a whole batch, as few as one sample: it is left out.

    Returns:
        Samples -> seconds, one for each repeat.
    """
    setup, whole = RunContext(job), first_batch(job)
    module, state = first_state(job.program, job.running_buffers)
    timer = PassTimer.of_whole(setup, 0, module, state)
    batches, once_s = dict[int, Batch](), 0.0
    for size in sizes:
        batch = first_samples(whole, size)
        try:
            timer.warm(batch)
            seconds = [timer.time(batch).pieces[0] for _ in range(WARM)]
        except Exception:
            if size == whole.samples:
                raise
        else:
            batches[size], once_s = batch, once_s + seconds[-1]
    times: dict[int, list[Seconds]] = {size: [] for size in batches}
    for _ in synchronized_repeats(context, once_s):
        for size, batch in batches.items():
            barrier(context)
            times[size].append(timer.time(batch).pieces[0])
    return times


def first_samples(batch: Batch, samples: int) -> Batch:
    """Return the first samples of a batch."""
    if samples == batch.samples:
        return batch
    inputs, targets = (select_rows(tree, batch.samples, slice(samples)) for tree in (batch.input, batch.target))
    return Batch(inputs, targets, samples)


def micro_step_s(context: RunContext) -> Seconds:
    """Return the real time of one micro-step of one replica: the median of 9 at A_0."""
    module, state = first_state(context.job.program, context.job.running_buffers)
    timer, batches = PassTimer.of_whole(context, 0, module, state), context.batches().stream(0)
    timer.warm(first_batch(context.job))
    return statistics.median(timer.time(next(batches), clock).pieces[0] for clock in range(REPEATS))


def products_per_s() -> float:
    """Measure floating-point operations per second of a matrix product, the median of 9."""
    a, times = torch.ones(SIDE, SIDE), list[Seconds]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(times)
