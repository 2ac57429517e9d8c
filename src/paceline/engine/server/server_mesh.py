"""Connections among all servers of a run, by which they add up numbers that each has of its slice of A.

::

    server            own numbers -> all others | numbers of each slice, as they come | added up, slice by slice
    its standby       the same ............................................................................

Each sends its numbers to all others and adds them up itself, in the order of slices. So all have the same bits, nobody
waits for one that adds up for all, and a sum that is under way outlives any of them whose slice another one has, too.
"""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping

from paceline.core.types import Seconds
from paceline.engine.server import wire
from paceline.engine.server.messages import Member
from paceline.engine.server.peer import Peer
from paceline.engine.server.run_control import ServerLostError
from paceline.engine.server.wire import StreamAddress

_HEAD = struct.Struct("<QI")
"""Number of the sum, and how many numbers follow."""

# Bytes that are read at a time.
_PIECE_BYTES = 1 << 16


async def introduce(mesh: "ServerMesh", peers: Mapping[Member, Peer]) -> None:
    """Connect the first server and others, each of them to all the others, and to its standby.

    Raises:
        ServerLostError: one can't be reached.
        PeerError: one is lost, or can't reach another.
    """
    addresses = dict[Member, StreamAddress]()
    for member, peer in sorted(peers.items()):
        address: StreamAddress | None = await peer.call("ask", "stream")
        if address is None:
            raise _unreached(member, "it can't listen")
        addresses[member] = address
    mesh.connect(addresses)
    for member in addresses:
        later = {other: address for other, address in addresses.items() if other > member}
        standby = None if member.standby else addresses.get(member.other)
        await peers[member].call("ask", "meet", later, standby)


def _unreached(member: Member, reason: str) -> ServerLostError:
    return ServerLostError(
        f"{member.label} can't be reached by another: {reason}; write servers=1, or let the cluster's nodes connect to "
        "each other"
    )


class ServerMesh:
    """One server's ends.

    Args:
        servers: how many slices there are.
        own: this server.
        timeout_s: longest wait for the numbers of a slice.
    """

    def __init__(self, servers: int, own: Member, timeout_s: Seconds) -> None:
        self._servers, self.own, self._timeout_s = servers, own, timeout_s
        self._connections: dict[Member, tuple[socket.socket, bytearray]] = {}
        """With what of the next sums has come by each."""
        self._selector = selectors.DefaultSelector()
        self._sums = 0
        self.why: Callable[[Member], str | None] = lambda _: None
        """Returns why another server has failed, where that is known."""

    def connect(self, others: Mapping[Member, StreamAddress]) -> None:
        """Connect to others.

        Raises:
            ServerLostError: one can't be reached.
        """
        for member, address in others.items():
            try:
                connection = wire.connect(address, {"member": self.own})
                wire.read(connection, 1)  # it has this end
            except (OSError, EOFError) as error:
                raise _unreached(member, str(error)) from error
            self.add(member, connection)

    def add(self, member: Member, connection: socket.socket) -> None:
        """Use a connection, that blocks for its timeout at most, to another server."""
        connection.settimeout(self._timeout_s)
        self._connections[member] = connection, bytearray()
        self._selector.register(connection, selectors.EVENT_READ, member)

    def summed(self, values: list[float]) -> list[float]:
        """Return the sums of these numbers and those of all other slices; all call it for the same sums in turn.

        Raises:
            ServerLostError: nobody who has a slice is left, or answers.
        """
        self._sums += 1
        frame = _HEAD.pack(self._sums, len(values)) + struct.pack(f"<{len(values)}d", *values)
        for member, (connection, _) in [*self._connections.items()]:
            try:
                connection.sendall(frame)
            except OSError as error:
                self._drop(member, error)
        found, deadline = {self.own.number: values}, time.monotonic() + self._timeout_s
        for member in self._connections:
            self._find(member, found)
        while len(found) < self._servers:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = min({*range(self._servers)} - found.keys())
                raise ServerLostError(f"server {missing} has not answered for {self._timeout_s:g} s")
            for key, _ in ready:
                self._read(key.data)
                self._find(key.data, found)
        return [sum(column) for column in zip(*(found[number] for number in range(self._servers)), strict=True)]

    def close(self) -> None:
        """Close all connections."""
        for connection, _ in self._connections.values():
            connection.close()
        self._connections.clear()
        self._selector.close()

    def _read(self, member: Member) -> None:
        """Read what has come."""
        connection, pending = self._connections[member]
        try:
            piece = connection.recv(_PIECE_BYTES)
            if not piece:
                raise EOFError("its connection has ended")
        except (OSError, EOFError) as error:
            self._drop(member, error)
        else:
            pending += piece

    def _find(self, member: Member, found: dict[int, list[float]]) -> None:
        """Take a member's numbers for the present sum, if they have come; those for sums before are needed no more."""
        _, pending = self._connections.get(member, (None, bytearray()))
        while len(pending) >= _HEAD.size:
            number, count = _HEAD.unpack_from(pending)
            end = _HEAD.size + 8 * count
            if number > self._sums or len(pending) < end:
                return
            if number == self._sums:
                found.setdefault(member.number, [*struct.unpack_from(f"<{count}d", pending, _HEAD.size)])
            del pending[:end]

    def _drop(self, member: Member, error: Exception) -> None:
        """Go on without one; raises ServerLostError if nobody else has its slice."""
        connection, _ = self._connections.pop(member)
        self._selector.unregister(connection)
        connection.close()
        if member.number != self.own.number and member.other not in self._connections:
            reason = self.why(member) or error
            raise ServerLostError(f"{member.label} died, and its slice of A with it: {reason}") from error
