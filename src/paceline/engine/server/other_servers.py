"""The connections between the first server of a run, which decides, and the others, each of which has a slice of A.

::

    replica      Δ, slice by slice .......................................................... A, slice by slice
    first        take its slice ......... all have theirs: event | decide, apply ............ answer
    others       take theirs, tell it ......................... | decide, apply ............. answer

All of them have the same state of the run (:mod:`paceline.engine.server.server_state`) but for the tensors, and take
the same events in the same order; so all decide alike, and each version of A exists as a whole. The first sends an
event before it takes it itself: what an update needs of all slices, the norm of the gradient, they sum up meanwhile.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.typed_json import of_json, to_json
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.server import wire
from paceline.engine.server.messages import Bytes, state_of
from paceline.engine.server.peer import Peer
from paceline.engine.server.run_control import BackgroundTasks, ServerLostError
from paceline.engine.server.server_state import EVENTS, ServerState
from paceline.engine.server.wire import StreamAddress
from paceline.replica.flat_slices import FlatSlice, joined
from paceline.replica.flat_state import FlatState

# Bytes of the longest event as JSON.
LONGEST_EVENT = 1 << 28

# Requests beside the events: compare a Δ with the last update; send all tensors of the slice.
OBSERVE, PACK = "observe", "pack"

_STAGED = struct.Struct("<qqq")
"""Replica, incarnation and attempt of a Δ of which a server has its slice; or _FAILED, 0, the bytes of a reason."""

_FAILED = -1

_SIZE = struct.Struct("<Q")


class OtherServers:
    """The first server's ends; without others, everything here is done at once.

    Args:
        others: the other servers.
        timeout_s: longest wait for one of them.
    """

    def __init__(self, others: Sequence[Peer], timeout_s: Seconds) -> None:
        self._others, self._timeout_s = others, timeout_s
        self.lost: Callable[[ServerLostError], None] = lambda _: None
        """Called when one of them is no more."""
        self._events: list[socket.socket] = []
        self._staged: list[dict[ReplicaId, tuple[int, Clock]]] = []
        """For each server, the newest Δ of each replica that it has its slice of."""
        self._broken = False
        """Whether one of them is no more."""
        self._changed = asyncio.Condition()
        self._tasks = BackgroundTasks()
        self._sent = 0
        """How many events and requests were sent."""

    async def connect(self) -> None:
        """Connect to all of them.

        Raises:
            ServerLostError: one can't be reached.
        """
        for number, other in enumerate(self._others, 1):
            address: StreamAddress | None = await other.call("ask", "stream")
            try:
                if address is None:
                    raise OSError("it can't listen")
                events, words = wire.connect(address, {"first": "events"}), wire.connect(address, {"first": "staged"})
            except (OSError, EOFError) as error:
                raise ServerLostError(
                    f"server {number} can't be reached by the first: {error}; write servers=1, or let the cluster's "
                    "nodes connect to each other"
                ) from error
            events.settimeout(self._timeout_s)
            words.setblocking(False)
            self._events.append(events)
            self._staged.append({})
            self._tasks.start(self._listen(number, words))

    def send(self, event: str, args: Sequence[Any], counts: tuple[int, int]) -> None:
        """Send an event, or a request, that this server takes next itself.

        Args:
            event: name of a method of the state.
            args: its arguments, but for arrays.
            counts: updates and Δs before it, which all servers must have counted alike.
        """
        if not self._events:
            return
        frame = wire.json_bytes([event, to_json(tuple(args)), counts])
        self._sent += 1
        for number, connection in enumerate(self._events, 1):
            with _lost_with(number, self._timeout_s):
                connection.sendall(frame)

    def summed(self, values: list[float]) -> list[float]:
        """Return the sums of these numbers and those of all other servers, which are told them."""
        numbers = struct.Struct(f"<{len(values)}d")
        total = list(values)
        for number, connection in enumerate(self._events, 1):
            with _lost_with(number, self._timeout_s):
                theirs = numbers.unpack(wire.read(connection, numbers.size))
            total = [mine + other for mine, other in zip(total, theirs, strict=True)]
        for number, connection in enumerate(self._events, 1):
            with _lost_with(number, self._timeout_s):
                connection.sendall(numbers.pack(*total))
        return total

    def packed(self, counts: tuple[int, int]) -> list[Bytes]:
        """Return what all other servers have, as bytes."""
        self.send(PACK, (), counts)
        found = list[Bytes]()
        for number, connection in enumerate(self._events, 1):
            with _lost_with(number, self._timeout_s):
                (size,) = _SIZE.unpack(wire.read(connection, _SIZE.size))
                found.append(np.empty(size, np.uint8))
                wire.read_into(connection, found[-1].data)
        return found

    async def staged(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> None:
        """Wait until each server has its slice of a Δ, or the replica is another process."""
        newest = incarnation, attempt

        def there() -> bool:
            return self._broken or all(staged.get(replica, (0, 0)) >= newest for staged in self._staged)

        if not there():
            async with self._changed:
                await self._changed.wait_for(there)

    async def replaced(self, replica: ReplicaId, incarnation: int) -> None:
        """Wait for no Δ of earlier processes of a replica."""
        for staged in self._staged:
            staged[replica] = max(staged.get(replica, (0, 0)), (incarnation, 0))
        async with self._changed:
            self._changed.notify_all()

    async def joined(self, method: str, state: FlatState, slices: Sequence[FlatSlice]) -> FlatState:
        """Return all of an A.

        Args:
            method: of the other servers, which returns their slices of it.
            state: the slice of this server.
            slices: of all.
        """
        if not self._others:
            return state
        arrays = await self._ask(method, self._sent)
        others = (state_of(part.layout, own) for part, own in zip(slices[1:], arrays, strict=True))
        return joined(slices, [state, *others])

    async def optimizer_bytes(self) -> int:
        """Return the size of the optimizer's state that they have."""
        return sum(await self._ask("optimizer_bytes"))

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all of them and return the results."""
        calls = [other.call("ask", method, *args) for other in self._others]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for number, result in enumerate(results, 1):
            if isinstance(result, BaseException):
                raise ServerLostError(f"server {number} died, and its slice of A with it: {result}") from result
        return results

    def close(self) -> None:
        """Close the connections."""
        self._tasks.cancel()
        for connection in self._events:
            connection.close()

    async def _listen(self, number: int, words: socket.socket) -> None:
        """Note of which Δs a server has its slice."""
        with words:
            try:
                while True:
                    replica, incarnation, attempt = _STAGED.unpack(await wire.received(words, _STAGED.size))
                    if replica == _FAILED:
                        reason = (await wire.received(words, attempt)).decode()
                        await self._lose(f"server {number} failed: {reason}")
                        return
                    self._staged[number - 1][replica] = incarnation, attempt
                    async with self._changed:
                        self._changed.notify_all()
            except (OSError, EOFError) as error:
                await self._lose(f"server {number} died, and its slice of A with it: {error}")

    async def _lose(self, reason: str) -> None:
        """Tell that a server is no more; nobody waits for what it has staged."""
        self._broken = True
        self.lost(ServerLostError(reason))
        async with self._changed:
            self._changed.notify_all()


class FirstServerLink:
    """Another server's end.

    Args:
        timeout_s: longest wait for the first server, once an update is under way.
        take: takes an event or a request, its arguments, and the counts before it.
    """

    def __init__(self, timeout_s: Seconds, take: Callable[[str, list[Any], tuple[int, int]], None]) -> None:
        self._timeout_s, self._take = timeout_s, take
        self._events: socket.socket | None = None
        self._words: socket.socket | None = None

    async def serve(self, connection: socket.socket, use: str) -> None:
        """Serve a connection of the first server, until it, or the run, ends."""
        if use == "staged":
            connection.settimeout(self._timeout_s)
            self._words = connection
            await asyncio.Event().wait()  # it is written to alone
        self._events = connection
        while True:
            event, args, counts = await wire.received_json(connection, LONGEST_EVENT)
            try:
                self._take(event, args, tuple(counts))
            except Exception as error:
                self._tell_failure(f"{type(error).__name__}: {error}")
                raise EOFError from error

    def staged(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> None:
        """Tell that the slice of a Δ is here."""
        if self._words is not None:
            self._words.sendall(_STAGED.pack(replica, incarnation, attempt))

    def _tell_failure(self, reason: str) -> None:
        if self._words is not None:
            text = reason.encode()
            with contextlib.suppress(OSError):
                self._words.sendall(_STAGED.pack(_FAILED, 0, len(text)) + text)

    def summed(self, values: list[float]) -> list[float]:
        """Return the sums of these numbers and those of all other servers; called within ``take``."""
        numbers = struct.Struct(f"<{len(values)}d")
        with self._blocking() as connection:
            connection.sendall(numbers.pack(*values))
            return [*numbers.unpack(wire.read(connection, numbers.size))]

    def send_packed(self, packed: Bytes) -> None:
        """Answer a request for all tensors of the slice; called within ``take``."""
        with self._blocking() as connection:
            wire.send_all(connection, [memoryview(_SIZE.pack(packed.nbytes)), packed.data])

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[socket.socket]:
        assert self._events is not None, "the first server has sent an event"
        self._events.settimeout(self._timeout_s)
        try:
            yield self._events
        finally:
            self._events.setblocking(False)


def event_of_json(event: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of an event whose JSON this is, but for its arrays; raises InputError if it is none."""
    return [of_json(hint, arg, f"the event {event}") for hint, arg in zip(_hints(event), args, strict=True)]


@cache
def _hints(event: str) -> list[Any]:
    if event not in EVENTS:
        raise PacelineError(f"the first server has sent {event!r}, which is no event")
    hints = get_type_hints(getattr(ServerState, event))
    return [hint for name, hint in hints.items() if name not in ("arrays", "return")]


@contextlib.contextmanager
def _lost_with(number: int, timeout_s: Seconds) -> Iterator[None]:
    """Context manager: what goes wrong with a connection means that the server behind it is lost."""
    try:
        yield
    except (OSError, EOFError) as error:
        if isinstance(error, TimeoutError) and error.errno is None:  # not the kernel's, which has lost the other host
            raise ServerLostError(f"server {number} has not answered the first for {timeout_s:g} s") from error
        raise ServerLostError(f"server {number} died, and its slice of A with it: {error}") from error
