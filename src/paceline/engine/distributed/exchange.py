"""One all-reduce of all that ranks bring."""

from typing import Protocol

from torch import Tensor

from paceline.core.types import Clock
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.rows import Row
from paceline.engine.team.traffic import Traffic


def of_step(step: Clock) -> str:
    """What is waited for when ranks meet."""
    return f"the all-reduce of its step {step}"


class Meets(Protocol):
    """Where ranks meet."""

    def meet(self, row: Row, step: Clock) -> list[Row]:
        """One row of each replica; what this rank brought is summed where it has to be."""


class Exchange:
    """Where ranks meet who bring a Δ of all of A.

    Args:
        freight: what this rank brings.
        vectors: what of it is summed here.
        rank: whose.
        traffic: None where nobody else is there.
    """

    def __init__(self, freight: Freight, vectors: list[Tensor], rank: int, traffic: Traffic | None) -> None:
        self._freight, self._vectors, self._rank, self._traffic = freight, vectors, rank, traffic

    def meet(self, row: Row, step: Clock) -> list[Row]:
        """All ranks' rows; the vectors then hold the sum of what they brought."""
        self._freight.tell(self._rank, row)
        if self._traffic is not None:
            self._traffic.all_reduce(self._vectors, of_step(step))
        return self._freight.told()
