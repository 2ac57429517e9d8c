"""Which blocks are updated next: in turn, at random, or by how much they moved last; and which of them at once.

=====================================  =====================================================================
``cyclic``                             in turn; with one at once, textbook coordinate descent
``uniform``                            at random
``priority:eta=0.01``                  with probability proportional to |last change| + η·(mean of those above 0)
=====================================  =====================================================================

All share a check for dependency. A round draws ``candidates``, and takes those for which every dependency on one that
has been taken is below ``bound``, at most ``at_once``::

    candidates    7  2  9  4            dependency(7, 2) = 0.05, (7, 9) = 0.6, (2, 4) = 0.01, (7, 4) = 0.02
    at_once=3     7  2  -  4            9 depends on 7 and waits for another round

State is passed, and draws depend on the seed and the number of the round alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np

from paceline.core.errors import InputError, check_int, check_number
from paceline.core.registry import declare, entry_of, family_of, register
from paceline.core.text_form import parse_value
from paceline.parameter_scheduling.base import Array, Numbers

State = TypeVar("State")


@declare("scheduler")
@dataclass(frozen=True)
class Scheduler(ABC, Generic[State]):
    """A way to choose blocks. Subclasses are registered frozen dataclasses.

    Args:
        at_once: blocks of a round, at most.
        bound: of the dependency of any two of them; None: no check.
        candidates: blocks that a round looks at; None: 2·at_once with the check, at_once without.
    """

    at_once: int = 1
    bound: float | None = 0.1
    candidates: int | None = None

    def __post_init__(self) -> None:
        entry = entry_of(self)
        name = entry.name if entry else type(self).__name__
        check_int(f"{name}:at_once", self.at_once, least=1)
        if self.bound is not None:
            check_number(f"{name}:bound", self.bound, "above 0", lambda v: v > 0, instead=0.1)
        if self.candidates is not None:
            check_int(f"{name}:candidates", self.candidates, least=self.at_once)

    def looked_at(self, blocks: int) -> int:
        """Return how many candidates a round has."""
        usual = self.at_once if self.bound is None or self.at_once == 1 else 2 * self.at_once
        return min(blocks, usual if self.candidates is None else self.candidates)

    @abstractmethod
    def start(self, blocks: int, seed: int) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def propose(self, state: State) -> Numbers:
        """Return different blocks for the next round, the most wanted first."""

    @abstractmethod
    def updated(self, state: State, chosen: Numbers, moved: Array) -> State:
        """Return the state after a round that has updated the chosen blocks.

        Args:
            state: before it.
            chosen: some of the proposed ones.
            moved: Euclidean norm of the change of each.
        """


def coerce(scheduler: Scheduler[Any] | str) -> Scheduler[Any]:
    """Return a scheduler that is given as a value or as its text.

    >>> coerce("priority:at_once=8")
    Priority(at_once=8, bound=0.1, candidates=None, eta=0.01, power=1.0)
    """
    if isinstance(scheduler, str):
        family = family_of(Scheduler)
        assert family is not None, "it is declared"
        scheduler = parse_value(family, scheduler)
    if not isinstance(scheduler, Scheduler):
        raise InputError(f'scheduler={scheduler!r} is none; write scheduler="priority"')
    return scheduler


def independent(dependency: Array, bound: float, most: int) -> list[int]:
    """Return the positions of candidates that are taken, in order: each below the bound with all taken before.

    >>> independent(np.array([[0, 0.6, 0.0], [0.6, 0, 0.0], [0.0, 0.0, 0]]), 0.1, 3)
    [0, 2]
    """
    taken: list[int] = []
    for position in range(len(dependency)):
        if len(taken) == most:
            break
        if bool(np.all(dependency[position, taken] < bound)):
            taken.append(position)
    return taken


def balanced(costs: Sequence[float] | Array, parts: int) -> list[Numbers]:
    """Divide items into parts of about the same cost: the dearest first, each to the cheapest part so far.

    That is Graham's longest-processing-time rule: the dearest part costs at most 4/3 of what the best division has.

    >>> [part.tolist() for part in balanced([5, 1, 4, 2, 3], 2)]
    [[0, 1, 3], [2, 4]]
    """
    loads, owners = [0.0] * parts, np.empty(len(costs), np.int64)
    for item in np.argsort(-np.asarray(costs, float), kind="stable"):
        part = loads.index(min(loads))
        owners[item] = part
        loads[part] += float(costs[item])
    return [np.flatnonzero(owners == part) for part in range(parts)]


@final
@register("cyclic")
@dataclass(frozen=True)
class Cyclic(Scheduler[Numbers]):
    """Blocks in turn; those that had to wait come first in the next round. The state is the queue."""

    def start(self, blocks: int, seed: int) -> Numbers:
        return np.arange(blocks)

    def propose(self, state: Numbers) -> Numbers:
        return state[: self.looked_at(len(state))]

    def updated(self, state: Numbers, chosen: Numbers, moved: Array) -> Numbers:
        waiting = state[~np.isin(state, chosen)]
        return np.concatenate([waiting, chosen])


class Drawing(NamedTuple):
    """State of a scheduler that draws."""

    seed: int
    round: int
    weights: Array
    """(blocks,): how much each moved last; infinite before its first update."""

    def draw(self, probabilities: Array, count: int) -> Numbers:
        """Draw different blocks, one after another, each in proportion to what is left of ``probabilities``."""
        rng = np.random.default_rng([self.seed, self.round])
        # The smallest of exponential times of these rates come in just that distribution (Efraimidis, Spirakis 2006).
        times = rng.exponential(size=len(probabilities)) / probabilities
        first = np.argpartition(times, count - 1)[:count]
        return first[np.argsort(times[first])]


@final
@register("uniform")
@dataclass(frozen=True)
class Uniform(Scheduler[Drawing]):
    """Blocks at random, all alike, as Shotgun has it (Bradley et al. 2011, arXiv 1105.5379)."""

    def start(self, blocks: int, seed: int) -> Drawing:
        return Drawing(seed, 0, np.ones(blocks))

    def propose(self, state: Drawing) -> Numbers:
        return state.draw(state.weights, self.looked_at(len(state.weights)))

    def updated(self, state: Drawing, chosen: Numbers, moved: Array) -> Drawing:
        return state._replace(round=state.round + 1)


@final
@register("priority")
@dataclass(frozen=True)
class Priority(Scheduler[Drawing]):
    """Blocks at random, with probability proportional to ``|last change|^power + η·(mean of those above 0)``.

    A block that has not been updated yet goes before all that have. η is in units of the mean as in the released
    program (github.com/sailing-pmls/strads, linear-solver, with η = 0.01). That takes of its candidates the one that
    moved most first; here they are taken as they were drawn, or else a block that once stood still, of many that depend
    on each other, would hardly ever be taken.

    Args:
        eta: share of blocks that did not move: at 0 a block that once stood still is never looked at again.
        power: 1 as in the released program; 2 for squared changes.
    """

    eta: float = 0.01
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("priority:eta", self.eta, "above 0", lambda v: v > 0, instead=0.01)
        check_number("priority:power", self.power, "above 0", lambda v: v > 0, instead=1)

    def start(self, blocks: int, seed: int) -> Drawing:
        return Drawing(seed, 0, np.full(blocks, np.inf))

    def propose(self, state: Drawing) -> Numbers:
        new = np.isinf(state.weights)
        largest = np.max(state.weights, where=~new, initial=0.0)
        # Relative to the largest, so that no power of a tiny change becomes 0.
        moved = np.where(new, 0.0, state.weights / (largest or 1.0)) ** self.power
        above = moved[moved > 0]
        share = moved + self.eta * (above.mean() if len(above) else 1.0)
        share[new] = 1e30 * share.max()  # so much that no other is drawn before
        return state.draw(share, self.looked_at(len(share)))

    def updated(self, state: Drawing, chosen: Numbers, moved: Array) -> Drawing:
        weights = state.weights.copy()
        weights[chosen] = moved
        return state._replace(round=state.round + 1, weights=weights)
