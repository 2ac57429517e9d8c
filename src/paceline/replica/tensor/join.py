"""Tensors of which each is on one shard, one after the other and on all of them."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.replica.tensor.conversions import laid_out
from paceline.replica.tensor.shards import Shards


@final
class Join(nn.Module):
    """forward(*tensors) -> torch.cat(tensors, dim) on each shard; those that are on another one only have their shape.

    Args:
        shards: who join.
        name: of the result, for those who wait.
        owners: of each tensor; None: all shards have it.
        dim: along which.
        shared: whether each shard has a term of the result's gradient, rather than all of it.
    """

    def __init__(self, shards: Shards, name: str, owners: Sequence[int | None], dim: int, *, shared: bool) -> None:
        super().__init__()
        self.shards, self.name, self.shared = shards, name, shared
        self._owners, self._dim = list(owners), dim

    def forward(self, *tensors: Tensor) -> Tensor:
        """The whole."""
        made: Tensor = _Joined.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return made

    def there(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of values."""
        mine = self._of(tensors, self.shards.rank)
        shapes = [self._shape(tensors, shard) for shard in range(self.shards.count)]
        own = torch.cat(mine, self._dim) if mine else tensors[0].new_empty(shapes[self.shards.rank])
        parts = self.shards.all_gather(own, shapes, self.name)
        pieces = [self._pieces(part, tensors, shard) for shard, part in enumerate(parts)]
        found = [tensors[i] if owner is None else pieces[owner].pop(0) for i, owner in enumerate(self._owners)]
        return laid_out(torch.cat(found, self._dim), tensors[0])

    def back(self, gradient: Tensor, lengths: Sequence[int]) -> list[Tensor | None]:
        """Of a gradient; None for what is on another shard."""
        rank, count = self.shards.rank, self.shards.count
        terms = list(torch.split(gradient, list(lengths), self._dim))
        if self.shared:
            parts = [self._cat(terms, gradient, shard) for shard in range(count)]
            own = self.shards.reduce_scatter(parts, f"the gradient of {self.name}")
            mine = self._pieces(own, terms, rank)
            terms = [mine.pop(0) if owner == rank else term for owner, term in zip(self._owners, terms, strict=True)]
        return [t if owner in (None, rank) else None for owner, t in zip(self._owners, terms, strict=True)]

    def extra_repr(self) -> str:
        return f"{self.name}, on shards {', '.join(map(str, self._owners))}"

    def _of(self, tensors: Sequence[Tensor], shard: int) -> list[Tensor]:
        """Those that a shard has alone."""
        return [tensor for tensor, owner in zip(tensors, self._owners, strict=True) if owner == shard]

    def _shape(self, tensors: Sequence[Tensor], shard: int) -> tuple[int, ...]:
        """Of all that a shard has."""
        shape = list(tensors[0].shape)
        shape[self._dim] = sum(tensor.shape[self._dim] for tensor in self._of(tensors, shard))
        return tuple(shape)

    def _pieces(self, part: Tensor, tensors: Sequence[Tensor], shard: int) -> list[Tensor]:
        lengths = [tensor.shape[self._dim] for tensor in self._of(tensors, shard)]
        return list(torch.split(part, lengths, self._dim)) if lengths else []

    def _cat(self, terms: Sequence[Tensor], whole: Tensor, shard: int) -> Tensor:
        theirs = self._of(terms, shard)
        return torch.cat(theirs, self._dim) if theirs else whole.narrow(self._dim, 0, 0)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, join: Join, *tensors: Tensor) -> Tensor:
        ctx.join, ctx.lengths = join, [tensor.shape[join._dim] for tensor in tensors]
        return join.there(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.join.back(gradients[0], ctx.lengths)
