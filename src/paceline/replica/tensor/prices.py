"""Which conversions there are between layouts, and what each costs."""

from collections.abc import Callable
from typing import NamedTuple, final

from paceline.replica.tensor.conversions import Conversion, First, FirstShared, Share, Sum, SumShared, Unshare
from paceline.replica.tensor.layouts import Layout, Owned, Partial, Shared, Split, Whole
from paceline.replica.tensor.owned import Broadcast, BroadcastShared, OfOwner, OwnTerm
from paceline.replica.tensor.parted import Exchange, Gather, GatherShared, OfParts, Pad, Scatter, Take, TakeShared
from paceline.replica.tensor.shards import Shards


class Price(NamedTuple):
    """Of a conversion: what a shard sends, as shares of the whole tensor, and the number of collectives."""

    forward: float
    backward: float
    collectives: tuple[int, int]
    """Forward and backward."""


@final
class _Kind(NamedTuple):
    make: Callable[[Shards, str, Layout, Layout], Conversion]
    forward: str
    backward: str


def _plain(kind: type[Conversion]) -> Callable[[Shards, str, Layout, Layout], Conversion]:
    return lambda shards, name, _from, _to: kind(shards, name)


def _from_parts(kind: type[OfParts]) -> Callable[[Shards, str, Layout, Layout], Conversion]:
    def make(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
        split = before if isinstance(before, Split) else after
        assert isinstance(split, Split), "one side is split"
        return kind(shards, name, split)

    return make


def _from_owner(kind: type[OfOwner]) -> Callable[[Shards, str, Layout, Layout], Conversion]:
    def make(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
        del after
        assert isinstance(before, Owned), "one shard has it"
        return kind(shards, name, before.shard)

    return make


def _exchange(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
    assert isinstance(before, Split), "both are split"
    assert isinstance(after, Split), "both are split"
    return Exchange(shards, name, before, after)


_KINDS: dict[tuple[type, type], _Kind] = {
    (Whole, Shared): _Kind(_plain(Share), "", "reduce"),
    (Partial, Whole): _Kind(_plain(Sum), "reduce", ""),
    (Partial, Shared): _Kind(_plain(SumShared), "reduce", "reduce"),
    (Whole, Partial): _Kind(_plain(First), "", ""),
    (Shared, Whole): _Kind(_plain(Unshare), "", ""),
    (Shared, Partial): _Kind(_plain(FirstShared), "", ""),
    (Split, Partial): _Kind(_from_parts(Pad), "", ""),
    (Split, Split): _Kind(_exchange, "gather", "gather"),
    (Whole, Split): _Kind(_from_parts(Take), "", "gather"),
    (Shared, Split): _Kind(_from_parts(TakeShared), "", ""),
    (Split, Whole): _Kind(_from_parts(Gather), "gather", ""),
    (Split, Shared): _Kind(_from_parts(GatherShared), "gather", "gather"),
    (Owned, Whole): _Kind(_from_owner(Broadcast), "gather", ""),
    (Owned, Shared): _Kind(_from_owner(BroadcastShared), "gather", "gather"),
    (Owned, Partial): _Kind(_from_owner(OwnTerm), "", ""),
    (Partial, Split): _Kind(_from_parts(Scatter), "gather", "gather"),
}


def conversion(shards: Shards, name: str, before: Layout, after: Layout) -> Conversion:
    """The module that makes it; there is one where there is a :func:`price`."""
    return _KINDS[type(before), type(after)].make(shards, name, before, after)


def price(before: Layout, after: Layout, count: int, *, differentiable: bool) -> Price | None:
    """What it costs among ``count`` shards; None: there is no such conversion.

    An all-reduce in a ring sends 2·(k - 1)/k of the tensor from each shard, an all-gather or reduce-scatter half of
    that (Patarasuk and Yuan 2009). What one shard has, all of it goes to each of the others: as much in all as an
    all-gather.

    >>> from paceline.replica.tensor.layouts import PARTIAL, WHOLE, SHARED
    >>> price(PARTIAL, WHOLE, 4, differentiable=True)
    Price(forward=1.5, backward=0.0, collectives=(1, 0))
    """
    kind = _KINDS.get((type(before), type(after)))
    if kind is None:
        return None
    share = {"": 0.0, "gather": (count - 1) / count, "reduce": 2 * (count - 1) / count}
    backward = kind.backward if differentiable else ""
    return Price(share[kind.forward], share[backward], (int(bool(kind.forward)), int(bool(backward))))
