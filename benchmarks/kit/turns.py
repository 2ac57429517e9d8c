"""Sides that take turns in the same processes, a few steps each::

round 0    side a | side b | side c        warms up, and is not counted
round 1    side c | side b | side a        a side's time: the median of its steps, on the slowest rank
round 2    side a | side b | side c
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch.distributed as dist
from kit.crew import Member
from kit.together import largest, tell
from kit.work import Begun

Step: TypeAlias = Callable[[], None]


def turns(member: Member, where: str, sides: Mapping[str, Step], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each round that counts, by side; all ranks call it together.

    Args:
        member: this rank.
        where: in words, for who watches.
        sides: a step of each.
        rounds: that count.
        steps: of a turn that count; one more is made before them.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        tell(member, Begun(f"{where}, round {number} of {rounds}"))
        for name in list(sides)[:: -1 if number % 2 else 1]:
            dist.barrier()
            taken = [timed(sides[name]) for _ in range(steps + 1)]
            seconds = largest(statistics.median(taken[1:]))
            if number:
                found[name].append(seconds)
    return found


def timed(step: Step) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
