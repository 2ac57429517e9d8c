"""What ranks say to each other and to whoever listens."""

from typing import Any

import torch
import torch.distributed as dist
from kit.crew import Member


def tell(member: Member, word: Any) -> None:
    """Once, not by every rank."""
    if member.rank == 0:
        member.tell(word)


def gathered(value: Any) -> list[Any]:
    """What each rank says."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def largest(value: float) -> float:
    """Of all ranks."""
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.item()
