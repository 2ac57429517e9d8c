"""What kinds of nodes there are in a captured graph, as far as cutting it is concerned."""

import operator

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

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
