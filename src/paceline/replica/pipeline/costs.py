"""What each unit of a captured model costs: measured on one micro-batch, each node by itself.

A node is run on detached inputs, so its backward is its own: ``autograd.grad`` of what it makes, with gradients of one.
The whole graph is gone through several times, so that what disturbs a machine for a while disturbs all nodes alike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.core.types import Seconds
from paceline.replica.pipeline.kinds import attribute, child, inputs
from paceline.replica.pipeline.ledger import Ledger, nbytes
from paceline.replica.pipeline.partition import Row
from paceline.replica.pipeline.shared import Item
from paceline.replica.pipeline.stopwatch import Stopwatch, Taken
from paceline.replica.pipeline.trial import Trial
from paceline.replica.pipeline.units import Units
from paceline.replica.undisturbed import undisturbed


@dataclass(frozen=True)
class Costs:
    """Of the units of one model, for one micro-batch."""

    row: Row
    sizes: Mapping[str, int]
    """Name of a node -> bytes of the tensor that it makes."""
    nodes: Mapping[str, Taken] = field(default_factory=dict[str, Taken])
    """Name of a node that is in a unit -> what it takes by itself."""


def measure(units: Units, batch: Sequence[Tensor], repeats: int = 5) -> Costs:
    """Run each node ``repeats`` times, forward and backward, and take the median.

    It takes about ``repeats`` + 1 steps of the model, and the memory of one. Parameters, buffers and random state are
    as before when it is done. What it takes to ask autograd for the gradients of one node is measured on an empty one
    and subtracted: a step asks once for all.

    Args:
        units: of the captured model.
        batch: the leaves of a micro-batch's input, as ``Captured.flat`` gives them.
        repeats: at least 1.
    """
    graph = units.captured.module
    ledger = Ledger([*graph.parameters(), *graph.buffers()])
    with undisturbed(graph):
        first = Trial(graph, batch)
        for node in graph.graph.nodes:
            first.watched(node, units.place.get(node), ledger)
        sizes = {node.name: nbytes(value) for node, value in first.made.items() if isinstance(value, Tensor)}
        del first
        nodes = _taken(units, batch, repeats)
    row = Row(_seconds(units, nodes), _values(units, sizes), _held(units), ledger.items())
    return Costs(
        row, sizes, {node.name: Taken(*map(statistics.median, zip(*nodes[node], strict=True))) for node in nodes}
    )


def _seconds(units: Units, nodes: Mapping[Node, Sequence[Taken]]) -> list[Seconds]:
    """Of each unit: the sum over its nodes of the medians of forward and backward together."""
    return [math.fsum(statistics.median(map(sum, nodes[node])) for node in group) for group in units.groups]


def _taken(units: Units, batch: Sequence[Tensor], repeats: int) -> Mapping[Node, Sequence[Taken]]:
    """Of each node, each time."""
    graph = units.captured.module
    watch = Stopwatch(next((t.device for t in (*batch, *graph.parameters())), torch.device("cpu")))
    times: dict[Node, list[Taken]] = {node: [] for node in units.place}
    for _ in range(repeats):
        trial = Trial(graph, batch)
        for node in graph.graph.nodes:
            taken = trial.timed(node, watch)
            if node in times:
                times[node].append(taken)
    return times


def _values(units: Units, sizes: Mapping[str, int]) -> list[Item]:
    """What units make for others; the model's output is used by the last."""
    uses: dict[Node, set[int]] = {}
    for reader in units.captured.module.graph.nodes:
        unit = len(units.groups) - 1 if reader.op == "output" else units.place.get(reader)
        for node in inputs(reader) if unit is not None else ():
            if unit is not None and units.place.get(node, unit) != unit:
                uses.setdefault(node, set()).add(unit)
    return [Item(sizes.get(node.name, 0), tuple(sorted(by)), units.place[node]) for node, by in uses.items()]


def _held(units: Units) -> list[Item]:
    """The parameters, each with the units that use it."""
    graph = units.captured.module
    users: dict[nn.Parameter, set[int]] = {p: set() for p in graph.parameters()}
    for node, unit in units.place.items():
        module = child(node, graph)
        got = [attribute(each, graph) for each in node.all_input_nodes if each.op == "get_attr"]
        for parameter in (*got, *(module.parameters() if module is not None else ())):
            if isinstance(parameter, nn.Parameter):
                users[parameter].add(unit)
    return [Item(nbytes(p), tuple(sorted(by))) for p, by in users.items() if by]
