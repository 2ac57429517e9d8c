"""The equation A_t = F(A_{t-1}, Δ(A_{t-1}, D)), as one replica lives it. All else is one of its letters.

=======  ==================================================  ====================================================
A        state: parameters, running buffers                   ``replica/flat_state.py``; it lives in an ``engine/``
D        batches: one seeded stream under every strategy      ``core/data_order.py``, ``replica/batches.py``
Δ        delta: what a replica computes                       ``replica/``
F        aggregation: which Δs, when, with what weights       ``aggregation/``
t        version: how many updates A has had                  ``engine/coordinator.py``
=======  ==================================================  ====================================================
"""

from typing import Protocol, TypeVar

A = TypeVar("A")
D = TypeVar("D")
Facts = TypeVar("Facts")
Read = TypeVar("Read", contravariant=True)
Taken = TypeVar("Taken", contravariant=True)
Given = TypeVar("Given", covariant=True)


class Replica(Protocol[Read, Taken, Given]):
    """Δ, computed in one or more micro-steps."""

    def adopt(self, state: Read) -> None: ...

    def advance(self, batch: Taken, clock: int) -> float: ...

    def finish(self, out: Read) -> Given: ...


class Server(Protocol[Given, Taken]):
    """A and F, as one replica sees them."""

    def opens(self) -> bool:
        """Whether the next micro-step is the first of a Δ."""

    def pull(self) -> Given:
        """A as F lets this replica see it; waits for as long as F says."""

    def closes(self) -> bool:
        """Count a micro-step; whether it was the last of its Δ."""

    def slot(self) -> Given:
        """Where Δ is to be written."""

    def push(self, facts: Taken) -> None:
        """Hand over what was written; F decides what becomes of it."""


def step(replica: Replica[A, D, Facts], server: Server[A, Facts], batch: D, clock: int) -> float:
    """One micro-step, the replica's ``clock``-th; returns its loss. A Δ is one of them, or several in a row."""
    if server.opens():
        replica.adopt(server.pull())  # A_{t-1}
    loss = replica.advance(batch, clock)  # towards Δ(A_{t-1}, D)
    if server.closes():
        server.push(replica.finish(server.slot()))  # F makes A_t of it, when it sees fit
    return loss
