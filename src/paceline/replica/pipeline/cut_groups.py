"""Indivisible groups of nodes, the units: what has to stay in one part, in the graph's own order.

::

    graph    x  conv  bn  shortcut  add_  relu  arange  mask  fc      add_ writes the output of bn
    units       [0 ]  [1              1]  [2 ]                [3]     arange, mask: again in each part that reads them

Between any two units the graph can be cut. Four kinds of nodes belong to no unit:

- the input's leaves, parameters and constants: each part has its own;
- cheap nodes computed from input leaves and constants alone (masks, positions): computed again in each part;
- sizes of tensors: computed again where the tensor is, sent as numbers where it is not;
- the marks that :func:`paceline.cut` leaves: if there are any, parts begin and end only there.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from paceline.core.errors import InputError
from paceline.replica.capture.capture import Captured
from paceline.replica.pipeline import graph_nodes
from paceline.replica.pipeline.graph_nodes import inputs, is_item, is_mark

# First and last of a run of nodes.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Units:
    """The nodes of a captured model, grouped.

    Args:
        groups: for each unit its nodes, in the graph's order.
        place: node -> its unit.
        free: nodes that each part that reads them computes again.
        sizes: numbers computed from the sizes of units' values.
        marks: the units that marks precede.
        copied: values that a later module may write in place: a part that receives one works on a copy.
        lent: values in memory that may be written while they are being sent: a part that sends one sends a copy.
    """

    captured: Captured
    groups: tuple[tuple[Node, ...], ...]
    place: Mapping[Node, int]
    free: frozenset[Node]
    sizes: frozenset[Node]
    marks: tuple[int, ...]
    copied: frozenset[Node]
    lent: frozenset[Node]

    @property
    def candidates(self) -> tuple[int, ...]:
        """The units that may begin a part; unit 0 always does."""
        return self.marks or tuple(range(1, len(self.groups)))

    def modules(self) -> dict[str, int]:
        """Return full name of a module -> the first unit that comes from it or from a module within it."""
        first: dict[str, int] = {}
        for unit, nodes in enumerate(self.groups):
            for node in nodes:
                name = self.captured.owners.get(node.name, "")
                while name:
                    first.setdefault(name, unit)
                    name = name.rpartition(".")[0]
        return first

    def nodes(self) -> dict[str, int]:
        """Return name of a node -> its unit."""
        return {node.name: unit for node, unit in self.place.items()}


def group(captured: Captured) -> Units:
    """Return the units of a captured model.

    Raises:
        InputError: a mark stands where nothing can be cut.
    """
    graph = captured.module
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call") and not is_mark(node)]
    memory = graph_nodes.storage(graph)
    free = _free(graph, memory)
    sizes = frozenset(node for node in nodes if graph_nodes.is_shape(node) and node not in free)
    # Only these are ordered; items, sizes and free nodes follow what they read.
    order = [n for n in nodes if n not in free and n not in sizes and not is_item(n)]
    runs = _merged(len(order), list(_bonds(order, memory, graph)))
    unit_of = {order[at]: unit for unit, (first, last) in enumerate(runs) for at in range(first, last + 1)}
    place = {node: unit_of[_producer(node)] for node in nodes if node not in free and node not in sizes}
    groups: list[list[Node]] = [[] for _ in runs]
    for node, unit in place.items():
        groups[unit].append(node)
    marks = _marks(captured, order, runs)
    # In memory of parameters or buffers, which the next micro-batch or update may write.
    lent = frozenset(n for n, roots in memory.roots.items() if any(root.op == "get_attr" for root in roots))
    return Units(captured, tuple(map(tuple, groups)), place, free, sizes, marks, memory.written_by_modules, lent)


def _producer(node: Node) -> Node:
    """Return the node of several results that an item is one of; any other node itself."""
    while is_item(node):
        node = graph_nodes.unmarked(node.all_input_nodes[0])
    return node


def _free(graph: GraphModule, memory: graph_nodes.Storage) -> frozenset[Node]:
    """Return the cheap nodes that read nothing but input leaves and constants, none of it ever written."""
    constant: set[Node] = set()
    for node in (each for each in graph.graph.nodes if memory.written.isdisjoint(memory.roots[each])):
        leaf = node.op == "placeholder" or (
            node.op == "get_attr" and not isinstance(graph_nodes.attribute(node, graph), nn.Parameter)
        )
        cheap = node.op.startswith("call") and graph_nodes.is_cheap(node) and not is_mark(node)
        if leaf or (cheap and constant.issuperset(inputs(node))):
            constant.add(node)
    return frozenset(node for node in constant if node.op.startswith("call"))


def _bonds(order: Sequence[Node], memory: graph_nodes.Storage, graph: GraphModule) -> Iterator[Span]:
    """Yield runs of nodes that can't be cut."""
    at = {node: index for index, node in enumerate(order)}
    for together in memory.together:
        indices = [at[producer] for producer in (_producer(n) for n in together if not is_mark(n)) if producer in at]
        if indices:
            yield min(indices), max(indices)
    # Strides are lost when a tensor is sent.
    for node in (each for each in order if graph_nodes.schema_name(each) in graph_nodes.BY_LAYOUT):
        yield min(at.get(_producer(each), at[node]) for each in inputs(node)), at[node]

    # Modules that hold one buffer, which any of them may write.
    first: dict[int, int] = {}
    for index, node in enumerate(order):
        module = graph_nodes.child(node, graph)
        for buffer in module.buffers() if module is not None else ():
            yield first.setdefault(id(buffer), index), index

    # A node that reads only parameters and buffers, and whose result is not read, counts, as batch norms do: it stays
    # with what comes after.
    for index, node in enumerate(order[:-1]):
        if not node.users and all(each.op == "get_attr" for each in node.all_input_nodes):
            yield index, index + 1


def _merged(count: int, bonds: Sequence[Span]) -> list[Span]:
    """Return all of 0 .. count - 1 in runs, as short as they can be with each bond within one of them.

    >>> _merged(6, [(1, 2), (2, 4)])
    [(0, 0), (1, 4), (5, 5)]
    """
    reach = list(range(count))
    for first, last in bonds:
        reach[first] = max(reach[first], last)
    runs: list[Span] = []
    start, end = 0, -1
    for index, last in enumerate(reach):
        if index > end and index > start:
            runs.append((start, end))
            start = index
        end = max(end, last)
    return [*runs, (start, end)] if count else []


def _marks(captured: Captured, order: Sequence[Node], runs: Sequence[Span]) -> tuple[int, ...]:
    """Return the units that begin at marks; marks before the first and after the last cut nothing off."""
    position = {node: index for index, node in enumerate(captured.module.graph.nodes)}
    begins = [position[order[first]] for first, _ in runs]
    ends = [position[order[last]] for _, last in runs]
    units = set[int]()
    for mark in filter(is_mark, captured.module.graph.nodes):
        unit = bisect.bisect(begins, position[mark])
        if unit > 0 and position[mark] < ends[unit - 1]:
            owner = captured.owners.get(mark.name, "") or "the model"
            first, last = (order[at] for at in runs[unit - 1])
            raise InputError(
                f"paceline.cut in {owner} stands between {first.name!r} and {last.name!r}, which can't be cut apart: "
                "one writes in place what the other uses; write the operation out of place (x = x + y, "
                "inplace=False) or move paceline.cut before or after both"
            )
        units.add(unit)
    return tuple(sorted(units - {0, len(runs)}))
