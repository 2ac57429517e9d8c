"""A captured model as rows of a profile, and how its units are divided among shards.

How the units of a captured model are divided among shards, as rows of a profile.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import NamedTuple

from torch import nn
from torch.fx import Node

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
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Placement, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.prepare import WithLoss, plan_captured
from paceline.replica.tensor.redistribute_cost import redistribution_cost
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan


def captured(program: Program, module: nn.Module, batch: Batch) -> Captured:
    """The model with its loss, operator by operator; raises InputError where it can't be captured."""
    given = (batch.input, batch.target)
    return capture(WithLoss(program, module), given, operators=True, of_inputs=False)


class Outline(NamedTuple):
    """What is known of a model before it is timed."""

    units: Units
    plans: Mapping[int, ShardingPlan | str]
    """By number of shards, or why there is none."""


def outline(program: Program, module: nn.Module, batch: Batch, shards: Iterable[int]) -> Outline:
    """Of a model; raises InputError where it can't be captured."""
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
    """The rows of a profile.

    Args:
        units: of the captured model.
        costs: samples -> what was measured with so many.
    """
    count = len(units.groups)
    saved = [_by_unit(each.units.saved, count) for each in costs.values()]
    going = [_crossing(each.units.values, count) for each in costs.values()]
    own, tied = _parameters(units)

    def line(found: Sequence[Sequence[int]], unit: int) -> LineFit:
        return LineFit.through({size: each[unit] for size, each in zip(costs, found, strict=True)})

    return tuple(
        Unit(_name(units, unit), own[unit], line(saved, unit), line(going, unit), tied.get(unit, ""))
        for unit in range(count)
    )


def seconds_of(
    units: Units, costs: Mapping[int, Costs], passes: Mapping[int, float], way: Callable[[NodeTime], float]
) -> tuple[LineFit, ...]:
    """Of each unit: its share of what whole passes take.

    Operators that are timed one by one take longer than in a pass, each about as much: their shares are right.

    Args:
        units: of the captured model.
        costs: samples -> what was measured with so many.
        passes: samples -> seconds of forward and backward together.
        way: forward or backward.
    """
    found: list[dict[int, float]] = [{} for _ in units.groups]
    for size, each in costs.items():
        total = fsum(sum(taken) for taken in each.nodes.values())
        for unit, nodes in enumerate(units.groups):
            spent = fsum(way(each.nodes[node.name]) for node in nodes)
            found[unit][size] = passes[size] * spent / total if total else 0.0
    return tuple(LineFit.through(each) for each in found)


def _by_unit(items: Iterable[SharedItem], count: int) -> list[int]:
    """What the first that uses it keeps."""
    found = [0] * count
    for item in items:
        found[min(item.uses)] += item.nbytes
    return found


def _crossing(items: Sequence[SharedItem], count: int) -> list[int]:
    """What goes over a cut behind each unit: what it or an earlier one makes for a later one."""
    return [sum(item.nbytes for item in items if item.made <= unit < max(item.uses)) for unit in range(count)]


def users(units: Units) -> dict[str, list[int]]:
    """Parameter -> the units that use it, ascending; the last unit has those that none uses."""
    graph, found = units.captured.module, dict[int, set[int]]()
    for node, unit in units.place.items():
        for parameter in _used(node, units):
            found.setdefault(id(parameter), set()).add(unit)
    last = {len(units.groups) - 1}
    return {name: sorted(found.get(id(parameter), last)) for name, parameter in graph.named_parameters()}


def _used(node: Node, units: Units) -> list[nn.Parameter]:
    graph = units.captured.module
    module = child(node, graph)
    got = [attribute(each, graph) for each in node.all_input_nodes if each.op == "get_attr"]
    found = [*got, *(module.parameters() if module is not None else ())]
    return [each for each in found if isinstance(each, nn.Parameter)]


def _parameters(units: Units) -> tuple[list[int], dict[int, str]]:
    """Elements of each unit; and the name of one that it shares with others, where there is such."""
    graph, count, tied = units.captured.module, [0] * len(units.groups), dict[int, str]()
    for name, where in users(units).items():
        for unit in where:
            count[unit] += graph.get_parameter(name).numel()
            tied |= {unit: name} if len(where) > 1 else {}
    return count, tied


def _name(units: Units, unit: int) -> str:
    """The module that its first operator comes from, or that operator."""
    first = units.groups[unit][0]
    return units.captured.owners.get(first.name, "") or first.name


_NAMED: dict[str, Collective] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
"""As tables call them; what goes to one or comes from one is counted as a broadcast."""


def division_of(units: Units, plan: ShardingPlan | str, shards: int, costs: Costs, samples: int) -> UnitSharding:
    """What the largest shard has of each unit.

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
        for name, where in users(self._units).items():
            for unit in where:
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
        """The share of its seconds; what is no operator of the plan is done by every shard."""
        shares = {step.call.node: step.strategy.share for step in self._steps[unit]}
        times = [(sum(self._costs.nodes[node.name]), shares.get(node, 1.0)) for node in self._units.groups[unit]]
        total = fsum(spent for spent, _ in times)
        return fsum(spent * share for spent, share in times) / total if total else 1.0

    def _kept(self, steps: Sequence[SearchStep]) -> float:
        """Of what goes through its operators, the share that a shard has."""
        through = [
            (value.nbytes, _share(layout))
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
            found = redistribution_cost(before, after, self._plan.shards, differentiable=value.differentiable)
            if found is not None and found.collectives[0]:
                forward.append(self._call(found.collectives[0], value))
            if found is not None and found.collectives[1]:
                backward.append(self._call(found.collectives[1], value))
        return [*forward, *self._within(step)], backward

    def _call(self, kind: str, value: GraphTensor) -> Sent:
        size = value.nbytes
        fixed = value.parameter is not None
        return Sent(_NAMED.get(kind, "broadcast"), LineFit(size, 0.0) if fixed else LineFit(0.0, size / self._samples))

    def _within(self, step: SearchStep) -> Iterator[Sent]:
        """Those that the written operator makes itself: sums, as of a norm's statistics."""
        count, k = step.strategy.collectives, self._plan.shards
        for _ in range(count):
            yield Sent("all_reduce", LineFit(step.strategy.sent_bytes / count * k / (2 * (k - 1)), 0.0))

    def _once(self) -> Iterator[Sent]:
        """Gradients of parameters that all shards have and each uses for its part of the work."""
        values = {
            str(value.parameter): value.nbytes
            for call in self._plan.graph.calls.values()
            for value in sharding_plan.operator_parameters(call)
            if self._plan.parameters.get(str(value.parameter)) == PARTIAL_GRAD
        }
        if values:
            yield Sent("all_reduce", LineFit(sum(values.values()), 0.0))


def _share(layout: Placement) -> float:
    return layout.share if isinstance(layout, Shard) else 1.0
