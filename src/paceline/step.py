"""The equation A_t = F(A_{t-1}, Δ(A_{t-1}, D)), as one replica runs it. Everything else is one of its letters.

=======  ==================================================  ====================================================
A        state: parameters, running buffers                   ``replica/flat_state.py``; kept by an ``engine/``
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

    def begins_delta(self) -> bool:
        """Return whether the next micro-step is the first of a Δ."""

    def pull(self) -> Given:
        """Return A as F lets this replica see it; waits for as long as F says."""

    def ends_delta(self) -> bool:
        """Count a micro-step and return whether it was the last of its Δ."""

    def delta_buffer(self) -> Given:
        """Return the buffer to write Δ into."""

    def push(self, facts: Taken) -> None:
        """Hand the written Δ over; F decides what happens to it."""


def step(replica: Replica[A, D, Facts], server: Server[A, Facts], batch: D, clock: int) -> float:
    """Make one micro-step, the replica's ``clock``-th, and return its loss. A Δ takes one or several in a row."""
    if server.begins_delta():
        replica.adopt(server.pull())  # A_{t-1}
    return contribute(replica, server, batch, clock)


def contribute(replica: Replica[A, D, Facts], server: Server[A, Facts], batch: D, clock: int) -> float:
    """Make the micro-step on the A that the replica has; an own loop, whose code computes gradients, begins here."""
    loss = replica.advance(batch, clock)  # towards Δ(A_{t-1}, D)
    if server.ends_delta():
        server.push(replica.finish(server.delta_buffer()))  # F makes A_t of it, when it sees fit
    return loss
