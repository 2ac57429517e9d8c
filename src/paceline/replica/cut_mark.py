"""A mark in a model: here a pipeline stage may end."""

from typing import Any, overload

import torch
from torch import Tensor

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
