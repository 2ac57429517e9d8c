"""Other processes of a run, called by the names of their methods: actors of Ray, or what is at the end of a connection.

A process that hosts servers, an evaluator or a replica offers an object's methods to the others. An engine says how
they are called; whoever calls knows a :class:`Peer` alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.core.errors import PacelineError
from paceline.engine.server.messages import Bytes


class PeerError(PacelineError):
    """A call has failed: its method raised this, or the process that it is of is lost."""


class PeerLostError(PeerError):
    """The process is lost."""


class ReferencesLostError(PeerError):
    """What references of :meth:`Peer.put` refer to is lost, with the process that had put it there."""


class PendingResult(Protocol):
    """A call of a method, from a thread that may wait for its result."""

    def result(self) -> Any:
        """Wait for the result.

        Raises:
            PeerError: there is none.
        """
        ...


class Notified(Protocol):
    """Another process that is told something."""

    def tell(self, method: str, *args: Any) -> None:
        """Call a method whose result nobody waits for, also while another one computes."""
        ...


class Peer(ABC):
    """Another process."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result, in an event loop.

        Raises:
            PeerError: there is none.
        """

    @abstractmethod
    def begin(self, method: str, *args: Any) -> PendingResult:
        """Begin a call of a method, in a thread that may wait."""

    @abstractmethod
    def tell(self, method: str, *args: Any) -> None:
        """Call a method whose result nobody waits for, also while another one computes."""

    @abstractmethod
    def put(self, arrays: Sequence[Bytes]) -> list[Any]:
        """Return references of arrays that several peers are to be sent; none where each has to be sent them."""
