"""Nodes of a captured graph: their kinds, the values they write in place, and which of them share memory."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

MARK = "paceline::cut"

# Operators whose results depend on a tensor's strides, of which one that has been sent keeps the order alone: they run
# where the tensors that they read were computed.
BY_LAYOUT = ("aten::as_strided", "aten::sym_stride", "aten::sym_storage_offset")

# Operators that cost about as much as sending their results, in addition to views and pointwise ones.
_CHEAP = {
    *("aten::__and__", "aten::__or__", "aten::__xor__", "aten::all", "aten::any", "aten::arange", "aten::cat"),
    *("aten::constant_pad_nd", "aten::cumsum", "aten::flip", "aten::full", "aten::full_like", "aten::gather"),
    *("aten::index", "aten::lift_fresh_copy", "aten::linspace", "aten::new_full", "aten::new_ones"),
    *("aten::new_zeros", "aten::one_hot", "aten::ones", "aten::ones_like", "aten::pad", "aten::repeat"),
    *("aten::roll", "aten::scalar_tensor", "aten::stack", "aten::tril", "aten::triu", "aten::zeros"),
    "aten::zeros_like",
}


def schema_name(node: Node) -> str:
    """Return e.g. ``aten::add``, whichever overload; "" where the target has no schema."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def is_mark(node: Node) -> bool:
    """Return True if a node is a :func:`paceline.cut` mark, or one of the values at it."""
    return schema_name(node) == MARK or (is_item(node) and schema_name(node.all_input_nodes[0]) == MARK)


def unmarked(node: Node) -> Node:
    """Return the value at a mark; any other node itself."""
    while is_mark(node):
        assert is_item(node), "a mark takes and gives a list"
        mark, index = node.args
        node = mark.args[0][index]  # type: ignore[union-attr, index, assignment]
    return node


def inputs(node: Node) -> list[Node]:
    """Return the nodes that a node reads, as if there were no marks."""
    return [unmarked(each) for each in node.all_input_nodes]


def is_item(node: Node) -> bool:
    """Return True if a node selects one of several results of another one."""
    return node.target in (operator.getitem, getattr)


def is_shape(node: Node) -> bool:
    """Return True if a node is a size of a tensor, or arithmetic on sizes."""
    if schema_name(node) in ("aten::sym_size", "aten::sym_numel"):
        return True
    module = getattr(node.target, "__module__", "")
    name = getattr(node.target, "__name__", "")
    return not is_item(node) and (module in ("_operator", "math") or (module == "torch" and name.startswith("sym_")))


def is_cheap(node: Node) -> bool:
    """Return True if computing a node in several parts costs no more than sending its result, and is not random."""
    if is_item(node) or is_shape(node):
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    is_view = any(argument.alias_info is not None for argument in node.target._schema.arguments)
    return is_view or torch.Tag.pointwise in node.target.tags or schema_name(node) in _CHEAP


