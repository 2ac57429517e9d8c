"""The operators of a captured graph, as rules look at them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError
from paceline.replica.capture import Captured
from paceline.replica.refusal import WAYS_OUT
from paceline.replica.tensor.base import Call, Value
from paceline.replica.tensor.units import cuts

_UNLINKED = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


@dataclass(frozen=True)
class Operators:
    """A captured graph, operator by operator."""

    captured: Captured
    values: Mapping[Node, tuple[Value, ...]]
    """Of each node that has tensors: what it gives."""
    calls: Mapping[Node, Call]
    """Of each node that calls something and takes or gives a tensor, in order."""

    def outputs(self) -> list[Value]:
        """The tensors that the graph returns."""
        output = next(iter(reversed(self.captured.module.graph.nodes)))
        return [value for node in output.all_input_nodes for value in self.values.get(node, ())]


def operators(captured: Captured, shards: int, leaves: Sequence[Any] = (), flowing: Collection[Node] = ()) -> Operators:
    """Look at a graph of operators, for so many shards.

    Args:
        captured: the graph.
        shards: k.
        leaves: of the input that is planned for; empty: the one that was captured with.
        flowing: inputs that have a gradient, which has to be whole on every shard.

    Raises:
        InputError: an operator's sizes are not known before it runs.
    """
    graph, values = captured.module, dict[Node, tuple[Value, ...]]()
    sizes = _sizes(graph.graph, leaves)
    for node in graph.graph.nodes:
        given = _gives(graph, node, values, sizes, flowing)
        if given:
            values[node] = given
    divisible = cuts(graph.graph, values)
    calls = dict[Node, Call]()
    for node in graph.graph.nodes:
        takes = tuple(value for source in node.all_input_nodes for value in _taken(values, source, node))
        if node.op in ("call_function", "call_module") and (takes or node in values):
            calls[node] = Call(node, takes, values.get(node, ()), shards, divisible)
    return Operators(captured, values, calls)


def _taken(values: Mapping[Node, tuple[Value, ...]], source: Node, user: Node) -> Iterator[Value]:
    """Of a tuple, the one element that is named."""
    given = values.get(source, ())
    if user.target is getitem and isinstance(index := user.args[1], int) and len(given) > 1:
        given = given[index : index + 1]
    yield from given


def _sizes(graph: Graph, leaves: Sequence[Any]) -> dict[Any, int]:
    """Of an input: what the symbols of the graph's sizes stand for."""
    found: dict[Any, int] = {}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(places, leaves, strict=False):
        if not isinstance(leaf, Tensor):
            continue
        for size, length in zip(node.meta["val"].shape, leaf.shape, strict=False):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                found[size.node.expr] = length
    return found


def _gives(
    graph: GraphModule,
    node: Node,
    values: Mapping[Node, tuple[Value, ...]],
    sizes: Mapping[Any, int],
    flowing: Collection[Node],
) -> tuple[Value, ...]:
    if node.op == "get_attr":
        held: Any = attrgetter(str(node.target))(graph)
        if not isinstance(held, Tensor):
            return ()
        return (Value(node, tuple(held.shape), held.dtype, held.requires_grad, str(node.target)),)
    made = node.meta.get("val")
    found = [made] if isinstance(made, Tensor) else made if isinstance(made, (list, tuple)) else []
    tensors = [each for each in found if isinstance(each, Tensor)]
    flows = node in flowing
    return tuple(_value(node, index, each, values, sizes, flows=flows) for index, each in enumerate(tensors))


def _value(
    node: Node,
    index: int,
    made: Tensor,
    values: Mapping[Node, tuple[Value, ...]],
    sizes: Mapping[Any, int],
    *,
    flows: bool,
) -> Value:
    linked = node.op != "placeholder" and node.target not in _UNLINKED
    sources = [value for source in node.all_input_nodes for value in values.get(source, ())]
    differentiable = flows or (linked and any(value.differentiable for value in sources))
    differentiable = differentiable and made.dtype.is_floating_point
    shape = tuple(_size(node, size) for size in made.shape)
    elements = prod(_actual(size, sizes) for size in made.shape) if sizes else None
    return Value(node, shape, made.dtype, differentiable, index=index, elements=elements)


def _actual(size: Any, sizes: Mapping[Any, int]) -> int:
    """With the input that is planned for; a size that it does not say is that of what was captured with."""
    if isinstance(size, int):
        return size
    found = size.node.expr.subs(sizes)
    return int(found) if found.is_number else int(size.node.hint)


def _size(node: Node, size: Any) -> int:
    """With the batch that was captured."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise InputError(
            f"{node.name} makes a tensor whose size depends on values ({size}), so the model can't be divided; write "
            f"a mask in its place, or {WAYS_OUT}"
        )
    return int(hint)
