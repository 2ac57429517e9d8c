"""Which nodes each part runs, and which values it receives.

A captured model in parts: the graph of each, and what goes from which to which.
"""

import bisect
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from paceline.replica.module_utils import get_or_create_submodule
from paceline.replica.pipeline.base import Crossing, Cut, Part
from paceline.replica.pipeline.cut_groups import Units
from paceline.replica.pipeline.graph_nodes import inputs, unmarked


class Dataflow:
    """Units cut at boundaries.

    ::

        part     0                    1                       2
        makes    a, b                 c                       d
        needs    --                   a                       a, size of b, mask
        so       sends a to 1 and 2   receives a              receives a and the size; makes the mask itself
    """

    def __init__(self, units: Units, boundaries: Sequence[int]) -> None:
        self._units = units
        self._parts = range(len(boundaries) + 1)
        self._part_of = {node: bisect.bisect(boundaries, unit) for node, unit in units.place.items()}
        self._output = next(iter(reversed(units.captured.module.graph.nodes)))
        self.runs: list[set[Node]] = [set() for _ in self._parts]
        """Of each part: its units' nodes, and what it has of its own: leaves and what is done again."""
        self.receives: list[set[Node]] = [set() for _ in self._parts]
        for node, part in self._part_of.items():
            self.runs[part].add(node)
        for part in self._parts:
            for node in self._wanted(part):
                self._want(node, part)
        for part in reversed(self._parts):
            for node in self._wanted(part):
                if node in units.sizes:
                    self._want_size(node, part)

    def source(self, node: Node) -> int:
        """The part that makes what others receive."""
        if node in self._units.sizes:
            return max(map(self.source, inputs(node)), default=0)
        return self._part_of.get(node, 0)

    def consumers(self, node: Node) -> tuple[int, ...]:
        """The parts that receive it."""
        return tuple(part for part in self._parts if node in self.receives[part])

    def _wanted(self, part: int) -> list[Node]:
        """What the nodes of a part's units read; the last part gives the output."""
        readers = [node for node, number in self._part_of.items() if number == part]
        if part == self._parts[-1]:
            readers.append(self._output)
        return [each for reader in readers for each in inputs(reader)]

    def _want(self, node: Node, part: int) -> None:
        if node in self._part_of:
            if self._part_of[node] != part:
                self.receives[part].add(node)
        elif node not in self._units.sizes and node not in self.runs[part]:
            self.runs[part].add(node)
            for each in inputs(node):
                self._want(each, part)

    def _want_size(self, node: Node, part: int) -> None:
        """A number is computed from tensors that are there; where one isn't, the part that has them all sends it."""
        if node in self.receives[part] or node in self.runs[part]:
            return
        source = self.source(node)
        if part != source and not self._there(node, part):
            self.receives[part].add(node)
            self._want_size(node, source)
            return
        self.runs[part].add(node)
        for each in inputs(node):
            if each in self._units.sizes:
                self._want_size(each, part)
            else:
                self._want(each, part)

    def _there(self, node: Node, part: int) -> bool:
        """Whether a part has all that a node is computed from, or gets it anyway."""
        if node in self._part_of:
            return self._part_of[node] == part or node in self.receives[part]
        return node not in self._units.sizes or all(self._there(each, part) for each in inputs(node))


def cut(units: Units, boundaries: Sequence[int]) -> Cut:
    """The parts of a model.

    A value that several parts need goes from the one that makes it to each of them. What the output holds goes to the
    last part. Leaves of the input are never sent: each part takes those it needs.

    Args:
        units: of the captured model.
        boundaries: the units that parts 1, 2, ... begin with, ascending, as :func:`partition` and :func:`named` give
            them.
    """
    graph = units.captured.module
    flow = Dataflow(units, boundaries)
    received = {node for nodes in flow.receives for node in nodes}
    crossings = {
        node: Crossing(node.name, flow.source(node), flow.consumers(node))
        for node in graph.graph.nodes
        if node in received
    }
    parts = tuple(_part(number, units, flow, crossings) for number in range(len(boundaries) + 1))
    return Cut(units.captured, parts, _tied(graph, parts))


def _part(number: int, units: Units, flow: Dataflow, crossings: Mapping[Node, Crossing]) -> Part:
    whole = units.captured.module
    receives = [node for node in crossings if node in flow.receives[number]]
    sends = [node for node, crossing in crossings.items() if crossing.source == number]
    placeholders = whole.graph.find_nodes(op="placeholder")
    leaves = {node: index for index, node in enumerate(placeholders) if node in flow.runs[number]}
    graph, made = _graph(units, [*leaves, *receives], flow.runs[number])
    given = [_copied(made[node]) if node in units.lent else made[node] for node in sends]
    graph.output((*given, *(_outputs(whole.graph, made) if number == len(flow.runs) - 1 else ())))
    module = GraphModule(whole, graph, f"Part{number}")
    _name_as_in(whole, module)
    received, sent = (tuple(crossings[node] for node in nodes) for nodes in (receives, sends))
    return Part(number, module, tuple(leaves.values()), received, sent)


def _graph(units: Units, takes: Sequence[Node], runs: Container[Node]) -> tuple[Graph, dict[Node, Node]]:
    """A graph without its output: arguments, then what is run; and what each node has become in it."""
    graph, made = Graph(), dict[Node, Node]()
    for node in takes:
        made[node] = graph.create_node("placeholder", node.name, name=node.name)
        made[node].meta = dict(node.meta)
    for node in takes:
        if node in units.copied and node not in runs:
            made[node] = _copied(made[node])
    for node in units.captured.module.graph.nodes:
        if node in runs and node not in made:
            made[node] = graph.node_copy(node, lambda each: made[unmarked(each)])
    return graph, made


def _copied(node: Node) -> Node:
    return node.graph.call_function(torch.ops.aten.clone.default, (node,))


def _outputs(graph: Graph, made: Mapping[Node, Node]) -> tuple[Argument, ...]:
    """The leaves of the model's output, in the graph that they were made anew in."""
    (leaves,) = next(iter(reversed(graph.nodes))).args
    assert isinstance(leaves, tuple), "a captured graph returns a tuple"
    return tuple(map_arg(leaf, lambda each: made[unmarked(each)]) for leaf in leaves)


def _name_as_in(whole: nn.Module, part: nn.Module) -> None:
    """Let a parameter that two modules share have its one name also in a part that has the second of them alone."""
    names = {parameter: name for name, parameter in whole.named_parameters()}
    for name, parameter in list(part.named_parameters()):
        if name != names[parameter]:
            path, _, leaf = names[parameter].rpartition(".")
            get_or_create_submodule(part, path).register_parameter(leaf, parameter)
    order = {module: index for index, (module, _) in enumerate(whole.named_modules(remove_duplicate=False))}
    for path, module in list(part.named_modules()):
        prefix = f"{path}." if path else ""
        module._modules = dict(sorted(module._modules.items(), key=lambda item: order[prefix + item[0]]))


def _tied(whole: nn.Module, parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    """The parameters that several parts hold."""
    held = [(part.number, set(part.module.parameters())) for part in parts]
    where = {name: tuple(n for n, own in held if parameter in own) for name, parameter in whole.named_parameters()}
    return {name: numbers for name, numbers in where.items() if len(numbers) > 1}
