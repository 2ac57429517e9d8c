"""One rank's part of a profile: a captured model as rows, that is its units, their seconds, bytes and sharding.

A unit is a group of operators that can't be cut apart. Its parameters, saved bytes and output are counted from the
graph; its seconds are its share of whole passes; its sharding is the largest shard's part under a sharding plan::

    rank 0  time passes at each size | collectives | capture, plan, time operators    units and their divisions
    rank 1  time passes at each size | collectives | capture, time operators          (from rank 0 alone)
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal, NamedTuple

import torch
from torch import nn

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import first_batch
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import CollectiveCall, barrier, time_collectives, time_message
from paceline.engine.step_profile.compute import first_samples, products_per_s, repeats_within, time_sizes
from paceline.engine.worker_metrics import proportional_bytes
from paceline.planner.base import Collective
from paceline.planner.program.profile import LineFit, PipelinePart, Point, Sent, Unit, UnitSharding
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.capture.looks import other_inputs
from paceline.replica.module_utils import WithLoss
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.graph_nodes import attribute, child
from paceline.replica.tensor import sharding_plan
from paceline.replica.tensor.op_times import multiplication_counts
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.prepare import plan_captured
from paceline.replica.tensor.redistribute import redistribution_cost
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan

# Bytes of the collectives that are measured: 1 KiB to 4 MiB.
SIZES = (2**10, 2**14, 2**18, 2**22)

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class RankMeasurements:
    """All measurements of one rank."""

    passes: Mapping[int, Sequence[Seconds]]
    """Samples -> seconds of forward and backward, one for each repeat."""
    flops_per_s: float
    base_bytes: int
    """Bytes of the process before it builds the model."""
    points: Sequence[Point] = ()
    units: Sequence[Unit] = ()
    """Empty where the model can't be captured."""
    forward: Sequence[LineFit] = ()
    """Seconds, by unit; of a model that can't be captured a third of a pass, and of backward the rest."""
    backward: Sequence[LineFit] = ()
    divisions: Sequence[UnitSharding] = ()
    refused: str = ""
    """Why the model could not be captured."""


def measure_rank(job: Job, sizes: Sequence[int], shards: Sequence[int], context: RankContext) -> RankMeasurements:
    """Measure a program on one rank, while all others do the same.

    Args:
        job: a short run of the program.
        sizes: samples of micro-batches, descending; the first is a whole batch.
        shards: numbers of shards to plan for.
        context: of the rank.
    """
    base, program, batch = proportional_bytes(), job.program, first_batch(job)  # before the model exists
    barrier(context)
    passes, flops = time_sizes(context, job, sizes), products_per_s()
    points = tuple(measured_points(context)) if context.communicator is not None else ()
    rank, whole = RankMeasurements(passes, flops, base, points), {n: statistics.median(s) for n, s in passes.items()}
    repeats, costs = min(5, repeats_within(2 * sum(whole.values()))), dict[int, Costs]()
    try:
        with program.autocast("cpu"):
            model = outline(program, program.build(), batch, shards if context.world.rank == 0 else ())
            units, graph = model.units, model.units.captured
            for size in passes:  # descending: a whole batch is measured, whatever the graph accepts
                if size >= graph.input_spec.smallest or not costs:
                    rows = first_samples(batch, size)
                    costs[size] = measure(units, graph.flatten((rows.input, rows.target)), repeats)
    except InputError as error:
        line = LineFit.through(whole)
        return replace(rank, forward=(line.times(1 / 3),), backward=(line.times(2 / 3),), refused=str(error))
    forward, backward = seconds_of(units, costs, whole, 0), seconds_of(units, costs, whole, 1)
    largest = max(costs)
    divisions = tuple(division_of(units, plan, count, costs[largest], largest) for count, plan in model.plans.items())
    return replace(rank, units=units_of(units, costs), forward=forward, backward=backward, divisions=divisions)


