"""Capture of a model as a graph of operators whose tensors keep their full names, and the mark that lets it be cut.

An nn.Sequential becomes the list of its children; every other model goes through ``torch.export``. Both trace the model
in one mode, training by default, and under the autocast context of the call: capture a model under the one it will run
under.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError
from paceline.program import Tree, map_tree
from paceline.replica.capture.export import CapturedGraph, export_graph, identifiers
from paceline.replica.capture.input_spec import InputSpec, Rebuild, flatten_tree, named_leaves, resized
from paceline.replica.capture.verify import check
from paceline.replica.module_utils import preserve_state, tensors_of

_library: Any = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_library.define("cut(Tensor[] values) -> Tensor[]")
# The implicit key is below autograd, so an identity is differentiable as it is, copies nothing and shares its input.
_library.impl("cut", lambda values: values, "CompositeImplicitAutograd")


@overload
def cut(value: Tensor, /) -> Tensor: ...
@overload
def cut(value: Tensor, /, *values: Tensor) -> tuple[Tensor, ...]: ...
def cut(value: Tensor, /, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Mark a place in ``forward`` where a pipeline stage may end; the values go on as they are.

    Args:
        value: a tensor that is computed before the mark and read after it.
        values: more of them.

    Returns:
        The tensor, or a tuple of them all.

    >>> hidden, skip = cut(torch.ones(2), torch.zeros(2))
    >>> cut(hidden)
    tensor([1., 1.])
    """
    marked: list[Tensor] = torch.ops.paceline.cut([value, *values])
    return tuple(marked) if values else marked[0]


@dataclass(frozen=True)
class Captured:
    """The graph of one model in one mode.

    Args:
        module: forward(*leaves of the input) -> tuple of the output's leaves; holds the model's own tensors, by full
            name.
        owners: node name -> full name of the module that it comes from; "" is the model itself.
        input_spec: the inputs that it takes.
        rebuild: the leaves that ``module`` returns -> the output that the model itself gives.
        training: True if it does what the model does in training, else in evaluation.
    """

    module: GraphModule
    owners: Mapping[str, str]
    input_spec: InputSpec = field(repr=False)
    rebuild: Rebuild = field(repr=False)
    training: bool = True

    @property
    def traced(self) -> bool:
        """Whether it is a graph of operators by torch.export, rather than of an nn.Sequential's children."""
        return self.input_spec.leaves[0].dims is not None

    def flatten(self, inputs: Tree) -> list[Tensor]:
        """Return the leaves of an input, in the order in which ``module`` takes them.

        Raises:
            InputError: the input has another form than the graph was captured for; names the leaf and the dim.
        """
        return self.input_spec.flatten(inputs)


def capture(
    module: nn.Module,
    inputs: Tree,
    *,
    operators: bool = False,
    of_inputs: bool = True,
    training: bool = True,
    others: Sequence[Tree] | None = None,
    verified: bool = True,
) -> Captured:
    """Return the graph of a model, checked against the model (:func:`paceline.replica.capture.verify.check`).

    Args:
        module: any model; left as it is, its mode, buffers and attributes included.
        inputs: a batch as the model is called with it, of any number of samples; few of them are used.
        operators: whether every node has to be one operator; then an nn.Sequential goes through torch.export as well.
        of_inputs: whether gradients of the input are compared as well. A model with its loss needs none, and many a
            loss has no derivative by its target.
        training: the mode; dropout and running statistics do something else where it is False.
        others: other inputs, as :func:`~paceline.replica.capture.looks.other_inputs` returns them. Sizes in which
            they don't differ are fixed, and other ones refused when they come; the number of samples never is. None: no
            size is fixed that can be left open, which may take many times as long.
        verified: whether the graph is compared with the model; else it is the caller who compares what is made of it,
            and calls :func:`takes_one`.

    Raises:
        InputError: it can't be captured, naming the line of the model, or its graph does something else, naming the
            parameter, output or buffer that differs.
    """
    reserved = {"meta", *vars(GraphModule)}
    own = (module.named_children(), module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for name in (name for named in own for name, _ in named):
        if name in reserved:
            raise InputError(
                f"{type(module).__name__}.{name} can't be captured: a torch.fx.GraphModule has a {name!r} of its own; "
                f"write another name, self.{name}_ = ..."
            )
    sequential = not operators and is_sequential(module)
    with preserve_state(module, training=training):
        graph = _sequential_graph(module, inputs) if sequential else export_graph(module, inputs, others)
    captured = Captured(*graph, training)
    if sequential or not verified:
        return captured
    check_captured(captured, module, inputs, of_inputs=of_inputs)
    return captured if takes_one(captured, module, inputs, of_inputs=of_inputs) else for_several(captured)


def takes_one(captured: Captured, module: nn.Module, inputs: Tree, *, of_inputs: bool = True) -> bool:
    """Return whether a graph is that of its model for a single sample, too: tracing assumes that there are more."""
    try:
        check_captured(captured, module, inputs, samples=(1,), of_inputs=of_inputs)
    except InputError:
        return False
    return True


def for_several(captured: Captured) -> Captured:
    """Return a capture that refuses single samples."""
    return replace(captured, input_spec=replace(captured.input_spec, smallest=2))


def check_captured(
    captured: Captured, module: nn.Module, inputs: Tree, *, samples: Sequence[int] = (2, 3), of_inputs: bool = True
) -> None:
    """Compare a graph with the model that it was captured of; args and raises as :func:`~.verify.check`."""

    def run(inputs: Tree) -> Tree:
        return captured.rebuild(captured.module(*captured.flatten(inputs)))

    named = lambda: tensors_of(captured.module)  # noqa: E731 (looked up before and after each run)
    check(module, run, named, inputs, samples=samples, of_inputs=of_inputs, training=captured.training)


def is_sequential(module: nn.Module) -> bool:
    """Return True if calling a module is calling its children in turn, and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks)


def _sequential_graph(module: nn.Module, inputs: Tree) -> CapturedGraph:
    """Return the graph of an nn.Sequential: one call for each child, those of nested ones in their place.

    Nothing is traced, so that a child may be whatever runs.

    Tuples, lists and dicts between children are split into their tensors, so that each may go its own way. Their form
    is taken from one run of the children on few of the ``inputs``.

    Raises:
        InputError: the inputs are not one argument.
    """
    if isinstance(inputs, Mapping) or (isinstance(inputs, (tuple, list)) and len(inputs) != 1):
        arguments = sorted(inputs) if isinstance(inputs, Mapping) else len(inputs)
        raise InputError(
            f"{type(module).__name__} takes one argument, but its inputs are {arguments}; give it a tensor, or a tuple "
            "of one element, which may itself be a tuple or a dict"
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
    return GraphModule(module, graph), owners, InputSpec.unconstrained(inputs), rebuild


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
