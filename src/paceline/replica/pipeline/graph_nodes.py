"""Nodes of a captured graph: their kinds, what they mutate, and which of them share memory.

What a node does besides making a value: what it writes in place, and whose memory it hands on.

Which nodes of a graph share memory that one of them writes, as far as it can be told without running it.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

MARK = "paceline::cut"

_BY_LAYOUT = ("aten::as_strided", "aten::sym_stride", "aten::sym_storage_offset")
"""What these give depends on where a tensor's elements lie, which a tensor that has been sent does not keep."""

_CHEAP = {
    *("aten::__and__", "aten::__or__", "aten::__xor__", "aten::all", "aten::any", "aten::arange", "aten::cat"),
    *("aten::constant_pad_nd", "aten::cumsum", "aten::flip", "aten::full", "aten::full_like", "aten::gather"),
    *("aten::index", "aten::lift_fresh_copy", "aten::linspace", "aten::new_full", "aten::new_ones"),
    *("aten::new_zeros", "aten::one_hot", "aten::ones", "aten::ones_like", "aten::pad", "aten::repeat"),
    *("aten::roll", "aten::scalar_tensor", "aten::stack", "aten::tril", "aten::triu", "aten::zeros"),
    "aten::zeros_like",
}
"""Operators that cost about as much as sending what they make, beside views and pointwise ones."""


def schema_name(node: Node) -> str:
    """``aten::add``, whichever overload; "" where the target has no schema."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def is_mark(node: Node) -> bool:
    """Whether the user has written :func:`paceline.cut` here: the mark itself, or one of the values at it."""
    return schema_name(node) == MARK or (is_item(node) and schema_name(node.all_input_nodes[0]) == MARK)


def unmarked(node: Node) -> Node:
    """What stands at a mark; any other node itself."""
    while is_mark(node):
        assert is_item(node), "a mark takes and gives a list"
        mark, index = node.args
        node = mark.args[0][index]  # type: ignore[union-attr, index, assignment]
    return node


def inputs(node: Node) -> list[Node]:
    """The nodes that it reads, as if there were no marks."""
    return [unmarked(each) for each in node.all_input_nodes]


def is_item(node: Node) -> bool:
    """Whether it picks one of several results of another node."""
    return node.target in (operator.getitem, getattr)


def is_shape(node: Node) -> bool:
    """Whether it is a size of a tensor, or arithmetic on sizes."""
    if schema_name(node) in ("aten::sym_size", "aten::sym_numel"):
        return True
    module = getattr(node.target, "__module__", "")
    name = getattr(node.target, "__name__", "")
    return not is_item(node) and (module in ("_operator", "math") or (module == "torch" and name.startswith("sym_")))


def is_cheap(node: Node) -> bool:
    """Whether doing it in several parts, without randomness, costs no more than sending its result."""
    if is_item(node) or is_shape(node):
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    hands_on = any(argument.alias_info is not None for argument in node.target._schema.arguments)
    return hands_on or torch.Tag.pointwise in node.target.tags or schema_name(node) in _CHEAP


def reads_layout(node: Node) -> bool:
    """Whether it has to run where the tensors that it takes were made."""
    return schema_name(node) in _BY_LAYOUT


def child(node: Node, root: nn.Module) -> nn.Module | None:
    """The module that a ``call_module`` node calls."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def attribute(node: Node, root: nn.Module) -> object:
    """What a ``get_attr`` node gets."""
    value: object = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


_RUNNING = ("running_mean", "running_var")
"""Arguments that normalisations write although their schemas don't say so (torch 2.13)."""


def roots(graph: GraphModule) -> dict[Node, frozenset[Node]]:
    """Node -> those in whose memory its result may lie: itself and what it hands on; of one tensor one node."""
    found: dict[Node, frozenset[Node]] = {}
    holders: dict[int, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found[node] = frozenset({holders.setdefault(id(attribute(node, graph)), node)})
        else:
            found[node] = frozenset({node}).union(*(found[each] for each in handed_on(node, graph)))
    return found


def written(node: Node, root: nn.Module) -> list[Node]:
    """The arguments that a node writes in place, as far as can be seen without running it."""
    if isinstance(node.target, OpOverload):
        if schema_name(node) == "aten::detach_" and schema_name(node.all_input_nodes[0]) == "aten::lift_fresh_copy":
            return []  # how torch.export (2.13) writes torch.tensor(2.0): it writes a history, and there is none
        return [
            given
            for argument, given in _arguments(node)
            if argument.name in _RUNNING or (argument.alias_info is not None and argument.alias_info.is_write)
        ]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=True)
    module = child(node, root)
    return list(node.all_input_nodes) if module is not None and _in_place(module) else []


