"""Redistribute a tensor from one placement to another: collectives, forward, backward or both.

::

    from                    to                      forward           backward
    Replicate               ReplicatePartialGrad    -                 all-reduce        (Megatron's f)
    Partial                 Replicate               all-reduce        -                 (and its g)
    Partial                 ReplicatePartialGrad    all-reduce        all-reduce
    Replicate               Shard                   slice             all-gather
    ReplicatePartialGrad    Shard                   slice             pad with zeros
    Shard                   Replicate               all-gather        slice
    Shard                   ReplicatePartialGrad    all-gather        reduce-scatter
    Partial                 Shard                   reduce-scatter    all-gather
    Shard                   Shard'                  all-gather, slice all-gather, slice
    Replicate               Partial                 shard 0's alone   -
    ReplicatePartialGrad    Replicate               -                 shard 0's alone
    ReplicatePartialGrad    Partial                 shard 0's alone   shard 0's alone
    Shard                   Partial                 pad with zeros    slice
    OnRank                  Replicate               broadcast         -
    OnRank                  ReplicatePartialGrad    broadcast         reduce to the owner
    OnRank                  Partial                 the owner's alone -

In backward a gradient goes the other way: so ``Replicate -> ReplicatePartialGrad`` and ``Partial -> Replicate`` are
each other's transposes (f and g of Shoeybi et al. 2019, arXiv 1909.08053).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from paceline.replica.tensor.placements import (
    OnRank,
    Partial,
    Placement,
    Replicate,
    ReplicatePartialGrad,
    Shard,
    memory_order,
)
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

Steps: TypeAlias = tuple[str, ...]
"""What is done one after the other; nothing leaves the tensor as it is."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")

REDISTRIBUTIONS: Mapping[tuple[type, type], tuple[Steps, Steps]] = {
    (Replicate, ReplicatePartialGrad): ((), ("all-reduce",)),
    (Partial, Replicate): (("all-reduce",), ()),
    (Partial, ReplicatePartialGrad): (("all-reduce",), ("all-reduce",)),
    (Replicate, Shard): (("slice",), ("all-gather",)),
    (ReplicatePartialGrad, Shard): (("slice",), ("pad",)),
    (Shard, Replicate): (("all-gather",), ("slice",)),
    (Shard, ReplicatePartialGrad): (("all-gather",), ("reduce-scatter",)),
    (Partial, Shard): (("reduce-scatter",), ("all-gather",)),
    (Shard, Shard): (("all-gather", "slice"), ("all-gather", "slice")),
    (Replicate, Partial): (("one rank",), ()),
    (ReplicatePartialGrad, Replicate): ((), ("one rank",)),
    (ReplicatePartialGrad, Partial): (("one rank",), ("one rank",)),
    (Shard, Partial): (("pad",), ("slice",)),
    (OnRank, Replicate): (("broadcast",), ()),
    (OnRank, ReplicatePartialGrad): (("broadcast",), ("reduce",)),
    (OnRank, Partial): (("one rank",), ()),
}
"""(type before, type after) -> steps forward, steps backward."""


@final
class Redistribute(CollectiveModule):
    """Redistribute a tensor from the placement ``before`` to the placement ``after``."""

    def __init__(self, shards: TPCollectives, name: str, before: Placement, after: Placement) -> None:
        super().__init__(shards, name)
        self.before, self.after = before, after
        self._forward_steps, self._backward_steps = REDISTRIBUTIONS[type(before), type(after)]

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its new placement."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return self.value(tensor)
        result: Tensor = CollectiveFunction.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def value(self, tensor: Tensor) -> Tensor:
        """Redistribute a value."""
        if not self._forward_steps:
            return tensor.view_as(tensor)  # a function of autograd must not return its very input
        result = self._run(self._forward_steps, tensor, self.before, self.after, self.name)
        return with_memory_order(result, tensor)

    def gradient(self, gradient: Tensor) -> Tensor:
        """Redistribute a gradient, from the new placement to the old one."""
        return self._run(self._backward_steps, gradient, self.after, self.before, f"the gradient of {self.name}")

    def _run(self, steps: Steps, tensor: Tensor, source: Placement, target: Placement, name: str) -> Tensor:
        """Do the steps; what is gathered or padded is the source's parts, what is cut is the target's."""
        shards = self.shards
        for step in steps:  # the same on all shards, so that their collectives meet
            if step == "all-reduce":
                tensor = shards.all_reduce(tensor, name)
            elif step == "one rank":  # the others' terms are zero, so that the sum is this rank's tensor
                owner = source.shard if isinstance(source, OnRank) else 0
                tensor = tensor.view_as(tensor) if shards.rank == owner else torch.zeros_like(tensor)
            elif isinstance(source, OnRank):
                tensor = shards.broadcast(tensor, source.shard, name)
            elif isinstance(target, OnRank):
                tensor = shards.reduce(tensor, target.shard, name)
            elif step == "all-gather":
                assert isinstance(source, Shard), "it is in parts"
                tensor = gather_parts(tensor, source, shards, name)
            elif step == "pad":
                assert isinstance(source, Shard), "it is in parts"
                shapes = _part_shapes(tensor, source, shards.rank)
                parts = [tensor if i == shards.rank else tensor.new_zeros(shape) for i, shape in enumerate(shapes)]
                tensor = source.concat(parts)
            else:
                assert isinstance(target, Shard), "it will be in parts"
                if step == "slice":
                    tensor = target.take(tensor, shards.rank).contiguous()  # operators and views expect a dense tensor
                else:
                    parts = [target.take(tensor, shard) for shard in range(shards.count)]
                    tensor = shards.reduce_scatter(parts, name)
        return tensor

    def extra_repr(self) -> str:
        return f"{self.name}, {self.before} -> {self.after}"


class CollectiveFunction(torch.autograd.Function):
    """Function of one tensor whose value and gradient a module computes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, module: Any) -> Tensor:
        ctx.module = module
        result: Tensor = module.value(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.module.gradient(gradients[0]), None


def with_memory_order(result: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the dims in memory in the order of another's: dropout draws its numbers in that order."""
    if result.stride() == like.stride() or (dims := memory_order(like)) == memory_order(result):
        return result
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return result.permute(dims).contiguous().permute(inverse)


def gather_parts(part: Tensor, split: Shard, shards: TPCollectives, name: str) -> Tensor:
    """Return the whole tensor, of all shards' parts, on each of them."""
    return split.concat(shards.all_gather(part, _part_shapes(part, split, shards.rank), name))


def _part_shapes(part: Tensor, split: Shard, shard: int) -> Sequence[tuple[int, ...]]:
    """Return the shape of each shard's part, from that of one: all have as many blocks."""
    dim, shape = split.dim % part.dim(), tuple(part.shape)
    blocks = shape[dim] // split.sizes[shard]
    return [(*shape[:dim], blocks * size, *shape[dim + 1 :]) for size in split.sizes]
