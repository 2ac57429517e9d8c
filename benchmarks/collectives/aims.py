"""How much quicker than Gloo backend shm is to be, and the rows that are not."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from calls import ALL_REDUCE, ROUND_TRIP
from kit.sheet import Row
from kit.words import size_text

AIMS = (
    "`all_reduce` with 2 ranks at least 5 times as quick up to 256 KiB, 2 times up to 4 MiB, 1.5 times beyond; with "
    "more ranks 2 times at every size; a message there and back 3 times at 1 KiB; nothing slower than Gloo"
)


class Missed(NamedTuple):
    """A row below its aim."""

    row: Row
    aim: float

    def __str__(self) -> str:
        row = self.row
        what = f"{row['call']}, {row['ranks']} ranks, {size_text(int(row['bytes']))}"
        return f"{what}: {float(row['ratio']):.2f} (aim {self.aim:g})"


def aim(call: str, ranks: int, nbytes: int) -> float:
    """The least ratio of Gloo's time to shm's.

    >>> aim("all_reduce", 2, 2**18), aim("all_reduce", 2, 2**22), aim("all_reduce", 2, 2**24), aim("all_reduce", 8, 1)
    (5.0, 2.0, 1.5, 2.0)
    >>> aim("send and back", 2, 1024), aim("send and back", 2, 4096), aim("barrier", 4, 0)
    (3.0, 1.0, 1.0)
    """
    if call == ROUND_TRIP and nbytes <= 2**10:
        return 3.0
    if call != ALL_REDUCE:
        return 1.0
    if ranks > 2:
        return 2.0
    return 5.0 if nbytes <= 2**18 else 2.0 if nbytes <= 2**22 else 1.5


def missed(rows: Iterable[Row]) -> Iterator[Missed]:
    """Those below their aims; what is slower than Gloo is always below."""
    for row in rows:
        least = aim(row["call"], int(row["ranks"]), int(row["bytes"]))
        if float(row["ratio"]) < least:
            yield Missed(row, least)