def measured_points(context: RankContext) -> Iterator[Point]:
    """Yield times of collectives and messages among all ranks; all ranks call it together."""
    ranks = context.world.size
    for kind in KINDS:
        # by the elements that one rank gives: its part of a gathered or scattered tensor
        share = 4 if kind in ("all_reduce", "broadcast") else 4 * ranks
        calls = {size: CollectiveCall(kind, max(1, size // share), torch.float32) for size in SIZES}
        seconds = time_collectives(context, calls.values())
        yield from (Point(kind, ranks, size, seconds[call]) for size, call in calls.items())
    for size in SIZES:
        yield Point("send", 2, size, sum(time_message(context, size)))


class Outline(NamedTuple):
    """The units and sharding plans of a model, known before it is timed."""

    units: Units
    plans: Mapping[int, ShardingPlan | str]
    """Sharding plan, or why there is none, by number of shards."""


def outline(program: Program, module: nn.Module, batch: Batch, shards: Iterable[int]) -> Outline:
    """Capture a model with its loss, operator by operator, and plan its sharding; raise InputError where it can't be
    captured."""
    inputs, name = (batch.input, batch.target), type(module).__name__
    others = other_inputs(program, batch.samples, with_target=True)
    graph = capture(WithLoss(program, module), inputs, operators=True, of_inputs=False, others=others)
    leaves = graph.flatten(inputs)
    plans: dict[int, ShardingPlan | str] = {}
    for count in shards:
        try:
            plans[count] = plan_captured(graph, leaves, count, NO_RULES, multiplication_counts, name)
        except InputError as error:
            plans[count] = str(error)
    return Outline(group(graph), plans)


def units_of(units: Units, costs: Mapping[int, Costs]) -> tuple[Unit, ...]:
    """Return the units as rows of a profile.

    Args:
        units: of the captured model.
        costs: measurements by number of samples.
    """
    graph, count = units.captured, len(units.groups)
    saved, output = ([dict[int, float]() for _ in range(count)] for _ in range(2))
    for size, each in costs.items():
        for unit in range(count):
            # a shared tensor counts for its first user
            saved[unit][size] = sum(item.nbytes for item in each.units.saved if min(item.uses) == unit)
            # bytes over a cut behind the unit: values that it or an earlier one makes for a later one
            crossing = (item for item in each.units.values if item.producer <= unit < max(item.uses))
            output[unit][size] = sum(item.nbytes for item in crossing)
    parameters, tied = [0] * count, dict[int, str]()
    for name, owners in users(units).items():
        for unit in owners:
            parameters[unit] += graph.module.get_parameter(name).numel()
            tied |= {unit: name} if len(owners) > 1 else {}
    return tuple(
        Unit(
            graph.owners.get(nodes[0].name, "") or nodes[0].name,
            parameters[unit],
            LineFit.through(saved[unit]),
            LineFit.through(output[unit]),
            tied.get(unit, ""),
        )
        for unit, nodes in enumerate(units.groups)
    )


def seconds_of(
    units: Units, costs: Mapping[int, Costs], passes: Mapping[int, float], way: Literal[0, 1]
) -> tuple[LineFit, ...]:
    """Fit the seconds of each unit: its share of whole passes.

    Operators that are timed one by one take longer than in a pass, each about as much: their shares are right.

    Args:
        units: of the captured model.
        costs: measurements by number of samples.
        passes: samples -> seconds of forward and backward together.
        way: 0 forward, 1 backward.
    """
    seconds: list[dict[int, float]] = [{} for _ in units.groups]
    for size, each in costs.items():
        total = fsum(sum(times) for times in each.nodes.values())
        for unit, nodes in enumerate(units.groups):
            spent = fsum(each.nodes[node.name][way] for node in nodes)
            seconds[unit][size] = passes[size] * spent / total if total else 0.0
    return tuple(LineFit.through(each) for each in seconds)


def users(units: Units) -> dict[str, list[int]]:
    """Map each parameter to the units that use it, ascending; unused parameters belong to the last unit."""
    graph, by_id = units.captured.module, dict[int, set[int]]()
    for node, unit in units.place.items():
        module = child(node, graph)
        tensors = [attribute(each, graph) for each in node.all_input_nodes if each.op == "get_attr"]
        for tensor in (*tensors, *(module.parameters() if module is not None else ())):
            if isinstance(tensor, nn.Parameter):
                by_id.setdefault(id(tensor), set()).add(unit)
    last = {len(units.groups) - 1}
    return {name: sorted(by_id.get(id(parameter), last)) for name, parameter in graph.named_parameters()}


# Collectives by their names in reports; transfers to or from a single rank are counted as a broadcast.
_NAMED = {kind.replace("_", "-"): kind for kind in KINDS}


def division_of(units: Units, plan: ShardingPlan | str, shards: int, costs: Costs, samples: int) -> UnitSharding:
    """Return the largest shard's part of each unit.

    Args:
        units: of the captured model.
        plan: of the same graph, or why there is none.
        shards: k.
        costs: of its operators.
        samples: of the batch that was planned for.
    """
    if isinstance(plan, str):
        return UnitSharding(shards, refused=plan)
    dividing, names = _Dividing(units, plan, costs, samples), defaultdict[int, list[str]](list)
    for name, of_units in users(units).items():
        for unit in of_units:
            names[unit].append(name)
    # Summed once a step, after the last micro-batch: gradients whose parameters are replicated but used for a part of
    # the work on each shard.
    partial = {
        str(value.parameter): value.nbytes
        for call in plan.graph.calls.values()
        for value in sharding_plan.operator_parameters(call)
        if plan.parameters.get(str(value.parameter)) == PARTIAL_GRAD
    }
    once = (Sent("all_reduce", LineFit(sum(partial.values()), 0.0)),) if partial else ()
    return UnitSharding(shards, tuple(dividing.part(n, names[n]) for n in range(len(units.groups))), once=once)


class _Dividing:
    def __init__(self, units: Units, plan: ShardingPlan, costs: Costs, samples: int) -> None:
        self._units, self._plan, self._costs, self._samples = units, plan, costs, samples
        self._steps = defaultdict[int, list[SearchStep]](list)
        for step in plan.steps:
            unit = units.place.get(step.call.node)
            if unit is not None:
                self._steps[unit].append(step)
        self._sizes = {n: tensor.numel() for n, tensor in units.captured.module.named_parameters()}
        self._largest = max(range(plan.shards), key=lambda shard: sum(self._held(n, shard) for n in self._sizes))

    def part(self, unit: int, names: Sequence[str]) -> PipelinePart:
        """Return the largest shard's part of a unit with these parameters."""
        steps, nodes = self._steps[unit], self._units.groups[unit]
        shares = {step.call.node: step.strategy.share for step in steps}
        # operators outside the plan run on every shard
        work = _mean((sum(self._costs.nodes[node.name]), shares.get(node, 1.0)) for node in nodes)
        moved = {
            value.key: (value.nbytes, layout.share if isinstance(layout, Shard) else 1.0)
            for step in steps
            for values, layouts in (
                (step.call.inputs, step.strategy.inputs),
                (step.call.outputs, step.strategy.outputs),
            )
            for value, layout in zip(values, layouts, strict=True)
            if value.parameter is None
        }
        saved = [share for key, share in moved.items() if self._costs.kept.get(key) == unit]
        kept, passed = _mean(saved or moved.values()), _mean(moved.values())
        forward, backward = list[Sent](), list[Sent]()
        for step in steps:
            self._add_sent(step, forward, backward)
        parameters = sum(self._held(name, self._largest) for name in names)
        return PipelinePart(work, parameters, kept, tuple(forward), tuple(backward), passed)

    def _held(self, name: str, shard: int) -> int:
        layout, size = self._plan.parameters.get(name), self._sizes[name]
        if isinstance(layout, Shard):
            return size // layout.block_size * layout.sizes[shard]
        return 0 if isinstance(layout, OnRank) and layout.shard != shard else size

    def _add_sent(self, step: SearchStep, forward: list[Sent], backward: list[Sent]) -> None:
        """Add the collectives of an operator: of its inputs' redistribution, then inside it (a norm's statistics)."""
        count, k = step.strategy.collectives, self._plan.shards
        for value, before, after in step.redistributions:
            cost = redistribution_cost(before, after, k, differentiable=value.differentiable)
            size = LineFit(0.0, value.nbytes / self._samples)
            if value.parameter is not None:
                size = LineFit(value.nbytes, 0.0)
            for sent, kind in zip((forward, backward), cost.collectives if cost is not None else (), strict=False):
                if kind:
                    sent.append(Sent(_NAMED.get(kind, "broadcast"), size))
        for _ in range(count):
            # a ring sends 2 (k - 1) / k of the bytes that it sums: from sent bytes back to the tensor's size
            forward.append(Sent("all_reduce", LineFit(step.strategy.sent_bytes / count * k / (2 * (k - 1)), 0.0)))


def _mean(shares: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (weight, share), 1 without any weight."""
    pairs = list(shares)
    total = fsum(weight for weight, _ in pairs)
    return fsum(weight * share for weight, share in pairs) / total if total else 1.0
