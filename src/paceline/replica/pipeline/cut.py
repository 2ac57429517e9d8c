"""A captured model cut into parts: the graph of each, and the values that go from one to another.

::

    input leaves --> part 0 --a--> part 1 --b--> part 2 --> output
                        `------------c------------^          c: straight from its producer to its consumer

Later parts need what earlier ones make, never the other way round.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from paceline.replica.capture.capture import Captured
from paceline.replica.module_utils import get_or_create_submodule
from paceline.replica.pipeline.cut_groups import Units
from paceline.replica.pipeline.graph_nodes import inputs, unmarked


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one part computes and later parts read.

    Args:
        name: name of the node that computes it.
        consumers: parts, ascending.
    """

    name: str
    source: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A contiguous part of a model.

    Args:
        module: holds the tensors that the part uses, under their full names. Its forward takes ``inputs``, then
            ``received``; it returns a tuple of ``sent`` and, if it is the last part, of the leaves of the model's
            output.
        inputs: indices of the leaves of the model's input that it reads.
    """

    number: int
    module: GraphModule
    inputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Cut:
    """All parts of a model.

    Args:
        tied: full names of the parameters that several parts hold -> those parts.
    """

    captured: Captured
    parts: tuple[Part, ...]
    tied: Mapping[str, tuple[int, ...]]


class Dataflow:
    """The nodes that each part runs, and the values that it receives.

    ::

        part      0                    1                       2
        computes  a, b                 c                       d
        reads     --                   a                       a, size of b, mask
        so        sends a to 1 and 2   receives a              receives a and the size; computes the mask itself
    """

    def __init__(self, units: Units, boundaries: Sequence[int]) -> None:
        self._units = units
        self._parts = range(len(boundaries) + 1)
        self._part_of = {node: bisect.bisect(boundaries, unit) for node, unit in units.place.items()}
        self._output = next(iter(reversed(units.captured.module.graph.nodes)))
        self.runs: list[set[Node]] = [set() for _ in self._parts]
        """The nodes of each part: those of its units, leaves that it reads, and nodes that it computes again."""
        self.receives: list[set[Node]] = [set() for _ in self._parts]
        for node, part in self._part_of.items():
            self.runs[part].add(node)
        for part in self._parts:
            for node in self._read_by(part):
                self._require(node, part)
        # Sizes afterwards, and the last part first: a number that is sent may need more numbers in its source.
        for part in reversed(self._parts):
            for node in self._read_by(part):
                if node in units.sizes:
                    self._require_size(node, part)

    def source(self, node: Node) -> int:
        """Return the part that computes a value that others receive."""
        if node in self._units.sizes:
            return max(map(self.source, inputs(node)), default=0)
        return self._part_of.get(node, 0)

    def consumers(self, node: Node) -> tuple[int, ...]:
        """Return the parts that receive a value."""
        return tuple(part for part in self._parts if node in self.receives[part])

    def _read_by(self, part: int) -> list[Node]:
        """Return the values that the nodes of a part's units read; the last part also reads the output."""
        readers = [node for node, number in self._part_of.items() if number == part]
        if part == self._parts[-1]:
            readers.append(self._output)
        return [each for reader in readers for each in inputs(reader)]

    def _require(self, node: Node, part: int) -> None:
        if node in self._part_of:
            if self._part_of[node] != part:
                self.receives[part].add(node)
        elif node not in self._units.sizes and node not in self.runs[part]:
            self.runs[part].add(node)
            for each in inputs(node):
                self._require(each, part)

    def _require_size(self, node: Node, part: int) -> None:
        """Compute a number where its tensors are; where one is missing, the part that has them all sends it."""
        if node in self.receives[part] or node in self.runs[part]:
            return
        source = self.source(node)
        if part != source and not self._available(node, part):
            self.receives[part].add(node)
            self._require_size(node, source)
            return
        self.runs[part].add(node)
        for each in inputs(node):
            if each in self._units.sizes:
                self._require_size(each, part)
            else:
                self._require(each, part)

    def _available(self, node: Node, part: int) -> bool:
        """Return True if a part has all that a node is computed from, or gets it anyway."""
        if node in self._part_of:
            return self._part_of[node] == part or node in self.receives[part]
        return node not in self._units.sizes or all(self._available(each, part) for each in inputs(node))


def cut(units: Units, boundaries: Sequence[int]) -> Cut:
    """Return the parts of a model.

    A value that several parts read goes from the one that computes it to each of them. Values of the output go to the
    last part. Leaves of the input are never sent: each part takes those it reads.

    Args:
        units: of the captured model.
        boundaries: the units that parts 1, 2, ... begin with, ascending, as :func:`partition` and
            :func:`named_boundaries` return them.
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
    # By object: a tied parameter may have another name in each module.
    held = [(part.number, set(part.module.parameters())) for part in parts]
    holders = {name: tuple(n for n, own in held if parameter in own) for name, parameter in graph.named_parameters()}
    return Cut(units.captured, parts, {name: numbers for name, numbers in holders.items() if len(numbers) > 1})


def _part(number: int, units: Units, flow: Dataflow, crossings: Mapping[Node, Crossing]) -> Part:
    whole = units.captured.module
    receives = [node for node in crossings if node in flow.receives[number]]
    sends = [node for node, crossing in crossings.items() if crossing.source == number]
    placeholders = whole.graph.find_nodes(op="placeholder")
    leaves = {node: index for index, node in enumerate(placeholders) if node in flow.runs[number]}
    graph, copy_of, runs = Graph(), dict[Node, Node](), flow.runs[number]
    for node in (*leaves, *receives):
        copy_of[node] = graph.create_node("placeholder", node.name, name=node.name)
        copy_of[node].meta = dict(node.meta)
    for node in receives:
        if node in units.copied and node not in runs:
            copy_of[node] = _clone(copy_of[node])
    for node in whole.graph.nodes:
        if node in runs and node not in copy_of:
            copy_of[node] = graph.node_copy(node, lambda each: copy_of[unmarked(each)])

    outputs: list[Argument] = [_clone(copy_of[node]) if node in units.lent else copy_of[node] for node in sends]
    if number == len(flow.runs) - 1:
        (of_model,) = next(iter(reversed(whole.graph.nodes))).args
        assert isinstance(of_model, tuple), "a captured graph returns a tuple"
        outputs += [map_arg(leaf, lambda each: copy_of[unmarked(each)]) for leaf in of_model]
    graph.output(tuple(outputs))

    module = GraphModule(whole, graph, f"Part{number}")
    _use_names_of(whole, module)
    received, sent = (tuple(crossings[node] for node in nodes) for nodes in (receives, sends))
    return Part(number, module, tuple(leaves.values()), received, sent)


def _clone(node: Node) -> Node:
    return node.graph.call_function(torch.ops.aten.clone.default, (node,))


def _use_names_of(whole: nn.Module, part: nn.Module) -> None:
    """Name a shared parameter as in the whole model, also in a part that has only the second of its modules."""
    names = {parameter: name for name, parameter in whole.named_parameters()}
    for name, parameter in list(part.named_parameters()):
        if name != names[parameter]:
            path, _, leaf = names[parameter].rpartition(".")
            get_or_create_submodule(part, path).register_parameter(leaf, parameter)
    # Children in the model's order, so that parameters come in its order too.
    order = {module: index for index, (module, _) in enumerate(whole.named_modules(remove_duplicate=False))}
    for path, module in list(part.named_modules()):
        prefix = f"{path}." if path else ""
        module._modules = dict(sorted(module._modules.items(), key=lambda item: order[prefix + item[0]]))
