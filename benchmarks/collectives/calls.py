"""The calls that are compared: what each is made on, and what it must give.

Rank r gives (i mod 251) · 2^r as its element i. Sums are then whole numbers that float32 holds exactly in whatever
order they are made, a rank that is left out or counted twice changes them, and so does a piece that is out of
its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLOAT_BYTES = 4

PERIOD = 251
"""A prime, so that no border between pieces falls on it."""

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Case:
    """One call on one rank, ready to be made again and again.

    Args:
        call: makes it in a group.
        outputs: where its results lie; on some ranks there are none.
        expected: what its first call must give there.
    """

    call: Callable[[Group], object]
    outputs: list[Tensor]
    expected: Callable[[], list[Tensor]]

    def check(self, group: Group) -> bool:
        """Make the first call; whether every element is what it must be. Leaves outputs at 0, so that no sum grows."""
        self.call(group)
        right = all(torch.equal(got, must) for got, must in zip(self.outputs, self.expected(), strict=True))
        for output in self.outputs:
            output.zero_()
        return right


Maker = Callable[[int, int, int], Case]
"""(elements of the largest tensor of a rank, rank, ranks) -> the case."""

# torch 2.13 has other names for them, and warns of these.
_all_gather_tensor: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def pattern(elements: int, rank: int) -> Tensor:
    """What a rank gives.

    >>> pattern(3, 2), pattern(253, 0)[-2:]
    (tensor([0., 4., 8.]), tensor([0., 1.]))
    """
    period: Tensor = torch.arange(float(PERIOD)) * 2**rank
    return period.repeat(elements // PERIOD + 1)[:elements].clone()


def total(elements: int, ranks: int) -> Tensor:
    """The sum of what all ranks give.

    >>> bool((total(5, 3) == pattern(5, 0) + pattern(5, 1) + pattern(5, 2)).all())
    True
    """
    return pattern(elements, 0).mul_(2**ranks - 1)


def _pieces(elements: int, ranks: int) -> list[Tensor]:
    return [torch.zeros(elements) for _ in range(ranks)]


def _all_reduce(elements: int, rank: int, ranks: int) -> Case:
    x = pattern(elements, rank)
    return Case(lambda group: dist.all_reduce(x, group=group), [x], lambda: [total(elements, ranks)])


def _reduce(elements: int, rank: int, ranks: int) -> Case:
    x, root = pattern(elements, rank), rank == 0

    def expected() -> list[Tensor]:
        return [total(elements, ranks) if root else x]  # on other ranks the result is unspecified

    return Case(lambda group: dist.reduce(x, 0, group=group), [x], expected)


def _broadcast(elements: int, rank: int, ranks: int) -> Case:
    x = pattern(elements, rank)
    return Case(lambda group: dist.broadcast(x, 0, group=group), [x], lambda: [pattern(elements, 0)])


def _all_gather_into(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    x, out = pattern(each, rank), torch.zeros(each * ranks)
    return Case(lambda group: _all_gather_tensor(out, x, group=group), [out], lambda: [_gathered(each, ranks)])


def _all_gather(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    x, outs = pattern(each, rank), _pieces(each, ranks)
    return Case(lambda group: dist.all_gather(outs, x, group=group), outs, lambda: _parts(each, ranks))


def _gather(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    x, outs = pattern(each, rank), _pieces(each, ranks) if rank == 0 else []
    return Case(
        lambda group: dist.gather(x, outs or None, 0, group=group),
        outs,
        lambda: _parts(each, ranks) if outs else [],
    )


def _scatter(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    out, parts = torch.zeros(each), _parts(each, ranks) if rank == 0 else None
    return Case(lambda group: dist.scatter(out, parts, 0, group=group), [out], lambda: [pattern(each, rank)])


def _reduce_scatter_into(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    out, x = torch.zeros(each), pattern(each * ranks, rank)
    return Case(
        lambda group: _reduce_scatter_tensor(out, x, group=group),
        [out],
        lambda: [total(each * ranks, ranks).chunk(ranks)[rank]],
    )


def _reduce_scatter(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    out, parts = torch.zeros(each), list(pattern(each * ranks, rank).chunk(ranks))
    return Case(
        lambda group: dist.reduce_scatter(out, parts, group=group),
        [out],
        lambda: [total(each * ranks, ranks).chunk(ranks)[rank]],
    )


def _all_to_all_single(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    x, out = pattern(each * ranks, rank), torch.zeros(each * ranks)
    return Case(
        lambda group: dist.all_to_all_single(out, x, group=group),
        [out],
        lambda: [torch.cat(_exchanged(each, rank, ranks))],
    )


def _all_to_all(elements: int, rank: int, ranks: int) -> Case:
    each = elements // ranks
    parts, outs = list(pattern(each * ranks, rank).chunk(ranks)), _pieces(each, ranks)
    return Case(lambda group: dist.all_to_all(outs, parts, group=group), outs, lambda: _exchanged(each, rank, ranks))


def _round_trip(elements: int, rank: int, ranks: int) -> Case:
    """From the first rank to the last and back; the others have nothing to do."""
    x, last = pattern(elements, rank), ranks - 1

    def there(group: Group) -> None:
        dist.send(x, last, group=group)
        dist.recv(x, last, group=group)

    def back(group: Group) -> None:
        dist.recv(x, 0, group=group)
        dist.send(x, 0, group=group)

    if rank not in (0, last):
        return Case(lambda group: None, [], list)
    return Case(there if rank == 0 else back, [x], lambda: [pattern(elements, 0)])


def _barrier(elements: int, rank: int, ranks: int) -> Case:
    return Case(lambda group: dist.barrier(group=group), [], list)


def _parts(each: int, ranks: int) -> list[Tensor]:
    return [pattern(each, rank) for rank in range(ranks)]


def _gathered(each: int, ranks: int) -> Tensor:
    return torch.cat(_parts(each, ranks))


def _exchanged(each: int, rank: int, ranks: int) -> list[Tensor]:
    return [pattern(each * ranks, source).chunk(ranks)[rank] for source in range(ranks)]


BARRIER, ROUND_TRIP, ALL_REDUCE = "barrier", "send and back", "all_reduce"

CALLS: dict[str, Maker] = {
    ALL_REDUCE: _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather_into_tensor": _all_gather_into,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter_tensor": _reduce_scatter_into,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    ROUND_TRIP: _round_trip,
    BARRIER: _barrier,
}
