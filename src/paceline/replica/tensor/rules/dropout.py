"""Dropout: each shard draws the random numbers of the whole tensor, from the same state, and takes its own."""

from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import Shard, memory_order


@op_rule(aten.dropout.default, aten.dropout_.default, aten.native_dropout.default, redistributes=False)
def dropout(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = x·mask/(1 - p): S_p is whatever part of x is sharded, of the mask too; terms of a sum get the same mask."""
    if len(call.outputs) != 1:
        return
    active = call.argument(2, "train", True) and 0 < call.argument(1, "p", 0.5) < 1
    for split in shards_among(available[0]):
        yield OpStrategy((split,), (split,), emit=partial(emit_part, split) if active else None, share=split.share)
    yield from call.partial_strategies(available)


def emit_part(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    module = ShardedDropout(call.argument(1, "p"), split, emitter.shards.rank)
    return emitter.module(module, emitter.local(call.inputs[0].node))


@final
class ShardedDropout(nn.Module):
    """Dropout of one shard's part: the same elements are dropped as in the whole.

    Args:
        p: probability of an element to be dropped.
        split: sharding of the tensor.
        shard: rank of this shard.
    """

    def __init__(self, p: float, split: Shard, shard: int) -> None:
        super().__init__()
        self._p, self._split, self._shard = p, split, shard

    def forward(self, part: Tensor) -> Tensor:
        """Return the part with elements dropped."""
        return drop_part(part, self._p, self._split, self._shard)


def drop_part(part: Tensor, p: float, split: Shard, shard: int) -> Tensor:
    """Return the dropout of a shard's part, as one process would drop the whole tensor.

    Args:
        part: its dims in memory in the order of the whole tensor, in which numbers are drawn.
        p: probability of an element to be dropped, below 1.
        split: sharding of the whole tensor.
        shard: rank of the shard.
    """
    shape = list(part.shape)
    shape[split.dim] = shape[split.dim] // split.sizes[shard] * split.block_size
    # In the memory order of the whole tensor: numbers are drawn in that order.
    noise = torch.empty_permuted(shape, memory_order(part), dtype=part.dtype, device=part.device)
    noise.bernoulli_(1 - p).div_(1 - p)
    return part * split.take(noise, shard)
