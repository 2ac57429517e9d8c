"""Capture of a model as a graph of operators whose tensors keep their full names, and the mark that lets it be cut.

An nn.Sequential becomes the list of its children; every other model goes through ``torch.export``. Both trace the model
in one mode, training by default, and under the autocast context of the call: capture a model under the one it will run
under.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.core.errors import InputError
from paceline.program import Tree
from paceline.replica.capture.export import export_graph
from paceline.replica.capture.input_spec import InputSpec, Rebuild
from paceline.replica.capture.sequential_graph import is_sequential, sequential_graph
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
    """The graph of one model in one mode."""

    module: GraphModule
    """forward(*leaves of the input) -> tuple of the output's leaves; holds the model's own tensors, by full name."""
    owners: Mapping[str, str]
    """Node name -> full name of the module that it comes from; "" is the model itself."""
    input_spec: InputSpec = field(repr=False)
    """The inputs that it takes."""
    rebuild: Rebuild = field(repr=False)
    """The leaves that ``module`` returns -> the output that the model itself gives."""
    training: bool = True
    """True if it does what the model does in training, else in evaluation."""

    def flatten(self, inputs: Tree) -> list[Tensor]:
        """Return the leaves of an input, in the order in which ``module`` takes them.

        Raises:
            InputError: the input has another form than the graph was captured for; names the leaf and the dim.
        """
        return self.input_spec.flatten(inputs)


def capture(
    module: nn.Module, inputs: Tree, *, operators: bool = False, of_inputs: bool = True, training: bool = True
) -> Captured:
    """Return the graph of a model, checked against the model (:func:`paceline.replica.capture.verify.check`).

    Args:
        module: any model; left as it is, its mode, buffers and attributes included.
        inputs: a batch as the model is called with it, of any number of samples; few of them are used.
        operators: whether every node has to be one operator; then an nn.Sequential goes through torch.export as well.
        of_inputs: whether gradients of the input are compared as well. A model with its loss needs none, and many a
            loss has no derivative by its target.
        training: the mode; dropout and running statistics do something else where it is False.

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
        graph = sequential_graph(module, inputs) if sequential else export_graph(module, inputs)
    captured = Captured(graph.module, graph.owners, graph.input_spec, graph.rebuild, training)
    if sequential:
        return captured

    def verify(*samples: int) -> None:
        check(
            module,
            lambda given: captured.rebuild(captured.module(*captured.flatten(given))),
            lambda: tensors_of(captured.module),
            inputs,
            samples=samples,
            of_inputs=of_inputs,
            training=training,
        )

    verify(2, 3)
    try:
        verify(1)  # tracing assumes that there are more
    except InputError:
        return replace(captured, input_spec=replace(captured.input_spec, smallest=2))
    return captured