def child(node: Node, root: nn.Module) -> nn.Module | None:
    """Return the module that a ``call_module`` node calls."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def attribute(node: Node, root: nn.Module) -> object:
    """Return the attribute that a ``get_attr`` node reads."""
    value: object = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


# Arguments that normalisations write although their schemas don't say so (torch 2.13).
_RUNNING = ("running_mean", "running_var")


def roots(graph: GraphModule) -> dict[Node, frozenset[Node]]:
    """Return node -> the nodes whose memory its result may share: itself and its :func:`aliased` arguments.

    Of several nodes that read one parameter or buffer, the first stands for all.
    """
    shared: dict[Node, frozenset[Node]] = {}
    holders: dict[int, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            shared[node] = frozenset({holders.setdefault(id(attribute(node, graph)), node)})
        else:
            shared[node] = frozenset({node}).union(*(shared[each] for each in aliased(node, graph)))
    return shared


def written(node: Node, root: nn.Module) -> list[Node]:
    """Return the arguments that a node writes in place, as far as can be seen without running it."""
    if isinstance(node.target, OpOverload):
        if schema_name(node) == "aten::detach_" and schema_name(node.all_input_nodes[0]) == "aten::lift_fresh_copy":
            return []  # how torch.export (2.13) writes torch.tensor(2.0): it writes only a history, and there is none
        return [
            value
            for argument, value in _arguments(node)
            if argument.name in _RUNNING or (argument.alias_info is not None and argument.alias_info.is_write)
        ]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=True)
    module = child(node, root)
    in_place = module is not None and any(getattr(each, "inplace", False) is True for each in module.modules())
    return list(node.all_input_nodes) if in_place else []


def aliased(node: Node, root: nn.Module) -> list[Node]:
    """Return the arguments whose memory the result may share."""
    if is_item(node):
        return [unmarked(node)] if is_mark(node) else list(node.all_input_nodes)
    if isinstance(node.target, OpOverload):
        maybe = torch.Tag.maybe_aliasing_or_mutating in node.target.tags
        maybe = maybe and not any(argument.name in _RUNNING for argument in node.target._schema.arguments)
        return [value for argument, value in _arguments(node) if maybe or argument.alias_info is not None]
    if isinstance(node.target, HigherOrderOperator):
        return _of_block(node, root, writes=False)
    module = child(node, root)
    # A child without parameters may be a Flatten or an Identity; one that has some makes something new of its input.
    return list(node.all_input_nodes) if module is not None and not list(module.parameters()) else []


def _of_block(node: Node, root: nn.Module, *, writes: bool) -> list[Node]:
    """Return the arguments that a block under no_grad or autocast writes, or whose memory it returns."""
    read = {n: attribute(n, root) for n in node.args if isinstance(n, Node) and n.op == "get_attr"}
    blocks = [n for n in node.args if isinstance(n, Node) and isinstance(read.get(n), GraphModule)]
    values = list(node.args[node.args.index(blocks[0]) + 1 :]) if blocks else []
    block = read[blocks[0]] if blocks else None
    leaves = block.graph.find_nodes(op="placeholder") if isinstance(block, GraphModule) else []
    if not isinstance(block, GraphModule) or len(blocks) > 1 or len(leaves) != len(values):
        return list(node.all_input_nodes)  # another operator that calls graphs: it may do anything
    roots_of = roots(block)
    ends = next(iter(reversed(block.graph.nodes))).all_input_nodes
    touched = [w for n in block.graph.nodes for w in written(n, block)] if writes else ends
    inside = frozenset[Node]().union(*(roots_of[each] for each in touched))
    return [each for each, leaf in zip(values, leaves, strict=True) if leaf in inside and isinstance(each, Node)]


def _arguments(node: Node) -> Iterator[tuple[torch.Argument, Node]]:
    """Yield each argument of an operator's schema with the nodes that it is called with."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for each in value if isinstance(value, Iterable) and not isinstance(value, str) else (value,):
            if isinstance(each, Node):
                yield argument, each


_LEAVES = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Storage:
    """The memory of a graph's values, and the effects of in-place operators on it.

    Args:
        roots: node -> the nodes whose memory its result may share, itself included.
        written: nodes whose memory is written.
        together: nodes that have to be in one part: a write, and the nodes that computed or read that memory before it.
        written_by_modules: values that a module with parameters may write: it may be in another part than the node that
            computed them.
    """

    roots: Mapping[Node, frozenset[Node]]
    written: frozenset[Node]
    together: Sequence[Sequence[Node]]
    written_by_modules: frozenset[Node]


def storage(graph: GraphModule) -> Storage:
    """Follow each tensor through views and in-place operators."""
    roots_of = roots(graph)
    # Node -> the nodes that read, write or return its memory.
    touching: dict[Node, list[Node]] = {node: [] for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op.startswith("call"):
            for root in roots_of[node].union(*(roots_of[each] for each in node.all_input_nodes)):
                touching[root].append(node)

    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    all_written: set[Node] = set()
    by_modules: set[Node] = set()
    together: list[Sequence[Node]] = []
    for node in graph.graph.nodes:
        targets = {root for each in written(node, graph) for root in roots_of[each]}
        module = child(node, graph)
        if module is not None and list(module.parameters()):
            by_modules |= targets
            continue
        all_written |= targets
        if targets:
            together.append([node, *(n for r in targets for n in touching[r] if order[n] <= order[node])])
            # Each part has an input or a buffer of its own: all that read it, before or after the write, are in one.
            leaves = [r for r in targets if r.op in _LEAVES]
            users = [
                n
                for r in leaves
                for n in touching[r]
                if any(i.op in _LEAVES and r in roots_of[i] for i in n.all_input_nodes)
            ]
            together.append(users)
    return Storage(roots_of, frozenset(all_written), together, frozenset(by_modules))
