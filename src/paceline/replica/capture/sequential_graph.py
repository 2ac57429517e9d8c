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
from paceline.replica.capture.export import Exported
from paceline.replica.capture.input_spec import free_form, named_leaves, resized, taken_apart


def is_sequential(module: nn.Module) -> bool:
    """Whether calling it is calling its children in turn, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def listed(module: nn.Module, inputs: Tree) -> Exported:
    """The graph of an nn.Sequential: one call for each child, those of nested ones in their place.

    Tuples, lists and dicts between children are taken apart into their tensors, so that each may go its own way. Their
    form is found by running the children once on few of the ``inputs``.
    """
    graph = Graph()
    value = map_tree(Tensor.clone, _only_argument(module, resized(inputs, 2)))  # a child may write into it
    names = identifiers([name for name, _ in named_leaves(inputs)])
    taken = [graph.placeholder(name) for name in names]
    owners = {node.name: "" for node in taken}
    nodes = iter(taken)
    argument = map_tree(lambda _: next(nodes), value)
    first = {id(child): name for name, child in reversed([*module.named_modules()])}
    for name, child in _children(module, first):
        value = child(value)
        before = len(graph.nodes)
        argument = _apart(graph, graph.call_module(name, (argument,)), value)
        owners |= {node.name: name for node in list(graph.nodes)[before:]}
    rebuild = taken_apart(value, [])
    graph.output(tuple(_flat_nodes(graph, argument, value)))
    return Exported(GraphModule(module, graph), owners, free_form(inputs), rebuild)


def _only_argument(module: nn.Module, inputs: Tree) -> Tree:
    if isinstance(inputs, Mapping) or (isinstance(inputs, (tuple, list)) and len(inputs) != 1):
        given = sorted(inputs) if isinstance(inputs, Mapping) else len(inputs)
        raise InputError(
            f"{type(module).__name__} takes one argument, but its inputs are {given}; give it a tensor, or a tuple of "
            "one element, which may itself be a tuple or a dict"
        )
    return inputs[0] if isinstance(inputs, (tuple, list)) else inputs


def _children(module: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Each child with its full name, as often as it is called, nested sequentials opened."""
    for child in module._modules.values():
        assert child is not None, "nn.Sequential calls them all"
        if is_sequential(child):
            yield from _children(child, names)
        else:
            yield names[id(child)], child


def _apart(graph: Graph, node: Node, value: Tree) -> Any:
    """What stands for ``value``, which ``node`` makes, as an argument: a tree of nodes, one for each of its leaves."""
    if isinstance(value, dict):
        return {key: _apart(graph, graph.call_function(operator.getitem, (node, key)), v) for key, v in value.items()}
    if type(value) in (tuple, list):
        items = (graph.call_function(operator.getitem, (node, index)) for index in range(len(value)))
        return type(value)(_apart(graph, item, v) for item, v in zip(items, value, strict=True))
    return node


def _flat_nodes(graph: Graph, argument: Any, value: Tree) -> Iterator[Node]:
    """The nodes of the tensors of the last child's output, in the order of :func:`outline.taken_apart`."""
    if isinstance(value, Tensor):
        yield argument
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.init and _holds_tensors(getattr(value, field.name)):
                part = graph.call_function(getattr, (argument, field.name))
                yield from _flat_nodes(graph, part, getattr(value, field.name))
    elif isinstance(value, (Mapping, tuple, list)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            if _holds_tensors(part):
                known = argument[key] if not isinstance(argument, Node) else None
                node = known if known is not None else graph.call_function(operator.getitem, (argument, key))
                yield from _flat_nodes(graph, node, part)


def _holds_tensors(value: Tree) -> bool:
    found: list[Tensor] = []
    taken_apart(value, found)
    return bool(found)
