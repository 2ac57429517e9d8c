"""Optimizers as a program makes them: of all parameters of A, of its flat vectors, or of a part of it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.optim.lbfgs import LossOptimizer
from paceline.replica.flat_state import FlatLayout

Built = TypeVar("Built")
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

# Optimizers that treat each element alone and create their state at the first step: on A as one flat vector they give
# the same bits as on its tensors, in a fraction of the time.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)


def build_optimizer(make: Callable[[list[Any]], Built], parameters: Iterable[Any]) -> Built:
    """Return the optimizer of these parameters, without importing the compiler behind torch.compile."""
    with _no_compiler():
        return make(list(parameters))


@contextmanager
def _no_compiler() -> Iterator[None]:
    """Context manager: optimizers are built without torch's compiler, whose import takes more than a second.

    ``Optimizer.add_param_group`` is wrapped so that the compiler does not trace it: the wrapper imports the compiler at
    the first call, for what is then to be called, and keeps that as an attribute of the method. It is the method itself
    meanwhile. A torch whose wrapper has no such attribute imports the compiler as ever.
    """
    method: Any = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if method is None or "torch._dynamo" in sys.modules:
        yield
        return
    method.__dynamo_disable = method
    try:
        yield
    finally:
        method.__dict__.pop("__dynamo_disable", None)  # another thread may have built one meanwhile


def shape_only_parameters(layout: FlatLayout) -> dict[str, nn.Parameter]:
    """Return parameters of a layout's names and shapes without memory, to see how an optimizer groups them."""
    entries = [(entry, block.dtype) for block in layout.parameters for entry in block.entries]
    return {e.name: nn.Parameter(torch.zeros((), dtype=dtype).expand(e.shape)) for e, dtype in entries}


def is_elementwise(optimizer: Optimizer, parameters: int) -> bool:
    """Return True if an optimizer of so many parameters treats each element alone, and all alike."""
    return type(optimizer) in ELEMENTWISE and _alike(optimizer, parameters)


def steps_on_vectors(optimizer: Optimizer, parameters: int) -> bool:
    """Return True if slices of all parameters in a row do as well as parameters, if all owners' sums are added."""
    return is_elementwise(optimizer, parameters) or (
        isinstance(optimizer, LossOptimizer) and _alike(optimizer, parameters)
    )


def _alike(optimizer: Optimizer, parameters: int) -> bool:
    groups = optimizer.param_groups
    return len(groups) == 1 and len(groups[0]["params"]) == parameters and not optimizer.state


def optimizer_of_vectors(make: OptimizerFactory, whole: FlatLayout) -> OptimizerFactory:
    """Return an optimizer of any slices of A's vectors, if it :func:`steps_on_vectors`: its only group is that of A."""

    def of_vectors(vectors: list[nn.Parameter]) -> Optimizer:
        optimizer = make(list(shape_only_parameters(whole).values()))
        optimizer.param_groups[0]["params"] = list(vectors)
        return optimizer

    return of_vectors


def optimizer_of_part(make: OptimizerFactory, whole: FlatLayout, part: FlatLayout) -> OptimizerFactory:
    """Return an optimizer of a part of A, whose groups are those that it makes of all parameters.

    It is given all of them in their order and shapes, since it may group by place or shape; those of other parts have
    no memory.
    """

    def of_part(parameters: list[nn.Parameter]) -> Optimizer:
        own = dict(zip(part.parameter_names, parameters, strict=True))
        absent = shape_only_parameters(whole)
        optimizer = make([own.get(name, parameter) for name, parameter in absent.items()])
        own_of = {id(parameter): parameter for parameter in parameters}
        if any(parameter.shape != absent[name].shape for name, parameter in own.items()):
            # State is created for the shard of a tensor, groups by its full shape.
            optimizer.param_groups = make(list(absent.values())).param_groups
            own_of = {id(absent[name]): parameter for name, parameter in own.items()}
        for group in optimizer.param_groups:
            group["params"] = [own_of[id(p)] for p in group["params"] if id(p) in own_of]
        for parameter in absent.values():
            optimizer.state.pop(parameter, None)
        return optimizer

    return of_part
