"""One forward, one backward: the alternation that several schedules are made of."""

from collections.abc import Iterator
from typing import Literal


def alternate(ahead: int, count: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """``ahead`` forwards, then one forward and one backward by turns, then the backwards that are left.

    Args:
        ahead: by how many the forwards lead.
        count: how many there are of each; however many, nothing is kept.

    >>> " ".join(f"{kind[0]}{k}" for kind, k in alternate(2, 4))
    'f0 f1 f2 b0 f3 b1 b2 b3'
    """
    for k in range(ahead + count):
        if k < count:
            yield "forward", k
        if k >= ahead:
            yield "backward", k - ahead
