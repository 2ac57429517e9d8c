"""Losses of which each shard has a term: over sharded classes, and over sharded elements."""

from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.replica.tensor.rules.elementwise import broadcast_inputs
from paceline.replica.tensor.rules.softmax import ShardedSoftmax

# The reductions, as torch numbers them.
_NONE, _MEAN, _SUM = range(3)

# Target of a sample whose class is on another shard.
_ELSEWHERE = -100


@op_rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default, redistributes=False)
def cross_entropy(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """loss = - Σ q·w·log softmax(x), with q the target over the classes: S_p = some of the classes.

    A shard has the logits of its classes, and their share of the loss. What is sent are the largest logit of a sample
    and the sum over its classes, never the logits. A target of classes is replicated, one of probabilities is sharded;
    a weight for each class is replicated.
    """
    logits, target, *weight = call.inputs
    if any(value.differentiable for value in weight) or len(weight) != (call.argument(2, "weight") is not None):
        return
    for split in shards_among(available[0]):
        if split.dim != min(1 - logits.dims, -1):
            continue
        of_target: Placement = split if target.dtype.is_floating_point else REPLICATE
        collectives, sent, k = 0, 0.0, call.shards
        if call.target is aten.cross_entropy_loss.default:  # the softmax over all classes
            collectives = 2 + logits.differentiable
            sent = collectives * 2 * (k - 1) / k * logits.nbytes / split.length
        inputs = (split, of_target, *(REPLICATE for _ in weight))
        yield OpStrategy(inputs, (PARTIAL,), "classes", partial(emit_classes, split), split.share, sent, collectives)


def emit_classes(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    logits, *others = (emitter.local(value.node) for value in call.inputs)
    smoothing, dtype = call.argument(5, "label_smoothing", 0.0), call.outputs[0].dtype
    if call.target is aten.cross_entropy_loss.default:
        wide = torch.promote_types(dtype, torch.float32)
        softmax = ShardedSoftmax(emitter.shards, call.node.name, split.dim, wide, logarithm=True)
        logits = emitter.module(softmax, logits)
    loss = ShardedCrossEntropy(
        split, emitter.shards.rank, call.argument(3, "reduction", _MEAN), call.argument(4, "ignore_index", -100),
        smoothing, dtype,
    )  # fmt: skip
    return emitter.module(loss, logits, *others)


@final
class ShardedCrossEntropy(nn.Module):
    """One shard's share of the loss, from logarithms of probabilities.

    Args:
        split: sharding of the classes.
        shard: rank of this shard.
        reduction: reduction, as torch numbers them.
        ignore_index: target of samples that do not count.
        smoothing: share of the target that is spread over all classes.
        dtype: type of the result.
    """

    def __init__(
        self, split: Shard, shard: int, reduction: int, ignore_index: int, smoothing: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._split, self._shard, self._reduction = split, shard, reduction
        self._ignored, self._smoothing, self._dtype = ignore_index, smoothing, dtype

    def forward(self, logarithms: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return a term of the loss, or of the losses of all samples."""
        count: Tensor | int
        if target.dtype.is_floating_point:
            if self._smoothing:
                target = target * (1 - self._smoothing) + self._smoothing / self._split.length
            losses = -(logarithms * target * self._weights(logarithms, weight)).sum(self._split.dim)
            count = losses.numel()
        else:
            losses, count = self._of_classes(logarithms, target, weight)
        if self._reduction != _NONE:
            losses = losses.sum()
        return (losses / count if self._reduction == _MEAN else losses).to(self._dtype)

    def _of_classes(self, logarithms: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample, and what a mean divides by."""
        counted = target != self._ignored
        classes = target.masked_fill(~counted, 0).long()
        # Class -> its index among this shard's, or elsewhere.
        every = torch.arange(self._split.length, device=classes.device)
        own = self._part(every)
        index_of = torch.full_like(every, _ELSEWHERE)
        index_of[own] = torch.arange(len(own), device=classes.device)
        local = index_of.index_select(0, classes.flatten()).view_as(classes).masked_fill(~counted, _ELSEWHERE)
        local_weight = None if weight is None else self._part(weight).to(logarithms.dtype)
        losses = nn.functional.nll_loss(logarithms, local, local_weight, ignore_index=_ELSEWHERE, reduction="none")
        if self._smoothing:  # the share of this shard's classes in the uniform part of the target
            spread = -(logarithms * self._weights(logarithms, weight)).sum(self._split.dim).masked_fill(~counted, 0)
            losses = losses * (1 - self._smoothing) + spread * (self._smoothing / self._split.length)
        if weight is None:
            return losses, counted.sum()
        return losses, weight.index_select(0, classes.flatten()).view_as(classes).masked_fill(~counted, 0).sum()

    def _part(self, of_classes: Tensor) -> Tensor:
        return self._split.at(-1).take(of_classes, self._shard)

    def _weights(self, logarithms: Tensor, weight: Tensor | None) -> Tensor:
        """Return the weights, in a shape that broadcasts to the logarithms."""
        if weight is None:
            return logarithms.new_ones(())
        return self._part(weight).to(logarithms.dtype).view(-1, *(1 for _ in range(-1 - self._split.dim)))


@op_rule(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
    aten.soft_margin_loss.default, redistributes=False)  # fmt: skip
def elementwise_loss(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """The sum or mean of a loss of each element: S_p is whatever part the tensors are sharded into.

    A shard has the term of its elements; of a mean, weighed by how many of all they are.
    """
    if len({value.shape for value in call.inputs[:2]}) != 1:
        return
    reduction = call.argument_named("reduction", _MEAN)
    for split in shards_among(*available):
        inputs = broadcast_inputs(call, split) if -split.dim <= call.inputs[0].dims else None
        if inputs is None or inputs[0] != split:
            continue
        output: Placement = split if reduction == _NONE else PARTIAL
        emit = partial(GraphEmitter.weighed_mean, split=split) if reduction == _MEAN else None
        yield OpStrategy(inputs, (output,), emit=emit, share=split.share)
