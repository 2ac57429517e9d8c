"""Random numbers: each shard draws those of all, from the same state, and takes its own.

Dropout, with the random numbers of one process whatever the layout.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpRule, OpStrategy, register, shards_among
from paceline.replica.tensor.placements import PARTIAL, Shard, memory_order


def drop_part(part: Tensor, p: float, split: Shard, shard: int) -> Tensor:
    """Dropout of a shard's part, as one process would drop the whole tensor.

    Args:
        part: dims in memory in the order of the whole tensor, which is that in which numbers are drawn.
        p: of an element to be dropped, below 1.
        split: how the whole is divided.
        shard: whose part it is.
    """
    dim = split.dim
    shape = list(part.shape)
    shape[dim] = shape[dim] // split.sizes[shard] * split.block_size
    noise = torch.empty_permuted(shape, memory_order(part), dtype=part.dtype, device=part.device)
    noise.bernoulli_(1 - p).div_(1 - p)
    return part * split.take(noise, shard)


aten = torch.ops.aten


@final
class Dropout(OpRule):
    """y = x·mask/(1 - p): S_p is whatever part x is divided into, of the mask as of x. Of terms each gets the mask."""

    targets: ClassVar = (aten.dropout.default, aten.dropout_.default, aten.native_dropout.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len(call.outputs) != 1:
            return
        trained = call.argument(2, "train", True) and 0 < call.argument(1, "p", 0.5) < 1
        for split in shards_among(available[0]):
            yield OpStrategy((split,), (split,), emit=_part(split) if trained else None, share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL,), (PARTIAL,))


def _part(split: Shard) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        return emitter.module(
            Dropping(call.argument(1, "p"), split, emitter.shards.rank), emitter.local(call.inputs[0].node)
        )

    return emit


@final
class Dropping(nn.Module):
    """Of one shard's part.

    Args:
        p: of an element to be dropped.
        split: how the whole is divided.
        shard: whose part it is.
    """

    def __init__(self, p: float, split: Shard, shard: int) -> None:
        super().__init__()
        self._p, self._split, self._shard = p, split, shard

    def forward(self, part: Tensor) -> Tensor:
        """The part, with the same elements dropped as in the whole."""
        return drop_part(part, self._p, self._split, self._shard)


register(Dropout())
