"""The shards of a model without an engine, for a forward pass alone."""

from collections.abc import Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm.process_group import ShmProcessGroup
from paceline.replica.tensor.tp_group import TPCollectives


@final
class Bare(TPCollectives):
    """One of them.

    Args:
        group: has all of them.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._group = group

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what
        if isinstance(self._group, ShmProcessGroup):  # as the engine does
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._group.combine(tensor, made, "max" if largest else "sum").wait()
            return made
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
        found = [self.reduce(part, owner, what) for owner, part in enumerate(parts)]  # in the check alone
        return found[self.rank]

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del what
        made = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(made, group=self._group, group_src=owner)
        return made

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del what
        made = tensor.clone(memory_format=torch.contiguous_format)
        dist.reduce(made, group=self._group, group_dst=owner)
        return made

    def says(self, said: str, about: str) -> Sequence[str]:
        """What each of them says."""
        del about
        found = [""] * self.count
        dist.all_gather_object(found, said, group=self._group)
        return found


@final
class Silent(TPCollectives):
    """One of the shards, whose collectives send nothing: results have their shapes, and values of this shard alone."""

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what, largest
        return tensor.clone()

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del what
        return [part.clone() if rank == self.rank else part.new_zeros(*shape) for rank, shape in enumerate(shapes)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        del what
        return parts[self.rank].clone()

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return tensor.clone()

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return tensor.clone()
