"""What must stay together in one part: the nodes of a graph, grouped into units in the graph's own order.

::

    graph    x  conv  bn  shortcut  add_  relu  arange  mask  fc      add_ writes what bn has made
    units       [0 ]  [1              1]  [2 ]                [3]     arange, mask: again in each part that needs them

Between any two units the graph can be cut. Four kinds of nodes belong to no unit:

- the input's leaves, parameters and constants: each part has its own;
- cheap nodes made of input leaves and constants alone (masks, positions): done again where they are needed;
- sizes of tensors: done again where the tensor is, sent as numbers where it is not;
- the marks that :func:`paceline.cut` leaves: between two of them, and nowhere else, lies what a part may be.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from paceline.core.errors import InputError
from paceline.replica.capture.capture import Captured
from paceline.replica.pipeline.graph_nodes import (
    Storage,
    attribute,
    child,
    inputs,
    is_cheap,
    is_item,
    is_mark,
    is_shape,
    reads_layout,
    storage,
    unmarked,
)

Span: TypeAlias = tuple[int, int]
"""First and last of a run of nodes."""


@dataclass(frozen=True)
class Units:
    """The nodes of a captured model, grouped."""

    captured: Captured
    groups: tuple[tuple[Node, ...], ...]
    """Of each unit its nodes, in the graph's order."""
    place: Mapping[Node, int]
    """Node -> its unit."""
    free: frozenset[Node]
    """Done again in each part that needs them."""
    sizes: frozenset[Node]
    """Numbers made of the sizes of what units make."""
    marks: tuple[int, ...]
    """The units that marks stand before."""
    copied: frozenset[Node]
    """What a module further on may write in place: a part that receives it works on a copy."""
    lent: frozenset[Node]
    """What lies in memory that is written while it is on its way: a part that sends it sends a copy."""

    @property
    def candidates(self) -> tuple[int, ...]:
        """The units that may begin a part; unit 0 always does."""
        return self.marks or tuple(range(1, len(self.groups)))

    def modules(self) -> dict[str, int]:
        """Full name of a module -> the first unit that comes from it or from what lies in it."""
        first: dict[str, int] = {}
        for unit, nodes in enumerate(self.groups):
            for node in nodes:
                for name in _ancestors(self.captured.owners.get(node.name, "")):
                    first.setdefault(name, unit)
        return first

    def nodes(self) -> dict[str, int]:
        """Name of a node -> its unit."""
        return {node.name: unit for node, unit in self.place.items()}


def group(captured: Captured) -> Units:
    """The units of a captured model.

    Raises:
        InputError: a mark stands where nothing can be cut.
    """
    graph = captured.module
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call") and not is_mark(node)]
    memory = storage(graph)
    free = _free(graph, memory)
    sizes = frozenset(node for node in nodes if is_shape(node) and node not in free)
    order = [n for n in nodes if n not in free and n not in sizes and not is_item(n)]
    runs = _merged(len(order), list(_bonds(order, memory, graph)))
    unit_of = {order[at]: unit for unit, (first, last) in enumerate(runs) for at in range(first, last + 1)}
    place = {node: unit_of[_maker(node)] for node in nodes if node not in free and node not in sizes}
    marks = _marks(captured, order, runs)
    return Units(
        captured, _groups(place, len(runs)), place, free, sizes, marks, memory.written_by_modules, memory.lent()
    )


def _maker(node: Node) -> Node:
    """The node whose results an item is one of."""
    while is_item(node):
        node = unmarked(node.all_input_nodes[0])
    return node


def _free(graph: GraphModule, memory: Storage) -> frozenset[Node]:
    """Cheap nodes that read nothing but input leaves and constants, none of it ever written."""
    free: set[Node] = set()

    def standing(node: Node) -> bool:
        return node in free or (_given(node, graph) and memory.stays(node))

    for node in graph.graph.nodes:
        able = node.op.startswith("call") and is_cheap(node) and not is_mark(node) and memory.stays(node)
        if able and all(map(standing, inputs(node))):
            free.add(node)
    return frozenset(free)


def _given(node: Node, graph: GraphModule) -> bool:
    """Whether it is a leaf of the input, or a constant."""
    return node.op == "placeholder" or (node.op == "get_attr" and not isinstance(attribute(node, graph), nn.Parameter))


def _bonds(order: Sequence[Node], memory: Storage, graph: GraphModule) -> Iterator[Span]:
    """Runs of nodes that can't be cut."""
    at = {node: index for index, node in enumerate(order)}
    for together in memory.together:
        where = [at[maker] for maker in (_maker(node) for node in together if not is_mark(node)) if maker in at]
        if where:
            yield min(where), max(where)
    for node in filter(reads_layout, order):
        yield min(at.get(_maker(each), at[node]) for each in inputs(node)), at[node]
    yield from _shared_buffers(order, graph)
    yield from _counters(order)


def _shared_buffers(order: Sequence[Node], graph: GraphModule) -> Iterator[Span]:
    """Modules that hold one buffer, which any of them may write."""
    first: dict[int, int] = {}
    for index, node in enumerate(order):
        module = child(node, graph)
        for buffer in module.buffers() if module is not None else ():
            yield first.setdefault(id(buffer), index), index


def _counters(order: Sequence[Node]) -> Iterator[Span]:
    """What reads nothing that was made, and nobody reads, counts, as batch norms do: it stays with what comes after."""
    for index, node in enumerate(order[:-1]):
        if not node.users and all(each.op == "get_attr" for each in node.all_input_nodes):
            yield index, index + 1


def _merged(count: int, bonds: Sequence[Span]) -> list[Span]:
    """All of 0 .. count - 1 in runs, as short as they can be with each bond within one of them.

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


def _groups(place: Mapping[Node, int], count: int) -> tuple[tuple[Node, ...], ...]:
    groups: list[list[Node]] = [[] for _ in range(count)]
    for node, unit in place.items():
        groups[unit].append(node)
    return tuple(map(tuple, groups))


def _marks(captured: Captured, order: Sequence[Node], runs: Sequence[Span]) -> tuple[int, ...]:
    """The units that begin where marks stand; marks before the first and after the last cut nothing off."""
    position = {node: index for index, node in enumerate(captured.module.graph.nodes)}
    begins = [position[order[first]] for first, _ in runs]
    ends = [position[order[last]] for _, last in runs]
    found = set[int]()
    for mark in filter(is_mark, captured.module.graph.nodes):
        unit = bisect.bisect(begins, position[mark])
        if unit > 0 and position[mark] < ends[unit - 1]:
            raise _refused(captured, mark, order[runs[unit - 1][0]], order[runs[unit - 1][1]])
        found.add(unit)
    return tuple(sorted(found - {0, len(runs)}))


def _refused(captured: Captured, mark: Node, first: Node, last: Node) -> InputError:
    owner = captured.owners.get(mark.name, "") or "the model"
    return InputError(
        f"paceline.cut in {owner} stands between {first.name!r} and {last.name!r}, which can't be cut apart: one "
        "writes in place what the other uses; write the operation out of place (x = x + y, inplace=False) or move "
        "paceline.cut before or after both"
    )


def _ancestors(name: str) -> Iterator[str]:
    """A module's full name and those of all that it lies in, but the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
