"""Redistribute a tensor from one placement to another, by collectives forward, backward or both; and what that costs.

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
from operator import add
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from paceline.replica.tensor import placements
from paceline.replica.tensor.base import GraphTensor, OpCall, OpStrategy
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard, memory_order
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

# What is done one after the other; nothing leaves the tensor as it is.
Steps: TypeAlias = tuple[str, ...]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")

# (type before, type after) -> steps forward, steps backward.
REDISTRIBUTIONS: Mapping[tuple[type, type], tuple[Steps, Steps]] = {
    (placements.Replicate, placements.ReplicatePartialGrad): ((), ("all-reduce",)),
    (placements.Partial, placements.Replicate): (("all-reduce",), ()),
    (placements.Partial, placements.ReplicatePartialGrad): (("all-reduce",), ("all-reduce",)),
    (placements.Replicate, Shard): (("slice",), ("all-gather",)),
    (placements.ReplicatePartialGrad, Shard): (("slice",), ("pad",)),
    (Shard, placements.Replicate): (("all-gather",), ("slice",)),
    (Shard, placements.ReplicatePartialGrad): (("all-gather",), ("reduce-scatter",)),
    (placements.Partial, Shard): (("reduce-scatter",), ("all-gather",)),
    (Shard, Shard): (("all-gather", "slice"), ("all-gather", "slice")),
    (placements.Replicate, placements.Partial): (("one rank",), ()),
    (placements.ReplicatePartialGrad, placements.Replicate): ((), ("one rank",)),
    (placements.ReplicatePartialGrad, placements.Partial): (("one rank",), ("one rank",)),
    (Shard, placements.Partial): (("pad",), ("slice",)),
    (OnRank, placements.Replicate): (("broadcast",), ()),
    (OnRank, placements.ReplicatePartialGrad): (("broadcast",), ("reduce",)),
    (OnRank, placements.Partial): (("one rank",), ()),
}


@final
class Redistribute(CollectiveModule):
    """Redistribute a tensor from the placement ``before`` to the placement ``after``."""

    def __init__(self, shards: TPCollectives, name: str, before: Placement, after: Placement) -> None:
        super().__init__(shards, name)
        self.before, self.after = before, after
        self._forward_steps, self._backward_steps = REDISTRIBUTIONS[type(before), type(after)]
        self.put_off = False
        """Whether the tensor is left as it is, for somebody redistributes its value later; nothing is done backward."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its new placement."""
        if self.put_off:
            return tensor
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        result: Tensor = self.differentiable(tensor) if differentiable else self.value(None, tensor)
        return result

    def value(self, _: Any, tensor: Tensor) -> Tensor:
        if not self._forward_steps:
            return tensor.view_as(tensor)  # a function of autograd must not return its very input
        result = self._run(self._forward_steps, tensor, self.before, self.after, self.name)
        return with_memory_order(result, tensor)

    def gradients(self, _: Any, gradient: Tensor) -> tuple[Tensor]:
        return (self._run(self._backward_steps, gradient, self.after, self.before, f"the gradient of {self.name}"),)

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


# (node, index of its result).
ValueKey: TypeAlias = tuple[str, int]

# Placements in which a tensor is there at the same time.
Placements: TypeAlias = frozenset[Placement]

# (tensor, from, to).
Redistribution: TypeAlias = tuple[GraphTensor, Placement, Placement]


class RedistributionCost(NamedTuple):
    """Cost of a redistribution: what a shard sends, as shares of the whole tensor, and the collectives."""

    forward: float
    backward: float
    collectives: tuple[str, str]
    """Names of the collectives forward and backward; empty: none."""

    @property
    def number(self) -> int:
        """Number of collectives."""
        return sum(map(bool, self.collectives))


class PlanCost(NamedTuple):
    """Cost of a plan, compared from the first field to the last."""

    whole: int = 0
    """Elements of weights that every shard has."""
    sent_bytes: float = 0.0
    """Bytes; while a plan is made, k-ths of one, which are whole numbers, so that equal sums are equal."""
    collectives: int = 0
    work: float = 0.0
    """Operations of the shard that has most."""

    def __add__(self, other: object) -> "PlanCost":
        assert isinstance(other, PlanCost), "only costs are added up"
        return PlanCost(*map(add, self, other))


