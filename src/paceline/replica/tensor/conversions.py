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

Each is a module without parameters, so that a graph which has it reads well. In backward a gradient goes the other way:
so ``Whole -> Shared`` and ``Partial -> Whole`` are each other's transposes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from paceline.replica.tensor.layouts import Layout, Partial, Shared, Split, Whole, order
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
        return _laid_out(conversion.there(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.conversion.back(gradients[0]), None


def _laid_out(made: Tensor, like: Tensor) -> Tensor:
    """With dims in memory in the same order: dropout draws its numbers in that."""
    dims = order(like)
    if dims == order(made):
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


class _OfParts(Conversion, ABC):
    """One that knows a split.

    Args:
        shards: who convert.
        name: of the tensor.
        split: of the parts.
    """

    def __init__(self, shards: Shards, name: str, split: Split) -> None:
        super().__init__(shards, name)
        self._split = split

    def _take(self, tensor: Tensor) -> Tensor:
        return self._split.take(tensor, self.shards.rank).contiguous()

    def _gather(self, part: Tensor, what: str) -> Tensor:
        split, dim = self._split, self._split.dim
        outer = part.shape[dim] // split.sizes[self.shards.rank]
        shapes = [
            (*part.shape[:dim], outer * size, *(part.shape[dim + 1 :] if dim < -1 else ())) for size in split.sizes
        ]
        return split.put_together(self.shards.all_gather(part, shapes, what))

    def _padded(self, part: Tensor) -> Tensor:
        """The whole tensor, zero where it is others'."""
        split, mine, dim = self._split, self.shards.rank, self._split.dim
        outer = part.shape[dim] // split.sizes[mine]
        parts = []
        for shard, size in enumerate(split.sizes):
            shape = list(part.shape)
            shape[dim] = outer * size
            parts.append(part if shard == mine else part.new_zeros(shape))
        return split.put_together(parts)

    def extra_repr(self) -> str:
        return f"{self.name}, {self._split}"


@final
class Gather(_OfParts):
    """Split -> Whole."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        return self._take(gradient)


@final
class GatherShared(_OfParts):
    """Split -> Shared."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self.name)

    def back(self, gradient: Tensor) -> Tensor:
        parts = [self._split.take(gradient, shard) for shard in range(self.shards.count)]
        return self.shards.reduce_scatter(parts, f"the gradient of {self.name}")


@final
class Take(_OfParts):
    """Whole -> Split."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._take(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather(gradient, f"the gradient of {self.name}")


@final
class TakeShared(_OfParts):
    """Shared -> Split."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._take(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._padded(gradient)


@final
class Pad(_OfParts):
    """Split -> Partial."""

    def there(self, tensor: Tensor) -> Tensor:
        return self._padded(tensor)

    def back(self, gradient: Tensor) -> Tensor:
        return self._take(gradient)


@final
class Scatter(_OfParts):
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

    def __init__(self, shards: Shards, name: str, before: Split, after: Split) -> None:
        super().__init__(shards, name)
        self._gather, self._take = Gather(shards, name, before), Take(shards, name, after)

    def there(self, tensor: Tensor) -> Tensor:
        return self._take.there(self._gather.there(tensor))

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather.back(self._take.back(gradient))


class Price(NamedTuple):
    """Of a conversion: what a shard sends, as shares of the whole tensor, and the number of collectives."""

    forward: float
    backward: float
    collectives: tuple[int, int]
    """Forward and backward."""


@final
class _Kind(NamedTuple):
    make: Callable[[Shards, str, Layout, Layout], Conversion]
    forward: str
    backward: str


def _plain(kind: type[Conversion]) -> Callable[[Shards, str, Layout, Layout], Conversion]:
    return lambda shards, name, _from, _to: kind(shards, name)


def _from_parts(kind: type[_OfParts]) -> Callable[[Shards, str, Layout, Layout], Conversion]:
    def make(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
        split = before if isinstance(before, Split) else after
        assert isinstance(split, Split), "one side is split"
        return kind(shards, name, split)

    return make


def _exchange(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
    assert isinstance(before, Split), "both are split"
    assert isinstance(after, Split), "both are split"
    return Exchange(shards, name, before, after)


_KINDS: dict[tuple[type, type], _Kind] = {
    (Whole, Shared): _Kind(_plain(Share), "", "reduce"),
    (Partial, Whole): _Kind(_plain(Sum), "reduce", ""),
    (Partial, Shared): _Kind(_plain(SumShared), "reduce", "reduce"),
    (Whole, Partial): _Kind(_plain(First), "", ""),
    (Shared, Whole): _Kind(_plain(Unshare), "", ""),
    (Shared, Partial): _Kind(_plain(FirstShared), "", ""),
    (Split, Partial): _Kind(_from_parts(Pad), "", ""),
    (Split, Split): _Kind(_exchange, "gather", "gather"),
    (Whole, Split): _Kind(_from_parts(Take), "", "gather"),
    (Shared, Split): _Kind(_from_parts(TakeShared), "", ""),
    (Split, Whole): _Kind(_from_parts(Gather), "gather", ""),
    (Split, Shared): _Kind(_from_parts(GatherShared), "gather", "gather"),
    (Partial, Split): _Kind(_from_parts(Scatter), "gather", "gather"),
}


def conversion(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
    """The module that makes it; there is one where there is a :func:`price`."""
    return _KINDS[type(before), type(after)].make(shards, name, before, after)


def price(before: Layout, after: Layout, count: int, *, differentiable: bool) -> Price | None:
    """What it costs among ``count`` shards; None: there is no such conversion.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009).

    >>> from paceline.replica.tensor.layouts import PARTIAL, WHOLE, SHARED
    >>> price(PARTIAL, WHOLE, 4, differentiable=True)
    Price(forward=1.5, backward=0.0, collectives=(1, 0))
    """
    kind = _KINDS.get((type(before), type(after)))
    if kind is None:
        return None
    share = {"": 0.0, "gather": (count - 1) / count, "reduce": 2 * (count - 1) / count}
    backward = kind.backward if differentiable else ""
    return Price(share[kind.forward], share[backward], (int(bool(kind.forward)), int(bool(backward))))
