"""What it costs to have tensors as an operator takes them."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from paceline.replica.tensor.base import Call, Value, Way
from paceline.replica.tensor.layouts import PARTIAL, SHARED, WHOLE, Layout, Owned, Split
from paceline.replica.tensor.prices import Price, price

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


Conversion: TypeAlias = tuple[Value, Layout, Layout]
"""(tensor, from, to)."""


def taken(
    call: Call, way: Way, there: Mapping[Key, Versions]
) -> tuple[Cost, tuple[Conversion, ...], dict[Key, Versions]] | None:
    """What it costs to have an operator's tensors as a way takes them, and how they lie then.

    Args:
        call: the operator.
        way: says how it takes them.
        there: how those lie that are there; of parameters and inputs only those that were taken before.

    Returns:
        None: they can't be had so.
    """
    cost, converted, versions = Cost(), list[Conversion](), dict[Key, Versions]()
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
        if layout == WHOLE:
            return Cost(), WHOLE
        found = converted_from(value, frozenset((WHOLE,)), layout, shards)
        return None if found is None else (found[1], WHOLE)
    if layout == PARTIAL:
        return None
    everywhere = not isinstance(layout, (Split, Owned))
    weight = value.dims > 1 and value.differentiable
    elements = value.nbytes // value.dtype.itemsize
    summed = 2 * (shards - 1) * value.nbytes if layout == SHARED and value.differentiable else 0
    return Cost(elements if everywhere and weight else 0, summed), layout


def cheapest(value: Value, known: Versions, shards: int) -> Layout:
    """From which of these an output is made whole."""
    found = converted_from(value, known, WHOLE, shards)
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
