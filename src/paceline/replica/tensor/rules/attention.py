"""Scaled dot-product attention, by heads or by samples."""

from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import Placement, Shard
from paceline.replica.tensor.rules.dropout import drop_part


@op_rule(aten.scaled_dot_product_attention.default, handles_repeats=True)
def sdpa(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = softmax(q·kᵀ/√d + mask)·v.

    heads: S_p = some of the heads of q, k and v; nothing is sent. Where k and v have fewer heads than q, each shard has
    whole groups of them.
    """
    by_node = {value.node: value for value in call.inputs}
    q, k, v, *mask = (by_node[node] for node in _input_nodes(call))
    if any(value in (q, k, v) for value in mask):
        return
    open_ = (each for value, each in zip(call.inputs, available, strict=True) if value not in mask)
    for split in shards_among(*open_):
        parts = [_grouped(value.shape[split.dim], split) for value in (q, k, v)]
        heads = parts[0]
        if split.dim >= -2 or heads is None or None in parts:
            continue
        placements: dict[Node, Placement | None] = {q.node: heads, k.node: parts[1], v.node: parts[2]}
        for value in mask:
            length = value.shape[heads.dim] if -heads.dim <= value.dims else 1
            placements[value.node] = heads if length == heads.length else value.replicated
        inputs = tuple(placement for value in call.inputs if (placement := placements[value.node]) is not None)
        yield OpStrategy(inputs, (heads,), "heads", partial(emit_heads, heads), heads.share)


def _input_nodes(call: OpCall) -> list[Node]:
    """Return the nodes of q, k, v and the mask, if there is one; two of them may be one tensor."""
    names = ("query", "key", "value", "attn_mask")
    return [node for index, name in enumerate(names) if (node := call.argument(index, name)) is not None]


def _grouped(heads: int, split: Shard) -> Shard | None:
    """Return the part of a tensor that has fewer or more heads than were sharded, in whole groups."""
    if heads == split.length:
        return split
    if split.length % heads == 0:
        group = split.length // heads
        if split.blocks == 1 and all(size % group == 0 for size in split.sizes):
            return Shard(split.dim, tuple(size // group for size in split.sizes))
    elif heads % split.length == 0:
        group = heads // split.length
        return Shard(split.dim, tuple(size * group for size in split.sizes), split.blocks)
    return None


def emit_heads(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    p = call.argument(4, "dropout_p", 0.0)
    if not p:
        return emitter.with_args(call)
    module = ShardedAttention(
        split, emitter.shards.rank, p, causal=call.argument(5, "is_causal", False),
        scale=call.argument(6, "scale"), grouped=call.argument(7, "enable_gqa", False),
    )  # fmt: skip
    return emitter.module(module, *map(emitter.local, _input_nodes(call)))


@final
class ShardedAttention(nn.Module):
    """Attention with dropout in torch's plain operators, with the random numbers of one process for these heads.

    Args:
        split: sharding of the heads.
        shard: rank of this shard.
        p: probability of an element to be dropped.
        causal: mask keys after the query.
        scale: scale of the scores; None: 1/√d.
        grouped: repeat the heads of k and v for groups of q's.
    """

    def __init__(self, split: Shard, shard: int, p: float, *, causal: bool, scale: float | None, grouped: bool) -> None:
        super().__init__()
        self._split, self._shard, self._p = split, shard, p
        self._causal, self._scale, self._grouped = causal, scale, grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the result of this shard's heads."""
        # The order of operators is that of torch's math kernel, so that rounding is the same, too.
        if self._grouped:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scale = sqrt(self._scale if self._scale is not None else 1 / sqrt(q.shape[-1]))
        scores = (q * scale) @ (k.transpose(-2, -1) * scale)  # both, as torch does it, so rounding is the same
        if self._causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return drop_part(aten._safe_softmax.default(scores, -1), self._p, self._split, self._shard) @ v
