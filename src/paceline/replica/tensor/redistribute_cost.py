"""Which redistributions there are between placements, and what each costs.

What it costs to have tensors as an operator takes them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, final

from paceline.replica.tensor.base import OpCall, OpStrategy, Value
from paceline.replica.tensor.placements import (
    PARTIAL,
    REPLICATE,
    SHARED,
    Layout,
    OnRank,
    Partial,
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


class Price(NamedTuple):
    """Of a conversion: what a shard sends, as shares of the whole tensor, and the number of collectives."""

    forward: float
    backward: float
    collectives: tuple[int, int]
    """Forward and backward."""


@final
class _Kind(NamedTuple):
    make: Callable[[TPCollectives, str, Layout, Layout], Conversion]
    forward: str
    backward: str


def _plain(kind: type[Conversion]) -> Callable[[TPCollectives, str, Layout, Layout], Conversion]:
    return lambda shards, name, _from, _to: kind(shards, name)


def _from_parts(kind: type[OfParts]) -> Callable[[TPCollectives, str, Layout, Layout], Conversion]:
    def make(shards: TPCollectives, name: str, before: Layout, after: Layout) -> Conversion:
        split = before if isinstance(before, Shard) else after
        assert isinstance(split, Shard), "one side is split"
        return kind(shards, name, split)

    return make


def _from_owner(kind: type[OfOwner]) -> Callable[[TPCollectives, str, Layout, Layout], Conversion]:
    def make(shards: TPCollectives, name: str, before: Layout, after: Layout) -> Conversion:
        del after
        assert isinstance(before, OnRank), "one shard has it"
        return kind(shards, name, before.shard)

    return make


def _exchange(shards: TPCollectives, name: str, before: Layout, after: Layout) -> Conversion:
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


def conversion(shards: TPCollectives, name: str, before: Layout, after: Layout) -> Conversion:
    """The module that makes it; there is one where there is a :func:`price`."""
    return _KINDS[type(before), type(after)].make(shards, name, before, after)


def price(before: Layout, after: Layout, count: int, *, differentiable: bool) -> Price | None:
    """What it costs among ``count`` shards; None: there is no such conversion.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009). What one shard has, all of it goes to each of the others: as much in all as an
    all-gather.

    >>> from paceline.replica.tensor.placements import PARTIAL, REPLICATE, SHARED
    >>> price(PARTIAL, REPLICATE, 4, differentiable=True)
    Price(forward=1.5, backward=0.0, collectives=(1, 0))
    """
    kind = _KINDS.get((type(before), type(after)))
    if kind is None:
        return None
    share = {"": 0.0, "gather": (count - 1) / count, "reduce": 2 * (count - 1) / count}
    backward = kind.backward if differentiable else ""
    return Price(share[kind.forward], share[backward], (int(bool(kind.forward)), int(bool(backward))))


Key: TypeAlias = tuple[str, int]
"""(node, which of its results)."""

Versions: TypeAlias = frozenset[Layout]
"""In which layouts a tensor is there."""


class Cost(NamedTuple):
    """Compared from the first to the last."""

    whole: int = 0
    """Elements of weights that every shard has."""
    sent: float = 0.0
    """Bytes; while a plan is made in k-ths of one, which are whole numbers, so that equal sums are equal."""
    collectives: int = 0
    work: float = 0.0
    """Operations of the shard that has most."""

    def __add__(self, other: object) -> "Cost":
        assert isinstance(other, Cost), "only costs are added up"
        return Cost(
            self.whole + other.whole,
            self.sent + other.sent,
            self.collectives + other.collectives,
            self.work + other.work,
        )


def key(value: Value) -> Key:
    """What a tensor is known by."""
    return value.node.name, value.index


PricedConversion: TypeAlias = tuple[Value, Layout, Layout]
"""(tensor, from, to)."""


def taken(
    call: OpCall, way: OpStrategy, there: Mapping[Key, Versions]
) -> tuple[Cost, tuple[PricedConversion, ...], dict[Key, Versions]] | None:
    """What it costs to have an operator's tensors as a way takes them, and how they lie then.

    Args:
        call: the operator.
        way: says how it takes them.
        there: how those lie that are there; of parameters and inputs only those that were taken before.

    Returns:
        None: they can't be had so.
    """
    cost, converted, versions = Cost(), list[PricedConversion](), dict[Key, Versions]()
    for value, layout in zip(call.takes, way.takes, strict=True):
        place = key(value)
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
            cheapest = converted_from(value, known, layout, call.shards)
            if cheapest is None:
                return None
            before, price_of = cheapest
            cost += price_of
            converted.append((value, before, layout))
            versions[place] = known | {layout}
    return cost, tuple(converted), versions


def _first_use(value: Value, layout: Layout, shards: int) -> tuple[Cost, Layout] | None:
    """Of a parameter, which lies as it is first wanted, or of an input, which is whole."""
    if value.parameter is None:
        if layout == REPLICATE:
            return Cost(), REPLICATE
        found = converted_from(value, frozenset((REPLICATE,)), layout, shards)
        return None if found is None else (found[1], REPLICATE)
    if layout == PARTIAL:
        return None
    everywhere = not isinstance(layout, (Shard, OnRank))
    weight = value.dims > 1 and value.differentiable
    elements = value.nbytes // value.dtype.itemsize
    summed = 2 * (shards - 1) * value.nbytes if layout == SHARED and value.differentiable else 0
    return Cost(elements if everywhere and weight else 0, summed), layout


def cheapest(value: Value, known: Versions, shards: int) -> Layout:
    """From which of these an output is made whole."""
    found = converted_from(value, known, REPLICATE, shards)
    return found[0] if found is not None else min(known, key=str)


def converted_from(value: Value, known: Versions, layout: Layout, shards: int) -> tuple[Layout, Cost] | None:
    """From which of these a tensor is brought into a layout for least, and for how much; None: from none."""
    if value.parameter is not None:  # it lies in one way alone
        return None
    found = [
        (_cost(made, value, shards), str(before), before)
        for before in known
        if (made := price(before, layout, shards, differentiable=value.differentiable)) is not None
    ]
    if not found:
        return None
    cost, _, before = min(found, key=lambda each: each[:2])
    return before, cost


def _cost(made: Price, value: Value, shards: int) -> Cost:
    return Cost(0, round((made.forward + made.backward) * shards) * value.nbytes, sum(made.collectives))
