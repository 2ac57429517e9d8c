"""The calls that are compared: what each is made on, and what it must give."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Case:
    """One call on one rank, ready to be made again and again.

    Args:
        call: makes it.
        output: where its result lies; None: on this rank there is none.
        expected: of its first call.
    """

    call: Callable[[], object]
    output: Tensor | None
    expected: Tensor | None


Maker = Callable[[int, int, int, dist.ProcessGroup], Case]
"""(elements of the largest tensor of a rank, rank, ranks, group) -> the case."""


def _given(elements: int, rank: int) -> Tensor:
    """Whole numbers, so that sums are exact in whatever order they are made."""
    return torch.randint(-100, 100, (elements,), generator=torch.Generator().manual_seed(rank)).float()


def _all_reduce(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    x = _given(elements, rank)
    expected = sum((_given(elements, other) for other in range(1, ranks)), _given(elements, 0))
    return Case(lambda: dist.all_reduce(x, group=group), x, expected)


def _reduce(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    x = _given(elements, rank)
    expected = sum((_given(elements, other) for other in range(1, ranks)), _given(elements, 0))
    return Case(lambda: dist.reduce(x, 0, group=group), x if rank == 0 else None, expected)


def _broadcast(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    x = _given(elements, rank)
    return Case(lambda: dist.broadcast(x, 0, group=group), x, _given(elements, 0))


def _all_gather(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    x, outs = _given(elements // ranks, rank), list(torch.empty(elements // ranks * ranks).chunk(ranks))
    expected = _given(elements // ranks, ranks - 1)
    return Case(lambda: dist.all_gather(outs, x, group=group), outs[-1], expected)


def _gather(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    x = _given(elements // ranks, rank)
    outs = list(torch.empty(elements // ranks * ranks).chunk(ranks)) if rank == 0 else None
    expected = _given(elements // ranks, ranks - 1)
    return Case(lambda: dist.gather(x, outs, 0, group=group), outs[-1] if outs else None, expected)


def _scatter(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    out = torch.empty(elements // ranks)
    parts = [_given(elements // ranks, other) for other in range(ranks)] if rank == 0 else None
    return Case(lambda: dist.scatter(out, parts, 0, group=group), out, _given(elements // ranks, rank))


def _reduce_scatter(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    out, each = torch.empty(elements // ranks), elements // ranks
    parts = list(_given(each * ranks, rank).chunk(ranks))
    expected = sum((_given(each * ranks, other).chunk(ranks)[rank] for other in range(ranks)), torch.zeros(each))
    return Case(lambda: dist.reduce_scatter(out, parts, group=group), out, expected)


def _all_to_all(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    each = elements // ranks
    x, out = _given(each * ranks, rank), torch.empty(each * ranks)
    expected = torch.cat([_given(each * ranks, other).chunk(ranks)[rank] for other in range(ranks)])
    return Case(lambda: dist.all_to_all_single(out, x, group=group), out, expected)


def _round_trip(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    """From the first rank to the last and back; the others have nothing to do."""
    x, last = _given(elements, 0 if rank == 0 else 1), ranks - 1

    def there() -> None:
        dist.send(x, last, group=group)
        dist.recv(x, last, group=group)

    def back() -> None:
        dist.recv(x, 0, group=group)
        dist.send(x, 0, group=group)

    call = there if rank == 0 else back if rank == last else lambda: None
    return Case(call, x if rank in (0, last) else None, _given(elements, 0))


def _barrier(elements: int, rank: int, ranks: int, group: dist.ProcessGroup) -> Case:
    return Case(lambda: dist.barrier(group=group), None, None)


CALLS: dict[str, Maker] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send and back": _round_trip,
    "barrier": _barrier,
}
