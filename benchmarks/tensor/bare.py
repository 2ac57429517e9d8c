"""The shards of a model without an engine, for a forward pass alone."""

from collections.abc import Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.replica.tensor.shards import Shards


@final
class Bare(Shards):
    """One of them.

    Args:
        group: has all of them.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._group = group

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what
        made = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self._group)
        return made

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del what
        longest = max(map(prod, shapes))
        mine = torch.cat([part.reshape(-1), part.new_zeros(longest - part.numel())])
        rows = [torch.empty_like(mine) for _ in shapes]
        dist.all_gather(rows, mine, group=self._group)
        return [row[: prod(shape)].view(*shape) for row, shape in zip(rows, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        raise AssertionError(f"a forward pass does not scatter: {what}")
