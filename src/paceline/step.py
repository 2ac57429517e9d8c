"""The equation A_t = F(A_{t-1}, Δ(A_{t-1}, D)), as one replica lives it. All else is one of its letters.

=======  ==================================================  ====================================================
A        state: parameters, running buffers                   ``replica/state.py``; it lives in an ``engine/``
D        batches: one seeded stream under every strategy      ``core/order.py``, ``replica/batches.py``
Δ        delta: what a replica computes                       ``replica/``
F        aggregation: which Δs, when, with what weights       ``aggregation/``
t        version: how many updates A has had                  ``engine/coordinator.py``
=======  ==================================================  ====================================================
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

A = TypeVar("A")
D = TypeVar("D")
Facts = TypeVar("Facts")
Read = TypeVar("Read", contravariant=True)
Taken = TypeVar("Taken", contravariant=True)
Given = TypeVar("Given", covariant=True)


class Replica(Protocol[Read, Taken, Given]):
    """Δ."""

    def adopt(self, state: Read) -> None: ...

    def advance(self, batch: Taken, clock: int) -> float: ...

    def finish(self, out: Read) -> Given: ...


class Server(Protocol[Given, Taken]):
    """A and F, as a replica sees them."""

    def pull(self) -> Given:
        """A as F lets this replica see it; waits for as long as F says."""

    def slot(self) -> Given:
        """Where Δ is to be written."""

    def push(self, facts: Taken) -> None:
        """Hand over what was written; F decides what becomes of it."""


def step(replica: Replica[A, D, Facts], server: Server[A, Facts], batches: Iterable[D], clock: int) -> list[float]:
    """One Δ: pull A, compute, push. Returns the loss of each micro-step; ``clock`` numbers the first."""
    replica.adopt(server.pull())
    losses = [replica.advance(batch, clock + i) for i, batch in enumerate(batches)]
    server.push(replica.finish(server.slot()))
    return losses
