"""Conversions that take tensors apart, or put them together: see :mod:`paceline.replica.tensor.conversions`."""

from abc import ABC
from typing import final

from torch import Tensor

from paceline.replica.tensor.conversions import Conversion
from paceline.replica.tensor.layouts import Split
from paceline.replica.tensor.shards import Shards


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
