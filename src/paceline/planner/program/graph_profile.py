"""A captured model as rows of a profile: its units, their seconds and bytes, and their sharding.

A unit is a group of operators that can't be cut apart. Its parameters, saved bytes and output are counted from the
graph; its seconds are its share of whole passes; its sharding is the largest shard's part under a sharding plan.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import NamedTuple

from torch import nn

from paceline.core.errors import InputError
from paceline.planner.base import Collective
from paceline.planner.program.profile import LineFit, PipelinePart, Sent, Unit, UnitSharding
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.pipeline.costs import Costs, NodeTime
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.graph_nodes import attribute, child
from paceline.replica.pipeline.partition import SharedItem
from paceline.replica.tensor import sharding_plan
from paceline.replica.tensor.base import GraphTensor
from paceline.replica.tensor.op_times import multiplication_counts
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.prepare import WithLoss, plan_captured
from paceline.replica.tensor.redistribute import redistribution_cost
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan


def captured(program: Program, module: nn.Module, batch: Batch) -> Captured:
    """Capture the model with its loss, operator by operator; raise InputError where that fails."""
    return capture(WithLoss(program, module), (batch.input, batch.target), operators=True, of_inputs=False)


class Outline(NamedTuple):
    """The units and sharding plans of a model, known before it is timed."""

    units: Units
    plans: Mapping[int, ShardingPlan | str]
    """Sharding plan, or why there is none, by number of shards."""


def outline(program: Program, module: nn.Module, batch: Batch, shards: Iterable[int]) -> Outline:
    """Capture a model and plan its sharding; raise InputError where it can't be captured."""
    graph, name = captured(program, module, batch), type(module).__name__
    leaves = graph.flatten((batch.input, batch.target))
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
    count = len(units.groups)
    saved = [_saved_bytes(each.units.saved, count) for each in costs.values()]
    # bytes over a cut behind each unit: values that it or an earlier unit makes for a later one
    output = [
        [
            sum(item.nbytes for item in each.units.values if item.producer <= unit < max(item.uses))
            for unit in range(count)
        ]
        for each in costs.values()
    ]
    own, tied = _parameters(units)

    def line(measured: Sequence[Sequence[int]], unit: int) -> LineFit:
        return LineFit.through({size: each[unit] for size, each in zip(costs, measured, strict=True)})

    return tuple(
        Unit(
            units.captured.owners.get(nodes[0].name, "") or nodes[0].name,
            own[unit],
            line(saved, unit),
            line(output, unit),
            tied.get(unit, ""),
        )
        for unit, nodes in enumerate(units.groups)
    )


def seconds_of(
    units: Units, costs: Mapping[int, Costs], passes: Mapping[int, float], way: Callable[[NodeTime], float]
) -> tuple[LineFit, ...]:
    """Fit the seconds of each unit: its share of whole passes.

    Operators that are timed one by one take longer than in a pass, each about as much: their shares are right.

    Args:
        units: of the captured model.
        costs: measurements by number of samples.
        passes: samples -> seconds of forward and backward together.
        way: forward or backward.
    """
    seconds: list[dict[int, float]] = [{} for _ in units.groups]
    for size, each in costs.items():
        total = fsum(sum(times) for times in each.nodes.values())
        for unit, nodes in enumerate(units.groups):
            spent = fsum(way(each.nodes[node.name]) for node in nodes)
            seconds[unit][size] = passes[size] * spent / total if total else 0.0
    return tuple(LineFit.through(each) for each in seconds)


def _saved_bytes(items: Iterable[SharedItem], count: int) -> list[int]:
    """Count the saved bytes of each unit; a shared tensor counts for its first user."""
    saved = [0] * count
    for item in items:
        saved[min(item.uses)] += item.nbytes
    return saved


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


def _parameters(units: Units) -> tuple[list[int], dict[int, str]]:
    """Count the elements of each unit; name one that it shares with others, if any."""
    graph, count, tied = units.captured.module, [0] * len(units.groups), dict[int, str]()
    for name, owners in users(units).items():
        for unit in owners:
            count[unit] += graph.get_parameter(name).numel()
            tied |= {unit: name} if len(owners) > 1 else {}
    return count, tied


_NAMED: dict[str, Collective] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
"""Collectives by their names in reports; transfers to or from a single rank are counted as a broadcast."""


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
    return _Dividing(units, plan, costs, samples).all()


