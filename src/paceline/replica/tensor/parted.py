"""Conversions that take tensors apart, or put them together: see :mod:`paceline.replica.tensor.conversions`."""

from abc import ABC
from typing import final

from torch import Tensor

from paceline.replica.tensor.conversions import Conversion
from paceline.replica.tensor.layouts import Split
from paceline.replica.tensor.shards import Shards


def gathered(part: Tensor, split: Split, shards: Shards, what: str) -> Tensor:
    """The whole tensor of all shards' parts, on each of them."""
    shapes = _shapes(part, split, shards.rank)
    return split.put_together(shards.all_gather(part, shapes, what))


def _shapes(part: Tensor, split: Split, shard: int) -> list[tuple[int, ...]]:
    """Of each shard's part, from that of one: of as many blocks."""
    whole = list(part.shape)
    whole[split.dim] = part.shape[split.dim] // split.sizes[shard] * split.block
    return [split.local(whole, each) for each in range(len(split.sizes))]


class OfParts(Conversion, ABC):
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
        return gathered(part, self._split, self.shards, what)

    def _padded(self, part: Tensor) -> Tensor:
        """The whole tensor, zero where it is others'."""
        shapes = _shapes(part, self._split, self.shards.rank)
        parts = [part if i == self.shards.rank else part.new_zeros(shape) for i, shape in enumerate(shapes)]
        return self._split.put_together(parts)

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

    def __init__(self, shards: Shards, name: str, before: Split, after: Split) -> None:
        super().__init__(shards, name)
        self._gather, self._take = Gather(shards, name, before), Take(shards, name, after)

    def there(self, tensor: Tensor) -> Tensor:
        return self._take.there(self._gather.there(tensor))

    def back(self, gradient: Tensor) -> Tensor:
        return self._gather.back(self._take.back(gradient))
