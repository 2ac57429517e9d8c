"""A threshold that grows when the loss has stopped falling."""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.aggregation.base import Arrival, Need
from paceline.aggregation.thresholds import Searched
from paceline.core.errors import check_int, check_number
from paceline.core.registry import register

# Δs of each replica in a short block.
_ROUNDS = 2

# Δs of each replica before stretches are compared.
_STRETCH = 8

# Fraction of the first block's mean: below it training works, and a plateau is no slow start.
_STARTED = 0.9

# Standard errors by which a block must differ: there are hundreds of blocks in a run.
_ERRORS = 4

# Bound on a single loss: one of 1e30 would hide all others of its stretch.
_LARGEST_LOSS = 1e3


class Block(NamedTuple):
    """Sums over consecutive losses."""

    losses: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, loss: float) -> "Block":
        """Return the block with one more loss."""
        return Block(self.losses + 1, self.total + loss, self.squares + loss * loss)

    @property
    def mean(self) -> float:
        return self.total / self.losses

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(max(self.squares / self.losses - self.mean**2, 0.0) / self.losses)


class Watch(NamedTuple):
    """The memory of :class:`Plateau`."""

    k: int = 1
    seen: int = 0
    """Δs with a loss."""
    block: Block = Block()
    """The present short block."""
    first: float = math.inf
    """Mean of the first block."""
    best: float = math.inf
    """The lowest mean of a block since K last grew for a rise."""
    started: bool = False
    stretch: Block = Block()
    """The present stretch."""
    ends: int = 0
    """Number of the Δ at which it ends; 0: not known yet."""
    before: float = math.inf
    """Mean of the stretch before."""


@final
@register("plateau")
@dataclass(frozen=True)
class Plateau(Searched[Watch]):
    """K grows when the loss has stopped to fall, or rises.

    Where Δs are averaged, A moves by one step for each update, so the smallest K is the fastest for as long as steps
    help. Noise and staleness then keep the loss from falling further, or drive it up; both shrink with K. Two tests::

        loss  |\\            rises: a short block's mean is above the lowest by ``rise`` and 4 standard errors
              | \\_    /\\    stalls: a stretch's mean is not below that of the stretch before by ``gain``; stretches
              |   \\__/  \\_  grow with u, so that a slow descent is distinguished from none
              +-----------------> u

    A loss that has not fallen by a tenth since the start is not on a plateau: many models start slowly.

    Args:
        factor: on K, which grows by at least one Δ.
        rise: excess of a short block over the lowest, as a fraction.
        gain: least decrease of a stretch, as a fraction.
        growth: of stretches: each reaches from u to growth·u.
        largest: the largest K; None: P.
    """

    factor: float = 1.5
    rise: float = 0.25
    gain: float = 0.005
    growth: float = 1.5
    largest: int | None = None

    def __post_init__(self) -> None:
        check_number("plateau:factor", self.factor, "above 1", lambda factor: factor > 1, instead=1.5)
        check_number("plateau:rise", self.rise, "of at least 0", lambda rise: rise >= 0, instead=0.25)
        check_number("plateau:gain", self.gain, "from 0 to below 1", lambda gain: 0 <= gain < 1, instead=0.005)
        check_number("plateau:growth", self.growth, "above 1", lambda growth: growth > 1, instead=1.5)
        if self.largest is not None:
            check_int("plateau:largest", self.largest, least=1)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"loss"})

    def start(self) -> Watch:
        return Watch(ends=_STRETCH * self.last)

    def observe(self, memory: Watch, arrival: Arrival) -> Watch:
        if arrival.loss is None or arrival.samples == 0:
            return memory
        loss = min(arrival.loss, _LARGEST_LOSS)
        memory = memory._replace(seen=memory.seen + 1, block=memory.block.add(loss), stretch=memory.stretch.add(loss))
        if memory.block.losses >= _ROUNDS * self.last:
            memory = self._after_block(memory)
        return self._after_stretch(memory) if memory.seen >= memory.ends else memory

    def at(self, memory: Watch, u: int) -> float:
        del u
        return memory.k

    def _more(self, k: int) -> int:
        return min(self.last, max(k + 1, math.ceil(k * self.factor)))

    def _after_block(self, memory: Watch) -> Watch:
        """Compare a complete short block with the lowest."""
        mean, error = memory.block.mean, memory.block.error
        if memory.first == math.inf:
            return memory._replace(block=Block(), first=mean, best=mean)
        started = memory.started or mean + _ERRORS * error < _STARTED * memory.first
        if mean <= memory.best * (1 + self.rise) + _ERRORS * error:
            return memory._replace(block=Block(), best=min(memory.best, mean), started=started)
        return Watch(
            self._more(memory.k),
            memory.seen,
            first=memory.first,
            best=mean,
            started=started,
            ends=memory.seen + _STRETCH * self.last,
        )

    def _after_stretch(self, memory: Watch) -> Watch:
        """Compare a complete stretch with the one before."""
        mean = memory.stretch.mean
        stalled = memory.started and mean > memory.before * (1 - self.gain)
        return memory._replace(
            k=self._more(memory.k) if stalled else memory.k,
            stretch=Block(),
            before=mean,
            ends=int(memory.seen * self.growth) + (_STRETCH // 2) * self.last,
        )
