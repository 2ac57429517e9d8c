"""Cost of redistributions: what a shard sends, and the cheapest source for a placement that an operator takes."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from paceline.replica.tensor.base import GraphTensor, OpCall, OpStrategy
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.redistribute import COLLECTIVES, REDISTRIBUTIONS

ValueKey: TypeAlias = tuple[str, int]
"""(node, index of its result)."""

Placements: TypeAlias = frozenset[Placement]
"""Placements in which a tensor is there at the same time."""

Redistribution: TypeAlias = tuple[GraphTensor, Placement, Placement]
"""(tensor, from, to)."""


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
        return PlanCost(
            self.whole + other.whole,
            self.sent_bytes + other.sent_bytes,
            self.collectives + other.collectives,
            self.work + other.work,
        )


def redistribution_cost(
    before: Placement, after: Placement, count: int, *, differentiable: bool
) -> RedistributionCost | None:
    """Compute the cost of a redistribution among ``count`` shards; None: there is no such redistribution.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009). A tensor on one rank goes to each of the others: as much in all as an all-gather.

    >>> from paceline.replica.tensor.placements import PARTIAL, REPLICATE
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
    cost, redistributions, placements = PlanCost(), list[Redistribution](), dict[ValueKey, Placements]()
    for value, placement in zip(call.inputs, strategy.inputs, strict=True):
        place = value.key
        known = placements.get(place, present.get(place))
        if known is None and value.parameter is not None:  # a parameter is placed as it is first used
            if placement == PARTIAL:
                return None
            weight = value.dims > 1 and value.differentiable and not isinstance(placement, (Shard, OnRank))
            summed = placement == PARTIAL_GRAD and value.differentiable
            sent = 2 * (call.shards - 1) * value.nbytes if summed else 0
            cost += PlanCost(value.nbytes // value.dtype.itemsize if weight else 0, sent)
            placements[place] = frozenset((placement,))
            continue
        known = frozenset((REPLICATE,)) if known is None else known  # an input of the model is whole
        if placement in known:
            placements.setdefault(place, known)
            continue
        found = cheapest_redistribution(value, known, placement, call.shards)
        if found is None:
            return None
        source, added = found
        cost += added
        redistributions.append((value, source, placement))
        placements[place] = known | {placement}
    return cost, tuple(redistributions), placements


def cheapest_source(value: GraphTensor, known: Placements, shards: int) -> Placement:
    """Return the placement from which an output is replicated for the least."""
    found = cheapest_redistribution(value, known, REPLICATE, shards)
    return found[0] if found is not None else min(known, key=str)


def cheapest_redistribution(
    value: GraphTensor, known: Placements, target: Placement, shards: int
) -> tuple[Placement, PlanCost] | None:
    """Return the placement from which a tensor is redistributed for the least, and the cost; None: from none."""
    if value.parameter is not None:  # a parameter has one placement alone
        return None
    found = []
    for source in known:
        each = redistribution_cost(source, target, shards, differentiable=value.differentiable)
        if each is not None:
            sent = round((each.forward + each.backward) * shards) * value.nbytes
            found.append((PlanCost(0, sent, each.number), str(source), source))
    if not found:
        return None
    cost, _, source = min(found, key=lambda each: each[:2])
    return source, cost
