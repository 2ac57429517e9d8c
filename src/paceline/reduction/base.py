"""How an update combines Δs where that is no weighted sum: the contract.

A policy names a reducer (:attr:`Aggregation.reducer`); whoever has A carries it out on flat vectors. Where several
servers have A in slices, each combines the elements of its slice, after numbers of all slices have been summed::

    server 0   Δs of slice 0 --- statistics --+            +--- combine --- slice 0 of the update
                                              Σ of numbers |
    server 1   Δs of slice 1 --- statistics --+            +--- combine --- slice 1 of the update

A reducer is a frozen value without state. One of your own is one file; policies are read without torch, so methods
import torch when they run::

    @register("largest")
    @dataclass(frozen=True)
    class Largest(Reducer):
        def combine(self, given, out):
            import torch
            out.copy_(torch.stack(list(given.deltas)).amax(0))
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from paceline.core.errors import PacelineError
from paceline.core.registry import declare
from paceline.core.text_form import text_of

if TYPE_CHECKING:
    import torch

# As text, so that nothing imports torch.
Tensor: TypeAlias = "torch.Tensor"


class Reduction(NamedTuple):
    """What is combined: one vector of each Δ, of the same elements of A."""

    deltas: Sequence[Tensor]
    """In the policy's order, mostly that of replicas; they stay as they are."""
    weights: Sequence[float]
    """That the policy has given them: samples / Σ samples, say."""
    current: Tensor
    """The same elements of A, before the update."""
    read: Sequence[Tensor]
    """Of A as the replica of each Δ has read it; empty unless the reducer :attr:`~Reducer.reads`."""
    statistics: Sequence[float]
    """Numbers that :meth:`Reducer.statistics` has returned, summed over all vectors and servers."""


@declare("reducer")
class Reducer(ABC):
    """A way to combine Δs. Subclasses are registered frozen dataclasses."""

    @property
    def reads(self) -> bool:
        """Whether it needs A as each Δ's replica has read it, which is kept for it."""
        return False

    def check(self, deltas: int) -> None:
        """Raise InputError if an update of so many Δs is too small for what this is to do."""
        del deltas

    def statistics(self, deltas: Sequence[Tensor]) -> list[float]:
        """Return numbers of one vector of each Δ, as many for each vector: they are summed over all of A.

        Args:
            deltas: in the policy's order.
        """
        del deltas
        return []

    @abstractmethod
    def combine(self, given: Reduction, out: Tensor) -> None:
        """Write what the optimizer steps on into ``out``.

        Args:
            given: one vector of each Δ, at least one.
            out: of the same shape and dtype, uninitialised; of no memory of theirs.
        """


def statistics_of(reducer: Reducer, deltas: Sequence[Tensor]) -> list[float]:
    """Return a reducer's :meth:`~Reducer.statistics`; raises PacelineError if they are no list."""
    found: Any = reducer.statistics(deltas)
    if not isinstance(found, list):
        raise PacelineError(f"statistics() of {text_of(reducer)} returned {found!r}; return a list of numbers, or []")
    return found


def combine(reducer: Reducer, given: Reduction, out: Tensor) -> None:
    """Have a reducer write ``out``; raises PacelineError if it returns something else, which would be lost."""
    write: Any = reducer.combine
    returned = write(given, out)
    if returned is not None and returned is not out:
        raise PacelineError(
            f"combine() of {text_of(reducer)} returned a {type(returned).__name__}; it must write what the optimizer "
            "steps on into out: out.copy_(…)"
        )
