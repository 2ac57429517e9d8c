"""Scaled dot-product attention, by heads or by samples."""

from collections.abc import Iterator
from math import sqrt
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import (
    Available,
    GraphEmitter,
    GraphTensor,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    replicated,
    shards_among,
)
from paceline.replica.tensor.placements import Placement, Shard
from paceline.replica.tensor.rules.dropout import drop_part

aten = torch.ops.aten


@final
class Attention(OpRule):
    """y = softmax(q·kᵀ/√d + mask)·v.

    heads: S_p = some of the heads of q, k and v; nothing is sent. Where k and v have fewer heads than q, each shard has
    whole groups of them.
    """

    targets: ClassVar = (aten.scaled_dot_product_attention.default,)
    repeats = True

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        q, k, v, *mask = (_value(call, node) for node in _given(call))
        if any(value in (q, k, v) for value in mask):
            return
        offered_to = (each for value, each in zip(call.inputs, available, strict=True) if value not in mask)
        for split in dict.fromkeys(split for each in offered_to for split in shards_among(each)):
            if split.dim >= -2:
                continue
            each = [self._of(value, split) for value in (q, k, v)]
            heads = each[0]
            if heads is not None and None not in each:
                masks: list[Placement] = [_of_mask(value, heads) for value in mask]
                lies = dict(zip((q, k, v, *mask), (*each, *masks), strict=True))
                inputs = tuple(layout for value in call.inputs if (layout := lies[value]) is not None)
                yield OpStrategy(inputs, (heads,), "heads", _emit(heads), heads.share)

    def _of(self, value: GraphTensor, split: Shard) -> Shard | None:
        """Its part along the dim, which may have fewer heads, each for a group of them."""
        mine = value.shape[split.dim]
        if mine == split.length:
            return split
        if split.length % mine == 0:
            group = split.length // mine
            if split.blocks == 1 and all(size % group == 0 for size in split.sizes):
                return Shard(split.dim, tuple(size // group for size in split.sizes))
        elif mine % split.length == 0:
            group = mine // split.length
            return Shard(split.dim, tuple(size * group for size in split.sizes), split.blocks)
        return None


def _given(call: OpCall) -> list[Node]:
    """q, k, v and the mask, if there is one; two of them may be one tensor."""
    named = ("query", "key", "value", "attn_mask")
    return [node for i, name in enumerate(named) if (node := call.argument(i, name)) is not None]


def _value(call: OpCall, node: Node) -> GraphTensor:
    return next(value for value in call.inputs if value.node is node)


def _of_mask(mask: GraphTensor, split: Shard) -> Placement:
    length = mask.shape[split.dim] if -split.dim <= mask.dims else 1
    return split if length == split.length else replicated(mask)


def _emit(split: Shard) -> Any:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        p = call.argument(4, "dropout_p", 0.0)
        if not p:
            return emitter.same(call)
        q, k, v, *mask = map(emitter.local, _given(call))
        heads = Dropping(
            emitter, split, p, call.argument(5, "is_causal", False), call.argument(6, "scale", None),
            call.argument(7, "enable_gqa", False),
        )  # fmt: skip
        return emitter.module(heads, q, k, v, *mask)

    return emit


@final
class Dropping(nn.Module):
    """The same in torch's plain operators, with the random numbers that one process draws for these heads."""

    def __init__(
        self, emitter: GraphEmitter, split: Shard, p: float, causal: bool, scale: float | None, grouped: bool
    ) -> None:
        super().__init__()
        self._split, self._shard, self._p = split, emitter.shards.rank, p
        self._causal, self._scale, self._grouped = causal, scale, grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of this shard's heads."""
        if self._grouped:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scale = sqrt(self._scale if self._scale is not None else 1 / sqrt(q.shape[-1]))
        scores = (q * scale) @ (k.transpose(-2, -1) * scale)  # both, as torch does it, so rounding is the same
        if self._causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return drop_part(aten._safe_softmax.default(scores, -1), self._p, self._split, self._shard) @ v


register(Attention())
