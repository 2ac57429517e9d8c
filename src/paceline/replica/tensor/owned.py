"""Conversions of a tensor that one shard has: see :mod:`paceline.replica.tensor.conversions`."""

from abc import ABC
from typing import final

import torch
from torch import Tensor

from paceline.replica.tensor.conversions import Conversion
from paceline.replica.tensor.shards import Shards


class OfOwner(Conversion, ABC):
    """One that knows the owner; the others have a tensor of the same shape in its place.

    Args:
        shards: who convert.
        name: of the tensor.
        owner: the shard that has it.
    """

    def __init__(self, shards: Shards, name: str, owner: int) -> None:
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