def handed_on(node: Node, root: nn.Module) -> list[Node]:
    """The arguments whose memory the result may share."""
    if is_item(node):
        return [unmarked(node)] if is_mark(node) else list(node.all_input_nodes)
    if isinstance(node.target, OpOverload):
        maybe = torch.Tag.maybe_aliasing_or_mutating in node.target.tags
        maybe = maybe and not any(argument.name in _RUNNING for argument in node.target._schema.arguments)
        return [given for argument, given in _arguments(node) if maybe or argument.alias_info is not None]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=False)
    module = child(node, root)
    # A child without parameters may be a Flatten or an Identity; one that has some makes something new of its input.
    return list(node.all_input_nodes) if module is not None and not has_parameters(module) else []


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything to train in it."""
    return next(module.parameters(), None) is not None


def _in_place(module: nn.Module) -> bool:
    """Whether any module in it has been asked to work in place."""
    return any(getattr(each, "inplace", False) is True for each in module.modules())


def _of_block(node: Node, root: nn.Module, *, writes: bool) -> list[Node]:
    """What a block under no_grad or autocast writes, or hands on, of the arguments that it is called with."""
    blocks = [n for n in node.args if isinstance(n, Node) and isinstance(_got(n, root), GraphModule)]
    given = list(node.args[node.args.index(blocks[0]) + 1 :]) if blocks else []
    block = _got(blocks[0], root) if blocks else None
    leaves = block.graph.find_nodes(op="placeholder") if isinstance(block, GraphModule) else []
    if not isinstance(block, GraphModule) or len(blocks) > 1 or len(leaves) != len(given):
        return list(node.all_input_nodes)  # another operator that calls graphs: of those nothing is known
    lies_in = roots(block)
    ends = next(iter(reversed(block.graph.nodes))).all_input_nodes
    touched = [w for n in block.graph.nodes for w in written(n, block)] if writes else ends
    inside = frozenset[Node]().union(*(lies_in[each] for each in touched))
    return [each for each, leaf in zip(given, leaves, strict=True) if leaf in inside and isinstance(each, Node)]


def _got(node: Node, root: nn.Module) -> object:
    return attribute(node, root) if node.op == "get_attr" else None


def _arguments(node: Node) -> Iterator[tuple[torch.Argument, Node]]:
    """Each argument of an operator's schema with the nodes given for it."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for each in given if isinstance(given, Iterable) and not isinstance(given, str) else (given,):
            if isinstance(each, Node):
                yield argument, each


_GIVEN = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Storage:
    """What in-place operators do to a graph."""

    roots: Mapping[Node, frozenset[Node]]
    """Node -> those in whose memory its result may lie: itself, and what it hands on."""
    written: frozenset[Node]
    """In whose memory something is written."""
    together: Sequence[Sequence[Node]]
    """Nodes that have to be in one part: a write, and who made or used that memory before it."""
    written_by_modules: frozenset[Node]
    """What a module with parameters of its own may write: it is not kept with what made it."""

    def lent(self) -> frozenset[Node]:
        """What may lie in the memory of a parameter or a buffer, which the next micro-batch or update may write."""
        return frozenset(n for n, lies_in in self.roots.items() if any(root.op == "get_attr" for root in lies_in))

    def stays(self, node: Node) -> bool:
        """Whether what it gives is never written."""
        return self.written.isdisjoint(self.roots[node])


def storage(graph: GraphModule) -> Storage:
    """Follow each tensor through views and in-place operators."""
    lies_in = roots(graph)
    touching = _touching(graph, lies_in)
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    everything: set[Node] = set()
    copied: set[Node] = set()
    together = []
    for node in graph.graph.nodes:
        targets = {root for each in written(node, graph) for root in lies_in[each]}
        module = child(node, graph)
        if module is not None and has_parameters(module):
            copied |= targets
            continue
        everything |= targets
        if targets:
            together.append([node, *(n for r in targets for n in touching[r] if order[n] <= order[node])])
            together.append([n for r in targets if r.op in _GIVEN for n in _users(r, touching, lies_in)])
    return Storage(lies_in, frozenset(everything), together, frozenset(copied))


def _users(
    given: Node, touching: Mapping[Node, Sequence[Node]], lies_in: Mapping[Node, frozenset[Node]]
) -> Sequence[Node]:
    """Who reads an input or a buffer itself, before or after it is written: each part has its own, so one part only."""
    return [n for n in touching[given] if any(i.op in _GIVEN and given in lies_in[i] for i in n.all_input_nodes)]


def _touching(graph: GraphModule, lies_in: Mapping[Node, frozenset[Node]]) -> dict[Node, list[Node]]:
    """Node -> the nodes that read, write or hand on its memory."""
    touching: dict[Node, list[Node]] = {node: [] for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op.startswith("call"):
            for root in lies_in[node].union(*(lies_in[each] for each in node.all_input_nodes)):
                touching[root].append(node)
    return touching
