"""Losses of which each shard has a term: over split classes, and over split elements."""

from collections.abc import Iterator
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import (
    Available,
    Emit,
    GraphEmitter,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    shards_among,
)
from paceline.replica.tensor.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.replica.tensor.rules.elementwise import inputs_along
from paceline.replica.tensor.rules.softmax import ShardedSoftmax

aten = torch.ops.aten

_NONE, _MEAN, _SUM = range(3)
"""The reductions, as torch numbers them."""


@final
class CrossEntropy(OpRule):
    """loss = - Σ q·w·log softmax(x), with q the target over the classes: S_p = some of the classes.

    A shard has the logits of its classes, and their share of the loss. What is sent are the largest logit of a sample
    and the sum over its classes, never the logits. A target of classes is everyone's, one of probabilities is split;
    a weight for each class is everyone's.
    """

    targets: ClassVar = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        logits, *others = call.inputs
        if any(value.differentiable for value in others[1:]):
            return
        dim = min(1 - logits.dims, -1)
        for split in shards_among(available[0]):
            if split.dim == dim and len(others) == 1 + (call.argument(2, "weight") is not None):
                target: Placement = split if others[0].dtype.is_floating_point else REPLICATE
                inputs = (split, target, *(REPLICATE for _ in others[1:]))
                sums, sent_bytes = _across(call, split)
                yield OpStrategy(inputs, (PARTIAL,), "classes", _emit(split), split.share, sent_bytes, sums)


def _across(call: OpCall, split: Shard) -> tuple[int, float]:
    """Collectives and bytes of the softmax over all classes."""
    if call.target is aten.nll_loss_nd.default:
        return 0, 0.0
    (logits, *_), k = call.inputs, call.shards
    sums = 2 + logits.differentiable
    return sums, sums * 2 * (k - 1) / k * logits.nbytes / split.length


def _emit(split: Shard) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        logits, *others = (emitter.local(value.node) for value in call.inputs)
        smoothing = call.argument(5, "label_smoothing", 0.0)
        if call.target is aten.cross_entropy_loss.default:
            dtype = torch.promote_types(call.outputs[0].dtype, torch.float32)
            logits = emitter.module(
                ShardedSoftmax(emitter.shards, call.node.name, split.dim, dtype, logarithm=True), logits
            )
        loss = OverClasses(
            split, emitter.shards.rank, call.argument(3, "reduction", _MEAN), call.argument(4, "ignore_index", -100),
            smoothing, call.outputs[0].dtype,
        )  # fmt: skip
        return emitter.module(loss, logits, *others)

    return emit


@final
class OverClasses(nn.Module):
    """Of logarithms of probabilities, one shard's share of the loss.

    Args:
        split: of the classes.
        shard: whose share it is.
        reduction: as torch numbers them.
        ignore_index: the target of samples that do not count.
        smoothing: how much of the target is spread over all classes.
        dtype: of the result.
    """

    def __init__(
        self, split: Shard, shard: int, reduction: int, ignore_index: int, smoothing: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._split, self._shard, self._reduction = split, shard, reduction
        self._ignored, self._smoothing, self._dtype = ignore_index, smoothing, dtype

    def forward(self, logarithms: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """A term of the loss; or of the losses of all samples."""
        if target.dtype.is_floating_point:
            losses = self._of_probabilities(logarithms, target, weight)
            count: Tensor | int = losses.numel()
        else:
            losses, count = self._of_classes(logarithms, target, weight)
        if self._reduction != _NONE:
            losses = losses.sum()
        return (losses / count if self._reduction == _MEAN else losses).to(self._dtype)

    def _of_probabilities(self, logarithms: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Of each sample."""
        if self._smoothing:
            target = target * (1 - self._smoothing) + self._smoothing / self._split.length
        return -(logarithms * target * self._weights(logarithms, weight)).sum(self._split.dim)

    def _of_classes(self, logarithms: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each sample, and what a mean divides by."""
        counts = target != self._ignored
        classes = target.masked_fill(~counts, 0).long()
        mine = self._places(classes).masked_fill(~counts, _ELSEWHERE)
        mine_of_weight = None if weight is None else self._part(weight).to(logarithms.dtype)
        losses = nn.functional.nll_loss(logarithms, mine, mine_of_weight, ignore_index=_ELSEWHERE, reduction="none")
        if self._smoothing:
            spread = -(logarithms * self._weights(logarithms, weight)).sum(self._split.dim).masked_fill(~counts, 0)
            losses = losses * (1 - self._smoothing) + spread * (self._smoothing / self._split.length)
        if weight is None:
            return losses, counts.sum()
        return losses, weight.index_select(0, classes.flatten()).view_as(classes).masked_fill(~counts, 0).sum()

    def _places(self, classes: Tensor) -> Tensor:
        """Which of this shard's classes they are; those of others are elsewhere."""
        every = torch.arange(self._split.length, device=classes.device)
        mine = self._part(every)
        places = torch.full_like(every, _ELSEWHERE)
        places[mine] = torch.arange(len(mine), device=classes.device)
        return places.index_select(0, classes.flatten()).view_as(classes)

    def _part(self, of_classes: Tensor) -> Tensor:
        return self._split.at(-1).take(of_classes, self._shard)

    def _weights(self, logarithms: Tensor, weight: Tensor | None) -> Tensor:
        """That broadcast to the logarithms."""
        if weight is None:
            return logarithms.new_ones(())
        return self._part(weight).to(logarithms.dtype).view(-1, *(1 for _ in range(-1 - self._split.dim)))


_ELSEWHERE = -100


@final
class OverElements(OpRule):
    """The sum or mean of a loss of each element: S_p is whatever part the tensors are divided into.

    A shard has the term of its elements; of a mean, weighed by how many of all they are.
    """

    targets: ClassVar = (
        aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
        aten.soft_margin_loss.default,
    )  # fmt: skip
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len({value.shape for value in call.inputs[:2]}) != 1:
            return
        reduction = _reduction(call)
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            inputs = inputs_along(call, split) if -split.dim <= call.inputs[0].dims else None
            if inputs is None or inputs[0] != split:
                continue
            if reduction == _NONE:
                yield OpStrategy(inputs, (split,), share=split.share)
            else:
                emit = _mean(split) if reduction == _MEAN else None
                yield OpStrategy(inputs, (PARTIAL,), emit=emit, share=split.share)


def _reduction(call: OpCall) -> int:
    names = [argument.name for argument in call.target._schema.arguments]
    reduction: int = call.argument(names.index("reduction"), "reduction", _MEAN)
    return reduction


def _mean(split: Shard) -> Emit:
    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        share = split.sizes[emitter.shards.rank] / split.block_size
        return emitter.call(aten.mul.Tensor, emitter.same(call), share)

    return emit


for _rule in (CrossEntropy(), OverElements()):
    register(_rule)
