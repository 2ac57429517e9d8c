"""From one layout of a tensor to another: collectives, forward, backward or both.

::

    from       to         forward           backward
    Whole      Shared     -                 all-reduce           (Megatron's f, Shoeybi et al. 2019, arXiv 1909.08053)
    Partial    Whole      all-reduce        -                    (and its g)
    Partial    Shared     all-reduce        all-reduce
    Whole      Split      take the part     all-gather
    Shared     Split      take the part     zeros for the others' parts
    Split      Whole      all-gather        take the part
    Split      Shared     all-gather        reduce-scatter
    Partial    Split      reduce-scatter    all-gather
    Split      Split'     all-gather, take  all-gather, take
    Whole      Partial    shard 0's alone   -
    Shared     Whole      -                 shard 0's alone
    Shared     Partial    shard 0's alone   shard 0's alone
    Split      Partial    zeros elsewhere   take the part
    Owned      Whole      broadcast         the owner's alone
    Owned      Shared     broadcast         reduce to the owner
    Owned      Partial    zeros elsewhere   the owner's alone

Each is a module without parameters, so that a graph which has it reads well. In backward a gradient goes the other way:
so ``Whole -> Shared`` and ``Partial -> Whole`` are each other's transposes.
"""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.replica.tensor.layouts import order
from paceline.replica.tensor.shards import Shards


class Conversion(nn.Module, ABC):
    """A tensor in one layout -> the same tensor in another.

    Args:
        shards: who convert.
        name: of the tensor, for those who wait.
    """

    def __init__(self, shards: Shards, name: str) -> None:
        super().__init__()
        self.shards, self.name = shards, name

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor in its new layout."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return laid_out(self.there(tensor), tensor)
        made: Tensor = _Through.apply(tensor, self)  # type: ignore[no-untyped-call]
        return made

    @abstractmethod
    def there(self, tensor: Tensor) -> Tensor:
        """Of a value."""

    @abstractmethod
    def back(self, gradient: Tensor) -> Tensor:
        """Of a gradient, from the new layout to the old one."""

    def extra_repr(self) -> str:
        return self.name


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, conversion: Conversion) -> Tensor:
        ctx.conversion = conversion
        return laid_out(conversion.there(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.conversion.back(gradients[0]), None


def laid_out(made: Tensor, like: Tensor) -> Tensor:
    """With dims in memory in the same order: dropout draws its numbers in that."""
    if made.stride() == like.stride() or (dims := order(like)) == order(made):
        return made
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return made.permute(dims).contiguous().permute(back)


@final
class Share(Conversion):
    """Whole -> Shared."""

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self.shards.all_reduce(gradient, f"the gradient of {self.name}")


@final
class Sum(Conversion):
    """Partial -> Whole."""

    def there(self, tensor: Tensor) -> Tensor:
        return self.shards.all_reduce(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient


@final
class SumShared(Conversion):
    """Partial -> Shared."""

    def there(self, tensor: Tensor) -> Tensor:
        return self.shards.all_reduce(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return self.shards.all_reduce(gradient, f"the gradient of {self.name}")


@final
class First(Conversion):
    """Whole -> Partial."""

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if self.shards.rank == 0 else torch.zeros_like(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient


@final
class Unshare(Conversion):
    """Shared -> Whole."""

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient if self.shards.rank == 0 else torch.zeros_like(gradient)


@final
class FirstShared(Conversion):
    """Shared -> Partial."""

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if self.shards.rank == 0 else torch.zeros_like(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient if self.shards.rank == 0 else torch.zeros_like(gradient)
