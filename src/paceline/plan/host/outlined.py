"""A captured model as rows of a profile: what each unit has, saves and passes on, and what it takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import NamedTuple

from torch import nn
from torch.fx import Node

from paceline.core.errors import InputError
from paceline.plan.host.profile import Line, Unit
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture import Captured, capture
from paceline.replica.pipeline.costs import Costs
from paceline.replica.pipeline.kinds import attribute, child
from paceline.replica.pipeline.shared import Item
from paceline.replica.pipeline.stopwatch import Taken
from paceline.replica.pipeline.units import Units, group
from paceline.replica.tensor.branches import counted
from paceline.replica.tensor.plan import NO_RULES, Plan
from paceline.replica.tensor.preparation import planned_graph
from paceline.replica.tensor.with_loss import WithLoss


def captured(program: Program, module: nn.Module, batch: Batch) -> Captured:
    """The model with its loss, operator by operator; raises InputError where it can't be captured."""
    given = (batch.input, batch.target)
    return capture(WithLoss(program, module), given, operators=True, of_inputs=False)


class Outline(NamedTuple):
    """What is known of a model before it is timed."""

    units: Units
    plans: Mapping[int, Plan | str]
    """By number of shards, or why there is none."""


def outline(program: Program, module: nn.Module, batch: Batch, shards: Iterable[int]) -> Outline:
    """Of a model; raises InputError where it can't be captured."""
    graph, name = captured(program, module, batch), type(module).__name__
    leaves = graph.flat((batch.input, batch.target))
    plans: dict[int, Plan | str] = {}
    for count in shards:
        try:
            plans[count] = planned_graph(graph, leaves, count, NO_RULES, counted, name)
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
    saved = [_by_unit(each.row.saved, count) for each in costs.values()]
    going = [_crossing(each.row.values, count) for each in costs.values()]
    own, tied = _parameters(units)

    def line(found: Sequence[Sequence[int]], unit: int) -> Line:
        return Line.through({size: each[unit] for size, each in zip(costs, found, strict=True)})

    return tuple(
        Unit(_name(units, unit), own[unit], line(saved, unit), line(going, unit), tied.get(unit, ""))
        for unit in range(count)
    )


def seconds_of(
    units: Units, costs: Mapping[int, Costs], passes: Mapping[int, float], way: Callable[[Taken], float]
) -> tuple[Line, ...]:
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
    return tuple(Line.through(each) for each in found)


def _by_unit(items: Iterable[Item], count: int) -> list[int]:
    """What the first that uses it keeps."""
    found = [0] * count
    for item in items:
        found[min(item.uses)] += item.nbytes
    return found


def _crossing(items: Sequence[Item], count: int) -> list[int]:
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
