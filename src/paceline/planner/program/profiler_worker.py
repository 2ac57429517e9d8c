"""Measurements of a profile on worker processes of this host, all of them busy at the same time.

::

    main    request: (program, sizes, shards) ------>                  times of operators, of whole passes at each size
    rank 0  capture, plan, time operators, time passes | collectives   units and their divisions
    rank 1  capture, plan, time operators, time passes | collectives   (from rank 0 alone)
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_batch, first_state
from paceline.engine.spmd.launcher import Answering
from paceline.engine.spmd.rank_context import RankContext, extended_timeout
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
"""Rows and columns of the matrices whose product measures floating-point operations per second."""


@dataclass(frozen=True)
class MeasuredOperators:
    """One rank's measurements of the model's operators."""

    units: Sequence[Unit]
    forward: Sequence[LineFit]
    backward: Sequence[LineFit]
    divisions: Sequence[UnitSharding]


@dataclass(frozen=True)
class RankMeasurements:
    """All measurements of one rank."""

    passes: Mapping[int, Sequence[Seconds]]
    """Samples -> seconds of forward and backward, one for each repeat."""
    flops_per_s: float
    base_bytes: int
    """Bytes of the process before it builds the model."""
    captured: MeasuredOperators | None = None
    refused: str = ""
    """Why the model could not be captured."""
    points: Sequence[Point] = ()


@dataclass(frozen=True)
class Probe:
    """A request to measure a program."""

    job: Job
    sizes: Sequence[int]
    """Samples of micro-batches, descending; the first is a whole batch."""
    shards: Sequence[int] = field(default=())
    """Numbers of shards to plan for."""

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one rank for another."""
        return self.job.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """Return the rank's answer to a request."""
        return lambda _: self._measure(context)

    def _measure(self, context: RankContext) -> RankMeasurements:
        base = proportional_bytes()  # before the model exists
        with extended_timeout(context):
            barrier(context)
            passes, flops = self._passes(context), products_per_s()
            points = list(measured_points(context)) if context.communicator is not None else []
            try:
                operators, refused = self._measured_operators(context, passes), ""
            except InputError as error:
                operators, refused = None, str(error)
        return RankMeasurements(passes, flops, base, operators, refused, points)

    def _passes(self, context: RankContext) -> Mapping[int, Sequence[Seconds]]:
        """Time every size in turn, so that a temporary disturbance of the machine affects all alike."""
        setup, batch = RunContext.of(self.job), first_batch(self.job)
        module, state = first_state(self.job.program, self.job.running_buffers)
        replica = setup.replica(0, module, state.layout)
        sizes = [size for size in self.sizes if size == batch.samples or able(replica, state, batch, size)]
        batches = {size: part(batch, size) for size in sizes}
        warm = {size: [timed(replica, state, each) for _ in range(WARM)] for size, each in batches.items()}
        # all ranks repeat as often as the one that repeats most, or their barriers would not match
        repeats = max(context.gather(repeats_within(sum(times[-1] for times in warm.values())), "how often"))
        times: dict[int, list[Seconds]] = {size: [] for size in batches}
        for _ in range(repeats):
            for size, each in batches.items():
                barrier(context)
                times[size].append(timed(replica, state, each))
        return times

    def _measured_operators(self, context: RankContext, passes: Mapping[int, Sequence[Seconds]]) -> MeasuredOperators:
        program, batch = self.job.program, first_batch(self.job)
        module = program.build()
        with program.autocast("cpu"):
            model = outline(program, module, batch, self.shards if context.world.rank == 0 else ())
            costs = self._costs(model, batch, passes)
        whole = {size: statistics.median(passes[size]) for size in costs}
        forward, backward = (seconds_of(model.units, costs, whole, itemgetter(way)) for way in (0, 1))
        largest = max(costs)
        divisions = [
            division_of(model.units, plan, count, costs[largest], largest) for count, plan in model.plans.items()
        ]
        return MeasuredOperators(units_of(model.units, costs), forward, backward, divisions)

    def _costs(self, model: Outline, batch: Batch, passes: Mapping[int, Sequence[Seconds]]) -> Mapping[int, Costs]:
        """Measure the sizes that the graph accepts."""
        graph, costs = model.units.captured, dict[int, Costs]()
        repeats = min(5, repeats_within(2 * sum(statistics.median(times) for times in passes.values())))
        for size in passes:
            rows = part(batch, size)
            if size >= graph.input_spec.smallest or not costs:
                costs[size] = measure(model.units, graph.flatten((rows.input, rows.target)), repeats)
        return costs


def part(batch: Batch, samples: int) -> Batch:
    """Return the first samples of a batch."""
    if samples == batch.samples:
        return batch
    first = slice(samples)
    return Batch(
        select_rows(batch.input, batch.samples, first), select_rows(batch.target, batch.samples, first), samples
    )


def able(replica: Replica, state: FlatState, batch: Batch, samples: int) -> bool:
    """Return whether a step with so few samples works: models may refuse a single sample."""
    try:
        timed(replica, state, part(batch, samples))
    except Exception:
        return False
    return True


def timed(replica: Replica, state: FlatState, batch: Batch) -> Seconds:
    """Time one forward and backward pass."""
    replica.adopt(state)
    began = time.perf_counter()
    replica.advance(batch, 0)
    return time.perf_counter() - began


def products_per_s() -> float:
    """Measure floating-point operations per second of a matrix product, the median of 9."""
    a, times = torch.ones(SIDE, SIDE), list[Seconds]()
    for _ in range(9):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(times)


def measured_points(context: RankContext) -> Iterator[Point]:
    """Yield times of collectives and messages among all ranks; all ranks call it together."""
    ranks = context.world.size
    for kind in KINDS:
        calls = {size: _call(kind, size, ranks) for size in SIZES}
        seconds = time_collectives(context, calls.values())
        yield from (Point(kind, ranks, size, seconds[call]) for size, call in calls.items())
    for size in SIZES:
        yield Point("send", 2, size, sum(time_message(context, size)))


def _call(kind: Collective, size: int, ranks: int) -> CollectiveCall:
    """Return a collective by the elements that one rank gives: its part of a gathered or scattered tensor."""
    rank_bytes = size if kind in ("all_reduce", "broadcast") else size // ranks
    return CollectiveCall(kind, max(1, rank_bytes // 4), torch.float32)
