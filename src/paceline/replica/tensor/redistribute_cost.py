"""Which redistributions there are between placements, and what each costs.

What it costs to have tensors as an operator takes them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, final

from paceline.replica.tensor.base import GraphTensor, OpCall, OpStrategy
from paceline.replica.tensor.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    OnRank,
    Partial,
    Placement,
    Replicate,
    ReplicatePartialGrad,
    Shard,
)
from paceline.replica.tensor.redistribute import (
    Broadcast,
    BroadcastShared,
    Conversion,
    Exchange,
    First,
    FirstShared,
    Gather,
    GatherShared,
    OfOwner,
    OfParts,
    OwnTerm,
    Pad,
    Scatter,
    ShareGrad,
    Sum,
    SumShared,
    Take,
    TakeShared,
    Unshare,
)
from paceline.replica.tensor.tp_group import TPCollectives


class RedistributionCost(NamedTuple):
    """Of a conversion: what a shard sends, as shares of the whole tensor, and the number of collectives."""

    forward: float
    backward: float
    collectives: tuple[int, int]
    """Forward and backward."""


@final
class _Kind(NamedTuple):
    make: Callable[[TPCollectives, str, Placement, Placement], Conversion]
    forward: str
    backward: str


def _plain(kind: type[Conversion]) -> Callable[[TPCollectives, str, Placement, Placement], Conversion]:
    return lambda shards, name, _from, _to: kind(shards, name)


def _from_parts(kind: type[OfParts]) -> Callable[[TPCollectives, str, Placement, Placement], Conversion]:
    def make(shards: TPCollectives, name: str, before: Placement, after: Placement) -> Conversion:
        split = before if isinstance(before, Shard) else after
        assert isinstance(split, Shard), "one side is split"
        return kind(shards, name, split)

    return make


def _from_owner(kind: type[OfOwner]) -> Callable[[TPCollectives, str, Placement, Placement], Conversion]:
    def make(shards: TPCollectives, name: str, before: Placement, after: Placement) -> Conversion:
        del after
        assert isinstance(before, OnRank), "one shard has it"
        return kind(shards, name, before.shard)

    return make


def _exchange(shards: TPCollectives, name: str, before: Placement, after: Placement) -> Conversion:
    assert isinstance(before, Shard), "both are split"
    assert isinstance(after, Shard), "both are split"
    return Exchange(shards, name, before, after)


_KINDS: dict[tuple[type, type], _Kind] = {
    (Replicate, ReplicatePartialGrad): _Kind(_plain(ShareGrad), "", "reduce"),
    (Partial, Replicate): _Kind(_plain(Sum), "reduce", ""),
    (Partial, ReplicatePartialGrad): _Kind(_plain(SumShared), "reduce", "reduce"),
    (Replicate, Partial): _Kind(_plain(First), "", ""),
    (ReplicatePartialGrad, Replicate): _Kind(_plain(Unshare), "", ""),
    (ReplicatePartialGrad, Partial): _Kind(_plain(FirstShared), "", ""),
    (Shard, Partial): _Kind(_from_parts(Pad), "", ""),
    (Shard, Shard): _Kind(_exchange, "gather", "gather"),
    (Replicate, Shard): _Kind(_from_parts(Take), "", "gather"),
    (ReplicatePartialGrad, Shard): _Kind(_from_parts(TakeShared), "", ""),
    (Shard, Replicate): _Kind(_from_parts(Gather), "gather", ""),
    (Shard, ReplicatePartialGrad): _Kind(_from_parts(GatherShared), "gather", "gather"),
    (OnRank, Replicate): _Kind(_from_owner(Broadcast), "gather", ""),
    (OnRank, ReplicatePartialGrad): _Kind(_from_owner(BroadcastShared), "gather", "gather"),
    (OnRank, Partial): _Kind(_from_owner(OwnTerm), "", ""),
    (Partial, Shard): _Kind(_from_parts(Scatter), "gather", "gather"),
}


def redistribute(shards: TPCollectives, name: str, before: Placement, after: Placement) -> Conversion:
    """The module that makes it; there is one where there is a :func:`price`."""
    return _KINDS[type(before), type(after)].make(shards, name, before, after)


def redistribution_cost(
    before: Placement, after: Placement, count: int, *, differentiable: bool
) -> RedistributionCost | None:
    """What it costs among ``count`` shards; None: there is no such conversion.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009). What one shard has, all of it goes to each of the others: as much in all as an
    all-gather.

    >>> from paceline.replica.tensor.placements import PARTIAL, REPLICATE
    >>> price(PARTIAL, REPLICATE, 4, differentiable=True)
    Price(forward=1.5, backward=0.0, collectives=(1, 0))
    """
    kind = _KINDS.get((type(before), type(after)))
    if kind is None:
        return None
    share = {"": 0.0, "gather": (count - 1) / count, "reduce": 2 * (count - 1) / count}
    backward = kind.backward if differentiable else ""
    return RedistributionCost(share[kind.forward], share[backward], (int(bool(kind.forward)), int(bool(backward))))


ValueKey: TypeAlias = tuple[str, int]
"""(node, which of its results)."""

Placements: TypeAlias = frozenset[Placement]
"""In which layouts a tensor is there."""


class PlanCost(NamedTuple):
    """Compared from the first to the last."""

    whole: int = 0
    """Elements of weights that every shard has."""
    sent_bytes: float = 0.0
    """Bytes; while a plan is made in k-ths of one, which are whole numbers, so that equal sums are equal."""
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


def value_key(value: GraphTensor) -> ValueKey:
    """What a tensor is known by."""
    return value.node.name, value.index


Redistribution: TypeAlias = tuple[GraphTensor, Placement, Placement]
"""(tensor, from, to)."""


def input_cost(
    call: OpCall, strategy: OpStrategy, there: Mapping[ValueKey, Placements]
) -> tuple[PlanCost, tuple[Redistribution, ...], dict[ValueKey, Placements]] | None:
    """What it costs to have an operator's tensors as a way takes them, and how they lie then.

    Args:
        call: the operator.
        way: says how it takes them.
        there: how those lie that are there; of parameters and inputs only those that were taken before.

    Returns:
        None: they can't be had so.
    """
    cost, converted, versions = PlanCost(), list[Redistribution](), dict[ValueKey, Placements]()
    for value, layout in zip(call.inputs, strategy.inputs, strict=True):
        place = value_key(value)
        known = versions.get(place, there.get(place))
        if known is None:
            found = _first_use(value, layout, call.shards)
            if found is None:
                return None
            price_of, before = found
            cost += price_of
            versions[place] = frozenset((before, layout))
            if before != layout:
                converted.append((value, before, layout))
        elif layout not in known:
            cheapest = cheapest_redistribution(value, known, layout, call.shards)
            if cheapest is None:
                return None
            before, price_of = cheapest
            cost += price_of
            converted.append((value, before, layout))
            versions[place] = known | {layout}
    return cost, tuple(converted), versions


def _first_use(value: GraphTensor, layout: Placement, shards: int) -> tuple[PlanCost, Placement] | None:
    """Of a parameter, which lies as it is first wanted, or of an input, which is whole."""
    if value.parameter is None:
        if layout == REPLICATE:
            return PlanCost(), REPLICATE
        found = cheapest_redistribution(value, frozenset((REPLICATE,)), layout, shards)
        return None if found is None else (found[1], REPLICATE)
    if layout == PARTIAL:
        return None
    everywhere = not isinstance(layout, (Shard, OnRank))
    weight = value.dims > 1 and value.differentiable
    elements = value.nbytes // value.dtype.itemsize
    summed = 2 * (shards - 1) * value.nbytes if layout == PARTIAL_GRAD and value.differentiable else 0
    return PlanCost(elements if everywhere and weight else 0, summed), layout


def cheapest_source(value: GraphTensor, known: Placements, shards: int) -> Placement:
    """From which of these an output is made whole."""
    found = cheapest_redistribution(value, known, REPLICATE, shards)
    return found[0] if found is not None else min(known, key=str)


def cheapest_redistribution(
    value: GraphTensor, known: Placements, layout: Placement, shards: int
) -> tuple[Placement, PlanCost] | None:
    """From which of these a tensor is brought into a layout for least, and for how much; None: from none."""
    if value.parameter is not None:  # it lies in one way alone
        return None
    found = [
        (_cost(made, value, shards), str(before), before)
        for before in known
        if (made := redistribution_cost(before, layout, shards, differentiable=value.differentiable)) is not None
    ]
    if not found:
        return None
    cost, _, before = min(found, key=lambda each: each[:2])
    return before, cost


def _cost(made: RedistributionCost, value: GraphTensor, shards: int) -> PlanCost:
    return PlanCost(0, round((made.forward + made.backward) * shards) * value.nbytes, sum(made.collectives))
