"""What one rank has of A."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.replica.state import Layout, State


class Gather(Protocol):
    """How A is made of the parts of all ranks."""

    def __call__(self, *, wanted: bool) -> State | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""


@dataclass(frozen=True)
class Held:
    """One rank's.

    Args:
        state: its part of A.
        whole: the layout of A.
        counted: the names of the parameters that count here in the norm of Δ: what several parts have counts once.
        gather: makes A of all ranks' parts.
    """

    state: State
    whole: Layout
    counted: Sequence[str]
    gather: Gather


def all_of(state: State) -> Held:
    """Where every rank has all of A."""

    def copied(*, wanted: bool) -> State | None:
        return state.clone() if wanted else None

    return Held(state, state.layout, state.layout.parameter_names, copied)
