"""What processes of this host measure for a profile, all of them at work at the same time.

::

    main    question: (program, sizes, shards) ------>                 times of operators, of whole passes at each size
    rank 0  capture, plan, time operators, time passes | collectives   what is captured and how it can be divided
    rank 1  capture, plan, time operators, time passes | collectives   (from rank 0 alone)
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_batch, first_state
from paceline.engine.spmd.rank_context import RankContext, extended_timeout
from paceline.engine.spmd.worker_pool import Answering
from paceline.engine.step_profile.comm import CollectiveCall, barrier, time_collectives, time_message
from paceline.engine.step_profile.compute import WARM, repeats_within
from paceline.engine.worker import proportional_bytes
from paceline.planner.base import Collective
from paceline.planner.program.graph_profile import Outline, division_of, outline, seconds_of, units_of
from paceline.planner.program.profile import LineFit, Point, Unit, UnitSharding
from paceline.replica.base import Batch, Replica
from paceline.replica.flat_state import FlatState
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.prepare import select_rows

SIZES = (2**10, 2**14, 2**18, 2**22)
"""Bytes of the collectives that are measured: 1 KiB to 4 MiB."""

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

SIDE = 512
"""Of the matrices whose product tells floating-point operations per second."""


@dataclass(frozen=True)
class Captured:
    """What one rank knows of the model's operators."""

    units: Sequence[Unit]
    forward: Sequence[LineFit]
    backward: Sequence[LineFit]
    divisions: Sequence[UnitSharding]


@dataclass(frozen=True)
class Heard:
    """From one rank."""

    passes: Mapping[int, Sequence[Seconds]]
    """Samples -> forward and backward of so many, each time."""
    flops_per_s: float
    base_bytes: int
    """Of its process before it had a model."""
    captured: Captured | None = None
    refused: str = ""
    """Why it could not be captured."""
    points: Sequence[Point] = ()


@dataclass(frozen=True)
class Probe:
    """To measure a program."""

    job: Job
    sizes: Sequence[int]
    """Samples of micro-batches, descending; the first is a whole batch."""
    shards: Sequence[int] = field(default=())
    """Into how many it may be divided."""

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one rank for another."""
        return self.job.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """One rank's."""
        return lambda _: self._heard(context)

    def _heard(self, context: RankContext) -> Heard:
        base = proportional_bytes()
        with extended_timeout(context):
            barrier(context)
            passes, flops = self._passes(context), products_per_s()
            points = list(measured_points(context)) if context.communicator is not None else []
            try:
                found, refused = self._captured(context, passes), ""
            except InputError as error:
                found, refused = None, str(error)
        return Heard(passes, flops, base, found, refused, points)

    def _passes(self, context: RankContext) -> Mapping[int, Sequence[Seconds]]:
        """Of every size in turn, so that what disturbs the machine for a while disturbs all alike."""
        setup, batch = RunContext.of(self.job), first_batch(self.job)
        module, state = first_state(self.job.program, self.job.running_buffers)
        replica = setup.replica(0, module, state.layout)
        sizes = [size for size in self.sizes if size == batch.samples or able(replica, state, batch, size)]
        given = {size: part(batch, size) for size in sizes}
        taken = {size: [timed(replica, state, each) for _ in range(WARM)] for size, each in given.items()}
        longest = sum(times[-1] for times in taken.values())
        repeats = max(context.gather(repeats_within(longest), "how often"))
        found: dict[int, list[Seconds]] = {size: [] for size in given}
        for _ in range(repeats):
            for size, each in given.items():
                barrier(context)
                found[size].append(timed(replica, state, each))
        return found

    def _captured(self, context: RankContext, passes: Mapping[int, Sequence[Seconds]]) -> Captured:
        program, batch = self.job.program, first_batch(self.job)
        module = program.build()
        with program.autocast("cpu"):
            made = outline(program, module, batch, self.shards if context.world.rank == 0 else ())
            costs = self._costs(made, batch, passes)
        whole = {size: statistics.median(passes[size]) for size in costs}
        forward, backward = (seconds_of(made.units, costs, whole, way) for way in (_forward, _backward))
        largest = max(costs)
        divisions = [
            division_of(made.units, plan, count, costs[largest], largest) for count, plan in made.plans.items()
        ]
        return Captured(units_of(made.units, costs), forward, backward, divisions)

    def _costs(self, made: Outline, batch: Batch, passes: Mapping[int, Sequence[Seconds]]) -> Mapping[int, Costs]:
        """Of the sizes that the graph takes."""
        graph, found = made.units.captured, dict[int, Costs]()
        repeats = min(5, repeats_within(2 * sum(statistics.median(times) for times in passes.values())))
        for size in passes:
            given = part(batch, size)
            if size >= graph.input_spec.smallest or not found:
                found[size] = measure(made.units, graph.flatten((given.input, given.target)), repeats)
        return found


def part(batch: Batch, samples: int) -> Batch:
    """The first samples of a batch."""
    if samples == batch.samples:
        return batch
    first = slice(samples)
    return Batch(
        select_rows(batch.input, batch.samples, first), select_rows(batch.target, batch.samples, first), samples
    )


def able(replica: Replica, state: FlatState, batch: Batch, samples: int) -> bool:
    """Whether a step can be made with so few: statistics of one sample say nothing, and models may refuse it."""
    try:
        timed(replica, state, part(batch, samples))
    except Exception:
        return False
    return True


def timed(replica: Replica, state: FlatState, batch: Batch) -> Seconds:
    """Of forward and backward."""
    replica.adopt(state)
    began = time.perf_counter()
    replica.advance(batch, 0)
    return time.perf_counter() - began


def products_per_s() -> float:
    """Floating-point operations per second of a product of matrices, the median of 9."""
    a, taken = torch.ones(SIDE, SIDE), list[Seconds]()
    for _ in range(9):
        began = time.perf_counter()
        a @ a
        taken.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(taken)


def measured_points(context: RankContext) -> Iterator[Point]:
    """What collectives and messages take among all ranks; all of them call it together."""
    ranks = context.world.size
    for kind in KINDS:
        calls = {size: _call(kind, size, ranks) for size in SIZES}
        found = time_collectives(context, calls.values())
        yield from (Point(kind, ranks, size, found[call]) for size, call in calls.items())
    for size in SIZES:
        yield Point("send", 2, size, sum(time_message(context, size)))


def _call(kind: Collective, size: int, ranks: int) -> CollectiveCall:
    """Of elements that one rank gives; of a gathered or scattered tensor that is its part."""
    given = size if kind in ("all_reduce", "broadcast") else size // ranks
    return CollectiveCall(kind, max(1, given // 4), torch.float32)


def _forward(taken: tuple[Seconds, Seconds]) -> Seconds:
    return taken[0]


def _backward(taken: tuple[Seconds, Seconds]) -> Seconds:
    return taken[1]
