"""A mark in a model: here a pipeline stage may end.

A model as it is, as a graph of operators whose tensors keep their full names.

nn.Sequential needs no more than its list of children; every other model goes through ``torch.export``. Both trace the
model in one mode, training where nothing else is said, under the autocast that is entered at the time: capture it under
the one it will run under.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.core.errors import InputError
from paceline.program import Tree
from paceline.replica.capture.export import Exported, exported
from paceline.replica.capture.input_spec import InputSpec, Rebuild
from paceline.replica.capture.sequential_graph import is_sequential, listed
from paceline.replica.capture.verify import check
from paceline.replica.module_utils import preserve_state, tensors_of

__all__ = [
    "Captured",
    "capture",
    "check",
]


_library: Any = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_library.define("cut(Tensor[] values) -> Tensor[]")
# The implicit key is under autograd, so an identity is differentiable as it is, copies nothing and shares its input.
_library.impl("cut", lambda values: values, "CompositeImplicitAutograd")


@overload
def cut(value: Tensor, /) -> Tensor: ...
@overload
def cut(value: Tensor, /, *values: Tensor) -> tuple[Tensor, ...]: ...
def cut(value: Tensor, /, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Mark a place in ``forward`` where a pipeline stage may end; the values go on as they are.

    Args:
        value: one of the tensors that go from what is before the mark to what is after it.
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
    """The graph of a model, checked against the model itself (:func:`paceline.replica.capture.verify.check`).

    Args:
        module: any model; left as it is, its mode, buffers and attributes included.
        inputs: a batch as the model is called with it, of any number of samples; few of them are looked at.
        operators: whether every node has to be one operator; then an nn.Sequential goes through torch.export as well.
        of_inputs: whether gradients of the input are looked at as well. A model with its loss has none to be asked for,
            and many a loss has no derivative by its target.
        training: in which mode; dropout and running statistics do something else where it is False.

    Raises:
        InputError: where it can't be captured, naming the line of the model, or where its graph does something else,
            naming the parameter, output or buffer that differs.
    """
    _check_names(module)
    with preserve_state(module, training=training):
        if not operators and is_sequential(module):
            return _captured(listed(module, inputs), training)
        captured = _captured(exported(module, inputs), training)
    _checked(module, captured, inputs, (2, 3), of_inputs=of_inputs)
    if _agrees_on_one(module, captured, inputs, of_inputs=of_inputs):
        return captured
    return replace(captured, input_spec=replace(captured.input_spec, smallest=2))


def _check_names(module: nn.Module) -> None:
    taken = {"meta", *vars(GraphModule)}
    for name, _ in (
        *module.named_children(),
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        if name in taken:
            raise InputError(
                f"{type(module).__name__}.{name} can't be captured: a torch.fx.GraphModule has a {name!r} of its own; "
                f"write another name, self.{name}_ = ..."
            )


def _captured(made: Exported, training: bool) -> Captured:
    return Captured(made.module, made.owners, made.form, made.output, training)


def _checked(module: nn.Module, captured: Captured, inputs: Tree, samples: tuple[int, ...], *, of_inputs: bool) -> None:
    def run(given: Tree) -> Tree:
        return captured.rebuild(captured.module(*captured.flatten(given)))

    named, training = (lambda: tensors_of(captured.module)), captured.training
    check(module, run, named, inputs, samples=samples, of_inputs=of_inputs, training=training)


def _agrees_on_one(module: nn.Module, captured: Captured, inputs: Tree, *, of_inputs: bool) -> bool:
    """Whether the graph is right for one sample too: tracing takes it for granted that there are more."""
    try:
        _checked(module, captured, inputs, (1,), of_inputs=of_inputs)
    except InputError:
        return False
    return True
