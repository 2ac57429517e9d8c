"""How often something is measured: often where it is short, a few times where it is long."""

import time
from collections.abc import Iterator

from paceline.core.types import Seconds
from paceline.engine.team.team import Team
from paceline.engine.virtual.pieces.sending import meet

MOST, LEAST, WARM = 15, 3, 2
"""Times that count, and before them times that don't."""

SHARE_S: Seconds = 4.0
"""So long a measurement may take, where the fewest times don't take longer."""


def repeats_within(once_s: Seconds) -> int:
    """How often something can be done that takes so long.

    >>> repeats_within(0.001), repeats_within(0.5), repeats_within(10.0)
    (15, 8, 3)
    """
    return max(LEAST, min(MOST, int(SHARE_S / max(once_s, 1e-9))))


def in_step(team: Team) -> Iterator[int]:
    """Numbers of times that all ranks begin together; those below 0 don't count. Ranks agree on how many there are."""
    began = time.perf_counter()
    for number in range(-WARM, 0):
        meet(team)
        yield number
    once_s = (time.perf_counter() - began) / WARM
    for number in range(max(team.gather(repeats_within(once_s), "how often"))):
        meet(team)
        yield number
