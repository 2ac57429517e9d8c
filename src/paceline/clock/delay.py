"""Delays: some of the replicas are slower than the others, as in the Smooth Switch paper (arXiv 2407.00101)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from paceline.clock.base import Distribution
from paceline.clock.distributions import parse
from paceline.clock.text import finite, number, show
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId, Seconds

_CHOICE = int.from_bytes(b"slowed replicas")
_DRAWS = int.from_bytes(b"delays")
_EXAMPLE = "fraction=0.5 normal:mean=0,std=0.25"


@final
@dataclass(frozen=True)
class Delay:
    """A fixed part of the replicas draws an extra delay for each gradient.

    Which replicas those are depends on the seed and P alone, and the k-th delay of replica r on (seed, r, k) alone: all
    strategies and engines meet the same delays.

    Args:
        distribution: of the delay of one gradient, in seconds.
        fraction: of the replicas, 0 to 1; rounded to whole replicas.

    Raises:
        InputError: a fraction outside 0 to 1.

    >>> delay = Delay.parse("normal:mean=0,std=0.25")
    >>> str(delay)
    'fraction=0.5 normal:mean=0,std=0.25'
    >>> sorted(delay.slowed(replicas=6, seed=0))
    [0, 3, 4]
    """

    distribution: Distribution
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= finite(self.fraction, "fraction") <= 1:
            raise InputError(f"fraction={show(self.fraction)} lies outside 0 to 1; write fraction=0.5, say.")

    @classmethod
    def parse(cls, text: str) -> "Delay":
        """The delay that ``text`` describes: a distribution, and ``fraction=`` where it is not one half.

        Raises:
            InputError: not exactly one distribution, or one of the two is not what it should be.
        """
        words = text.split()
        fractions = [word.removeprefix("fraction=") for word in words if word.startswith("fraction=")]
        others = [word for word in words if not word.startswith("fraction=")]
        if len(others) != 1 or len(fractions) > 1:
            raise InputError(f"delay {text!r} must be one distribution and at most one fraction; write {_EXAMPLE!r}.")
        return cls(parse(others[0]), *(number(fraction, "fraction") for fraction in fractions))

    def __str__(self) -> str:
        return f"fraction={show(self.fraction)} {self.distribution}"

    def slowed(self, replicas: int, seed: int) -> frozenset[ReplicaId]:
        """The replicas that draw delays: ``round(fraction * replicas)`` of them."""
        return _first(round(self.fraction * replicas), replicas, seed)

    def stream(self, replica: ReplicaId, replicas: int, seed: int) -> Iterator[Seconds] | None:
        """The delays of a replica's gradients, without end; None where it is not slowed."""
        if replica not in self.slowed(replicas, seed):
            return None
        return self.distribution.stream(np.random.default_rng([seed, _DRAWS, replica]))


@lru_cache(maxsize=4)
def _first(count: int, replicas: int, seed: int) -> frozenset[ReplicaId]:
    """So many of all in an order that is drawn; remembered, for each replica asks."""
    return frozenset(np.random.default_rng([seed, _CHOICE, replicas]).permutation(replicas)[:count].tolist())
