"""Random numbers: each shard draws those of all, from the same state, and takes its own."""

import torch
from torch import Tensor

from paceline.replica.tensor.layouts import Split, order


def dropped(part: Tensor, p: float, split: Split, shard: int) -> Tensor:
    """Dropout of a shard's part, as one process would drop the whole tensor.

    Args:
        part: dims in memory in the order of the whole tensor, which is that in which numbers are drawn.
        p: of an element to be dropped, below 1.
        split: how the whole is divided.
        shard: whose part it is.
    """
    dim = split.dim
    shape = list(part.shape)
    shape[dim] = shape[dim] // split.sizes[shard] * split.block
    noise = torch.empty_permuted(shape, order(part), dtype=part.dtype, device=part.device)
    noise.bernoulli_(1 - p).div_(1 - p)
    return part * split.take(noise, shard)
