"""Softmax and its logarithm, along the sharded dim too."""

from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

_LOGARITHMS = (aten.log_softmax.int, aten._log_softmax.default)


@op_rule(aten.softmax.int, aten._softmax.default, *_LOGARITHMS, redistributes=False)
def softmax(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = exp(x)/Σ exp(x), or its logarithm.

    Along another dim than the sharded one: S_p is a part of the rows. Along the sharded one: S_p is a part of each row;
    all shards together compute the largest element and the sum, and in backward one sum more.
    """
    (x,), (output,) = call.inputs, call.outputs
    dim = call.argument(1, "dim") % max(x.dims, 1)
    for split in shards_among(available[0]):
        if split.dim % x.dims != dim:
            yield OpStrategy((split,), (split,), share=split.share)
            continue
        sums = 2 + x.differentiable
        sent = sums * 2 * (call.shards - 1) / call.shards * output.nbytes / x.shape[dim]
        yield OpStrategy((split,), (split,), "across", partial(emit_across, split), split.share, sent, sums)


def emit_across(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    dtype, logarithm = call.outputs[0].dtype, call.target in _LOGARITHMS
    module = ShardedSoftmax(emitter.shards, call.node.name, split.dim, dtype, logarithm=logarithm)
    return emitter.module(module, emitter.local(call.inputs[0].node))


@final
class ShardedSoftmax(CollectiveModule):
    """Softmax along a dim of which each shard has a part.

    log y = x - m - log Σ exp(x - m), with m the largest; d log y = dy - y·Σ dy, and dy = y·(dy - Σ y·dy).

    Args:
        shards: the group.
        name: name of the result, for messages of ranks that wait.
        dim: the sharded dim.
        dtype: type of the result.
        logarithm: return the logarithm.
    """

    def __init__(self, shards: TPCollectives, name: str, dim: int, dtype: torch.dtype, *, logarithm: bool) -> None:
        super().__init__(shards, name)
        self.dim, self._dtype, self.logarithm = dim, dtype, logarithm

    def forward(self, part: Tensor) -> Tensor:
        """Return the shard's part of the result."""
        x = part.to(torch.promote_types(self._dtype, torch.float32)).contiguous()
        result: Tensor = self.differentiable(x)
        return result.to(self._dtype)

    def value(self, ctx: Any, x: Tensor) -> Tensor:
        local = x.amax(self.dim, keepdim=True)
        largest = self.shards.all_reduce(local, f"the maximum of {self.name}", largest=True)
        shifted = x - largest  # no exponential overflows
        total = self._sum(shifted.exp(), "the sum")
        result = shifted - total.log() if self.logarithm else shifted.exp() / total
        ctx.save_for_backward(result)
        return result

    def gradients(self, ctx: Any, gradient: Tensor) -> tuple[Tensor]:
        (result,) = ctx.saved_tensors
        if self.logarithm:
            return (gradient - result.exp() * self._sum(gradient, "the gradient"),)
        return (result * (gradient - self._sum(gradient * result, "the gradient")),)

    def _sum(self, terms: Tensor, description: str) -> Tensor:
        """Return the sum along the dim, over all shards."""
        return self.shards.all_reduce(terms.sum(self.dim, keepdim=True), f"{description} of {self.name}")
