"""nn.Sequential as the list of its children: nothing is traced, so that a child may be whatever runs."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError
from paceline.program import Tree, map_tree
from paceline.replica.capture.cleanup import identifiers
from paceline.replica.capture.export import ExportedGraph
from paceline.replica.capture.input_spec import flatten_tree, named_leaves, resized, unconstrained_spec


def is_sequential(module: nn.Module) -> bool:
    """Return True if calling a module is calling its children in turn, and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks)


def sequential_graph(module: nn.Module, inputs: Tree) -> ExportedGraph:
    """Return the graph of an nn.Sequential: one call for each child, those of nested ones in their place.

    Tuples, lists and dicts between children are split into their tensors, so that each may go its own way. Their form
    is found by running the children once on few of the ``inputs``.

    Raises:
        InputError: the inputs are not one argument.
    """
    if isinstance(inputs, Mapping) or (isinstance(inputs, (tuple, list)) and len(inputs) != 1):
        given = sorted(inputs) if isinstance(inputs, Mapping) else len(inputs)
        raise InputError(
            f"{type(module).__name__} takes one argument, but its inputs are {given}; give it a tensor, or a tuple of "
            "one element, which may itself be a tuple or a dict"
        )
    few = resized(inputs, 2)
    graph = Graph()
    value = map_tree(Tensor.clone, few[0] if isinstance(few, (tuple, list)) else few)  # a child may write into it
    placeholders = [graph.placeholder(name) for name in identifiers([name for name, _ in named_leaves(inputs)])]
    owners = {node.name: "" for node in placeholders}
    remaining = iter(placeholders)
    argument = map_tree(lambda _: next(remaining), value)
    # A child that is called twice has the first of its names.
    first = {id(child): name for name, child in reversed([*module.named_modules()])}
    for name, child in _children(module, first):
        value = child(value)
        before = len(graph.nodes)
        argument = _split(graph, graph.call_module(name, (argument,)), value)
        owners |= {node.name: name for node in list(graph.nodes)[before:]}
    rebuild = flatten_tree(value, [])
    graph.output(tuple(_tensor_nodes(graph, argument, value)))
    return ExportedGraph(GraphModule(module, graph), owners, unconstrained_spec(inputs), rebuild)


def _children(module: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (full name, child), as often as it is called, with nested sequentials opened."""
    for child in module._modules.values():
        assert child is not None, "nn.Sequential calls them all"
        if is_sequential(child):
            yield from _children(child, names)
        else:
            yield names[id(child)], child


def _split(graph: Graph, node: Node, value: Tree) -> Any:
    """Return a tree of nodes, one for each leaf of ``value``, which ``node`` computes."""
    if isinstance(value, dict):
        return {key: _split(graph, graph.call_function(operator.getitem, (node, key)), v) for key, v in value.items()}
    if type(value) in (tuple, list):
        items = (graph.call_function(operator.getitem, (node, index)) for index in range(len(value)))
        return type(value)(_split(graph, item, v) for item, v in zip(items, value, strict=True))
    return node


def _tensor_nodes(graph: Graph, argument: Any, value: Tree) -> Iterator[Node]:
    """Yield the nodes of the tensors of the last child's output, in the order of :func:`flatten_tree`."""
    if isinstance(value, Tensor):
        yield argument
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.init and _holds_tensors(getattr(value, field.name)):
                part = graph.call_function(getattr, (argument, field.name))
                yield from _tensor_nodes(graph, part, getattr(value, field.name))
    elif isinstance(value, (Mapping, tuple, list)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            if _holds_tensors(part):
                node = argument[key] if not isinstance(argument, Node) else None
                node = node if node is not None else graph.call_function(operator.getitem, (argument, key))
                yield from _tensor_nodes(graph, node, part)


def _holds_tensors(value: Tree) -> bool:
    tensors: list[Tensor] = []
    flatten_tree(value, tensors)
    return bool(tensors)
