"""A shard's part of a tensor with what it needs of its neighbours': a halo.

::

                 forward                               backward
    borders      all-gather                            reduce-scatter: what others found of mine is added to it
    padding      put around                            dropped

Borders are small beside the tensor, so every shard gets those of all: one collective each way, which sends k - 1 times
what neighbours alone would send each other.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.core.errors import InputError
from paceline.replica.tensor.base import Call
from paceline.replica.tensor.shards import Shards
from paceline.replica.tensor.windows import Reach, Windows


@final
class Halo(nn.Module):
    """A part -> all elements that the windows of a shard see, padding included.

    Args:
        shards: who have the parts.
        name: of the tensor, for those who wait.
        reach: what each of them needs.
        around: padding of other dims, as :func:`torch.nn.functional.pad` has it.
        fill: what padding is.
    """

    def __init__(
        self, shards: Shards, name: str, reach: Reach, around: Sequence[int] = (), *, fill: float = 0.0
    ) -> None:
        super().__init__()
        self.shards, self.name, self.reach, self._fill = shards, name, reach, fill
        self._padding = _padding(reach.has.dim, reach.padding(shards.rank), around)

    def forward(self, part: Tensor) -> Tensor:
        """The elements that this shard needs; raises InputError where the tensor is longer or shorter than planned."""
        dim, length = self.reach.has.dim, self.reach.has.sizes[self.shards.rank]
        if part.shape[dim] != length:
            raise InputError(
                f"{self.name} has {part.shape[dim]} elements along dim {dim} on shard {self.shards.rank}, and was "
                f"planned for {length}; give batches of the same size as the first, or leave its module whole in "
                "shard_rules"
            )
        made: Tensor = _Through.apply(part, self) if self.reach.crossed else self.mine(part)  # type: ignore[no-untyped-call]
        return pad(made, self._padding, value=self._fill) if any(self._padding) else made

    def mine(self, part: Tensor) -> Tensor:
        """Of the own part, what the own windows see."""
        rank = self.shards.rank
        found = self.reach.of(rank, rank)
        return part.narrow(self.reach.has.dim, found.start - self.reach.own(rank).start if found else 0, len(found))

    def there(self, part: Tensor) -> Tensor:
        """Of a value: with what others have."""
        reach, rank, dim = self.reach, self.shards.rank, self.reach.has.dim
        shapes = [_sized(part, dim, len(reach.given(shard))) for shard in range(self.shards.count)]
        each = self.shards.all_gather(_picked(part, dim, self._places()), shapes, f"the borders of {self.name}")
        pieces = [self.mine(part) if s == rank else given.narrow(dim, *self._of(s)) for s, given in enumerate(each)]
        return torch.cat(pieces, dim)

    def back(self, gradient: Tensor) -> Tensor:
        """Of a gradient: each shard's own, with what others found of it."""
        reach, rank, dim = self.reach, self.shards.rank, self.reach.has.dim
        lengths = [len(reach.of(rank, shard)) for shard in range(self.shards.count)]
        pieces = torch.split(gradient, lengths, dim)
        parts = [self._put(piece, shard) for shard, piece in enumerate(pieces)]
        found = self.shards.reduce_scatter(parts, f"the gradient of the borders of {self.name}")
        made = gradient.new_zeros(_sized(gradient, dim, reach.has.sizes[rank]))
        self.mine(made).copy_(pieces[rank])
        return made.index_add_(dim, torch.tensor(self._places(), device=made.device, dtype=torch.int64), found)

    def _places(self) -> list[int]:
        """Where in the own part those elements are that others need."""
        start = self.reach.own(self.shards.rank).start
        return [each - start for each in self.reach.given(self.shards.rank)]

    def _of(self, shard: int) -> tuple[int, int]:
        """Where, in what another shard gives, what this one needs begins, and how long it is."""
        needed = self.reach.of(self.shards.rank, shard)
        return sum(each < needed.start for each in self.reach.given(shard)) if needed else 0, len(needed)

    def _put(self, piece: Tensor, shard: int) -> Tensor:
        """The gradient of what another shard gave; of its own a shard tells nobody."""
        dim = self.reach.has.dim
        made = piece.new_zeros(_sized(piece, dim, len(self.reach.given(shard))))
        if shard != self.shards.rank:
            made.narrow(dim, *self._of(shard)).copy_(piece)
        return made

    def extra_repr(self) -> str:
        return f"{self.name}, {self.reach.has} -> {self.reach.makes}"


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.there(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.halo.back(gradients[0]), None


def _sized(tensor: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    shape[dim] = length
    return tuple(shape)


def _picked(part: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    return part.index_select(part.dim() + dim, torch.tensor(places, device=part.device, dtype=torch.int64))


def _padding(dim: int, own: tuple[int, int], around: Sequence[int]) -> list[int]:
    """With that of the divided dim, which is counted from the last."""
    made = [*around, *[0] * (-2 * dim - len(around))]
    made[-2 * dim - 2 : -2 * dim] = own
    return made


def uneven(windows: Sequence[Windows]) -> list[int]:
    """The padding of those dims that have more on one side, as :func:`torch.nn.functional.pad` has it."""
    return [side for each in reversed(windows) for side in ((0, 0) if each.even else (each.before, each.after or 0))]


def sent(call: Call, reach: Reach) -> float:
    """Bytes from each shard for the borders of an operator's first tensor, forward and backward."""
    x = call.takes[0]
    element = x.nbytes // reach.has.length
    return (call.shards - 1) / call.shards * reach.crossed * element * (1 + x.differentiable)


def collectives(call: Call, reach: Reach) -> int:
    """That it takes, forward and backward."""
    return (1 + call.takes[0].differentiable) if reach.crossed else 0