def redistribution_cost(
    before: Placement, after: Placement, count: int, *, differentiable: bool
) -> RedistributionCost | None:
    """Compute the cost of a redistribution among ``count`` shards; None: there is no such redistribution.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009). A tensor on one rank goes to each of the others: as much in all as an all-gather.

    >>> redistribution_cost(PARTIAL, REPLICATE, 4, differentiable=True)
    RedistributionCost(forward=1.5, backward=0.0, collectives=('all-reduce', ''))
    """
    steps = REDISTRIBUTIONS.get((type(before), type(after)))
    if steps is None:
        return None
    forward, backward = (next((step for step in each if step in COLLECTIVES), "") for each in steps)
    names = (forward, backward if differentiable else "")
    sent = [((2 if name == "all-reduce" else 1) * (count - 1) / count) if name else 0.0 for name in names]
    return RedistributionCost(sent[0], sent[1], names)


def input_cost(
    call: OpCall, strategy: OpStrategy, present: Mapping[ValueKey, Placements]
) -> tuple[PlanCost, tuple[Redistribution, ...], dict[ValueKey, Placements]] | None:
    """Compute the cost of an operator's inputs in the placements that a strategy takes.

    Args:
        call: the operator.
        strategy: names the placement of each input.
        present: placements of the tensors that are there; of parameters and inputs only those that were used before.

    Returns:
        The cost, the redistributions and the placements afterwards; None: an input can't be brought there.
    """
    cost, redistributions, after = PlanCost(), list[Redistribution](), dict[ValueKey, Placements]()
    for value, placement in zip(call.inputs, strategy.inputs, strict=True):
        place = value.key
        sources = after.get(place, present.get(place))
        if sources is None and value.parameter is not None:  # a parameter is placed as it is first used
            placed = parameter_cost(value, placement, call.shards)
            if placed is None:
                return None
            cost += placed
            after[place] = frozenset((placement,))
            continue
        sources = frozenset((REPLICATE,)) if sources is None else sources  # an input of the model is whole
        if placement in sources:
            after.setdefault(place, sources)
            continue
        cheapest = cheapest_redistribution(value, sources, placement, call.shards)
        if cheapest is None:
            return None
        source, added = cheapest
        cost += added
        redistributions.append((value, source, placement))
        after[place] = sources | {placement}
    return cost, tuple(redistributions), after


def parameter_cost(value: GraphTensor, placement: Placement, shards: int) -> PlanCost | None:
    """Compute the cost of a placement of a parameter; None: it can't have that one."""
    if placement == PARTIAL:
        return None
    weight = value.dims > 1 and value.differentiable and not isinstance(placement, (Shard, OnRank))
    summed = placement == PARTIAL_GRAD and value.differentiable
    sent = 2 * (shards - 1) * value.nbytes if summed else 0
    return PlanCost(value.nbytes // value.dtype.itemsize if weight else 0, sent)


def cheapest_source(value: GraphTensor, sources: Placements, shards: int) -> Placement:
    """Return the placement from which an output is replicated for the least."""
    cheapest = cheapest_redistribution(value, sources, REPLICATE, shards)
    return cheapest[0] if cheapest is not None else min(sources, key=str)


def cheapest_redistribution(
    value: GraphTensor, sources: Placements, target: Placement, shards: int
) -> tuple[Placement, PlanCost] | None:
    """Return the placement from which a tensor is redistributed for the least, and the cost; None: from none."""
    if value.parameter is not None:  # a parameter has one placement alone
        return None
    costs = list[tuple[PlanCost, str, Placement]]()
    for source in sources:
        each = redistribution_cost(source, target, shards, differentiable=value.differentiable)
        if each is not None:
            sent = round((each.forward + each.backward) * shards) * value.nbytes
            costs.append((PlanCost(0, sent, each.number), str(source), source))
    cost, _, cheapest = min(costs, key=lambda each: each[:2], default=(None, "", REPLICATE))
    return None if cost is None else (cheapest, cost)