class _Dividing:
    def __init__(self, units: Units, plan: ShardingPlan, costs: Costs, samples: int) -> None:
        self._units, self._plan, self._costs, self._samples = units, plan, costs, samples
        self._steps: dict[int, list[SearchStep]] = {unit: [] for unit in range(len(units.groups))}
        for step in plan.steps:
            unit = units.place.get(step.call.node)
            if unit is not None:
                self._steps[unit].append(step)
        self._sizes = {n: tensor.numel() for n, tensor in units.captured.module.named_parameters()}
        self._largest = max(range(plan.shards), key=lambda shard: sum(self._held(n, shard) for n in self._sizes))

    def all(self) -> UnitSharding:
        names: dict[int, list[str]] = {}
        for name, units in users(self._units).items():
            for unit in units:
                names.setdefault(unit, []).append(name)
        parts = tuple(self._part(unit, names.get(unit, ())) for unit in self._steps)
        return UnitSharding(self._plan.shards, parts, once=tuple(self._once()))

    def _part(self, unit: int, names: Sequence[str]) -> PipelinePart:
        steps = self._steps[unit]
        calls = [self._sent(step) for step in steps]
        return PipelinePart(
            self._work(unit),
            sum(self._held(name, self._largest) for name in names),
            self._kept(steps),
            tuple(sent for forward, _ in calls for sent in forward),
            tuple(sent for _, backward in calls for sent in backward),
        )

    def _work(self, unit: int) -> float:
        """Return the shard's share of the unit's seconds; operators outside the plan run on every shard."""
        shares = {step.call.node: step.strategy.share for step in self._steps[unit]}
        times = [(sum(self._costs.nodes[node.name]), shares.get(node, 1.0)) for node in self._units.groups[unit]]
        total = fsum(seconds for seconds, _ in times)
        return fsum(seconds * share for seconds, share in times) / total if total else 1.0

    def _kept(self, steps: Sequence[SearchStep]) -> float:
        """Return the shard's share of the bytes that go through the operators."""
        through = [
            (value.nbytes, layout.share if isinstance(layout, Shard) else 1.0)
            for step in steps
            for values, layouts in (
                (step.call.inputs, step.strategy.inputs),
                (step.call.outputs, step.strategy.outputs),
            )
            for value, layout in zip(values, layouts, strict=True)
            if value.parameter is None
        ]
        total = sum(size for size, _ in through)
        return fsum(size * share for size, share in through) / total if total else 1.0

    def _held(self, name: str, shard: int) -> int:
        layout, size = self._plan.parameters.get(name), self._sizes[name]
        if isinstance(layout, Shard):
            return size // layout.block_size * layout.sizes[shard]
        return 0 if isinstance(layout, OnRank) and layout.shard != shard else size

    def _sent(self, step: SearchStep) -> tuple[list[Sent], list[Sent]]:
        forward, backward = list[Sent](), list[Sent]()
        for value, before, after in step.redistributions:
            cost = redistribution_cost(before, after, self._plan.shards, differentiable=value.differentiable)
            if cost is not None and cost.collectives[0]:
                forward.append(self._call(cost.collectives[0], value))
            if cost is not None and cost.collectives[1]:
                backward.append(self._call(cost.collectives[1], value))
        return [*forward, *self._within(step)], backward

    def _call(self, kind: str, value: GraphTensor) -> Sent:
        size = value.nbytes
        fixed = value.parameter is not None
        return Sent(_NAMED.get(kind, "broadcast"), LineFit(size, 0.0) if fixed else LineFit(0.0, size / self._samples))

    def _within(self, step: SearchStep) -> Iterator[Sent]:
        """Yield the collectives inside the emitted operator: sums, as of a norm's statistics."""
        count, k = step.strategy.collectives, self._plan.shards
        for _ in range(count):
            # a ring sends 2 (k - 1) / k of the bytes that it sums: from sent bytes back to the tensor's size
            yield Sent("all_reduce", LineFit(step.strategy.sent_bytes / count * k / (2 * (k - 1)), 0.0))

    def _once(self) -> Iterator[Sent]:
        """Yield the all-reduce of gradients whose parameters are replicated but used for a part of the work on each
        shard."""
        values = {
            str(value.parameter): value.nbytes
            for call in self._plan.graph.calls.values()
            for value in sharding_plan.operator_parameters(call)
            if self._plan.parameters.get(str(value.parameter)) == PARTIAL_GRAD
        }
        if values:
            yield Sent("all_reduce", LineFit(sum(values.values()), 0.0))
