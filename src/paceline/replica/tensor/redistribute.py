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

Conversions that take tensors apart, or put them together: see :mod:`paceline.replica.tensor.redistribute`.

Conversions of a tensor that one shard has: see :mod:`paceline.replica.tensor.redistribute`.
"""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.replica.tensor.placements import Shard, memory_order
from paceline.replica.tensor.tp_group import TPCollectives


class Conversion(nn.Module, ABC):
    """A tensor in one layout -> the same tensor in another.

    Args:
        shards: who convert.
        name: of the tensor, for those who wait.
    """

    def __init__(self, shards: TPCollectives, name: str) -> None:
        super().__init__()
        self.shards, self.name = shards, name

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor in its new layout."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return with_memory_order(self.there(tensor), tensor)
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
        return with_memory_order(conversion.there(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.conversion.back(gradients[0]), None


def with_memory_order(made: Tensor, like: Tensor) -> Tensor:
    """With dims in memory in the same order: dropout draws its numbers in that."""
    if made.stride() == like.stride() or (dims := memory_order(like)) == memory_order(made):
        return made
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return made.permute(dims).contiguous().permute(back)


@final
class ShareGrad(Conversion):
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


def gather_parts(part: Tensor, split: Shard, shards: TPCollectives, what: str) -> Tensor:
    """The whole tensor of all shards' parts, on each of them."""
    shapes = _shapes(part, split, shards.rank)
    return split.concat(shards.all_gather(part, shapes, what))


def _shapes(part: Tensor, split: Shard, shard: int) -> list[tuple[int, ...]]:
    """Of each shard's part, from that of one: of as many blocks."""
    whole = list(part.shape)
    whole[split.dim] = part.shape[split.dim] // split.sizes[shard] * split.block_size
    return [split.local_shape(whole, each) for each in range(len(split.sizes))]


class OfParts(Conversion, ABC):
    """One that knows a split.

    Args:
        shards: who convert.
        name: of the tensor.
        split: of the parts.
    """

    def __init__(self, shards: TPCollectives, name: str, split: Shard) -> None:
        super().__init__(shards, name)
        self._split = split

    def _take(self, tensor: Tensor) -> Tensor:
        return self._split.take(tensor, self.shards.rank).contiguous()

    def _gather(self, part: Tensor, what: str) -> Tensor:
        return gather_parts(part, self._split, self.shards, what)

    def _padded(self, part: Tensor) -> Tensor:
        """The whole tensor, zero where it is others'."""
        shapes = _shapes(part, self._split, self.shards.rank)
        parts = [part if i == self.shards.rank else part.new_zeros(shape) for i, shape in enumerate(shapes)]
        return self._split.concat(parts)

    def extra_repr(self) -> str:
        return f"{self.name}, {self._split}"


@final
class Gather(OfParts):
    """Split -> Whole."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return self._take(gradient)


@final
class GatherShared(OfParts):
    """Split -> Shared."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        parts = [self._split.take(gradient, shard) for shard in range(self.shards.count)]
        return self.shards.reduce_scatter(parts, f"the gradient of {self.name}")


@final
class Take(OfParts):
    """Whole -> Split."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._take(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather(gradient, f"the gradient of {self.name}")


@final
class TakeShared(OfParts):
    """Shared -> Split."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._take(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._padded(gradient)


@final
class Pad(OfParts):
    """Split -> Partial."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._padded(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._take(gradient)


@final
class Scatter(OfParts):
    """Partial -> Split."""

    def there(self, tensor: Tensor) -> Tensor:
        parts = [self._split.take(tensor, shard) for shard in range(self.shards.count)]
        return self.shards.reduce_scatter(parts, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather(gradient, f"the gradient of {self.name}")


@final
class Exchange(Conversion):
    """Split -> another Split.

    Args:
        shards: who convert.
        name: of the tensor.
        before: how it is divided.
        after: how it is to be.
    """

    def __init__(self, shards: TPCollectives, name: str, before: Shard, after: Shard) -> None:
        super().__init__(shards, name)
        self._gather, self._take = Gather(shards, name, before), Take(shards, name, after)

    def there(self, tensor: Tensor) -> Tensor:
        return self._take.there(self._gather.there(tensor))

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather.back(self._take.back(gradient))


class OfOwner(Conversion, ABC):
    """One that knows the owner; the others have a tensor of the same shape in its place.

    Args:
        shards: who convert.
        name: of the tensor.
        owner: the shard that has it.
    """

    def __init__(self, shards: TPCollectives, name: str, owner: int) -> None:
        super().__init__(shards, name)
        self._owner = owner

    def extra_repr(self) -> str:
        return f"{self.name}, from shard {self._owner}"


@final
class Broadcast(OfOwner):
    """Owned -> Whole."""

    def there(self, tensor: Tensor) -> Tensor:
        return self.shards.broadcast(tensor, self._owner, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient


@final
class BroadcastShared(OfOwner):
    """Owned -> Shared."""

    def there(self, tensor: Tensor) -> Tensor:
        return self.shards.broadcast(tensor, self._owner, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return self.shards.reduce(gradient, self._owner, f"the gradient of {self.name}")


@final
class OwnTerm(OfOwner):
    """Owned -> Partial."""

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if self.shards.rank == self._owner else torch.zeros_like(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient
