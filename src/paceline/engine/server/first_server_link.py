"""The end of another server, or of a standby, of what connects it to the first server of its run."""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from typing import Any, get_type_hints

from paceline.core.errors import PacelineError
from paceline.core.typed_json import of_json
from paceline.core.types import Clock, ReplicaId
from paceline.engine.server import wire
from paceline.engine.server.messages import Bytes
from paceline.engine.server.server_state import EVENTS, ServerState

# Bytes of the longest event as JSON.
LONGEST_EVENT = 1 << 28

# Requests beside the events: compare a Δ with the last update; send all tensors of the slice.
OBSERVE, PACK = "observe", "pack"

STAGED = struct.Struct("<qqqq")
"""Replica, incarnation and attempt of a Δ of which a server has its slice, and how many events and requests it has
taken; or FAILED, 0, the bytes of a reason, 0."""

FAILED = -1

COUNT = struct.Struct("<Q")

# What the first's standby answers once it has an event.
ACKNOWLEDGED = b"+"

# A server has its slice of this attempt of a process of a replica.
Staging = tuple[ReplicaId, int, Clock]


class FrameLog:
    """The newest events and requests as they were sent, numbered from 1."""

    def __init__(self) -> None:
        self.count = 0
        """How many there have been."""
        self._frames: deque[bytes] = deque()

    def add(self, frame: bytes, floor: int) -> None:
        """Keep the next one; forget those up to the number ``floor``, which all others have taken."""
        self._frames.append(frame)
        self.count += 1
        while self._frames and self.count - len(self._frames) < floor:
            self._frames.popleft()

    def after(self, number: int) -> list[bytes]:
        """Return those after this one."""
        lacking = self.count - number
        assert lacking <= len(self._frames), "what somebody lacks is kept"
        return [*self._frames][len(self._frames) - lacking :]


class FirstServerLink:
    """One end.

    Args:
        stands: whether it is that of the first's standby, which has each event before the others.
        take: takes an event or a request, its arguments, and the counts before it; that of the first's standby does so
            in another thread, since it may have to wait there for a server that this one is yet to send the event.
        taken: called after each.
        failed: called once the first server is told that one has failed.
        staged: returns of which Δs the slices are here that were not decided on.
    """

    def __init__(
        self,
        take: Callable[[str, list[Any], tuple[int, int]], None],
        taken: Callable[[], Awaitable[None]],
        failed: Callable[[], None],
        staged: Callable[[], Iterable[Staging]],
        *,
        stands: bool,
    ) -> None:
        self._take, self._taken, self._failed, self._staged, self._stands = take, taken, failed, staged, stands
        self.log = FrameLog()
        """Of those that have come."""
        self._taking: asyncio.Future[None] | None = None
        """Of the first's standby, the event that it takes."""
        self._events: socket.socket | None = None
        self._words: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def serve(self, connection: socket.socket, use: str) -> None:
        """Serve a connection of the first server, until it, or the run, ends."""
        if use == "staged":
            connection.settimeout(None)
            self._words = connection
            for staging in self._staged():
                self.staged(*staging)
            await asyncio.Event().wait()  # it is written to alone
        if self._serving is not None:  # of a first server that is none any more
            self._serving.cancel()
        self._serving, self._events = asyncio.current_task(), connection
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, COUNT.pack(self.log.count))
        while True:
            frame = await wire.received_frame(connection, LONGEST_EVENT)
            event, args, counts, floor = wire.json_of(frame)
            if event != PACK:
                self.log.add(frame, floor)
            try:
                if self._stands:  # what it has acknowledged it takes, whatever becomes of the connection
                    self._taking = loop.run_in_executor(None, self._take, event, args, tuple(counts))
                    with contextlib.suppress(OSError):
                        connection.send(ACKNOWLEDGED)
                    await asyncio.shield(self._taking)
                else:
                    self._take(event, args, tuple(counts))
            except Exception as error:
                self._tell_failure(f"{type(error).__name__}: {error}")
                self._failed()
                raise EOFError from error
            await self._taken()

    def end(self) -> None:
        """Take no other event any more: this server takes over."""
        if self._serving is not None:
            self._serving.cancel()

    async def taken_all(self) -> None:
        """Return once all that has come is taken; raises what went wrong with the last."""
        if self._taking is not None:
            await self._taking

    def staged(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> None:
        """Tell that the slice of a Δ is here."""
        self._tell(STAGED.pack(replica, incarnation, attempt, self.log.count))

    def send_packed(self, packed: Bytes) -> None:
        """Answer a request for all tensors of the slice; called within ``take``."""
        assert self._events is not None, "the first server has sent a request"
        self._events.setblocking(True)
        try:
            wire.send_all(self._events, [memoryview(COUNT.pack(packed.nbytes)), packed.data])
        finally:
            self._events.setblocking(False)

    def _tell_failure(self, reason: str) -> None:
        text = reason.encode()
        self._tell(STAGED.pack(FAILED, 0, len(text), 0) + text)

    def _tell(self, words: bytes) -> None:
        """Tell the first server something, if there is one."""
        if self._words is not None:
            with contextlib.suppress(OSError):  # another takes over, or the run ends
                self._words.sendall(words)


def event_of_json(event: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of an event whose JSON this is, but for its arrays; raises InputError if it is none."""
    return [of_json(hint, arg, f"the event {event}") for hint, arg in zip(_hints(event), args, strict=True)]


@cache
def _hints(event: str) -> list[Any]:
    if event not in EVENTS:
        raise PacelineError(f"the first server has sent {event!r}, which is no event")
    hints = get_type_hints(getattr(ServerState, event))
    return [hint for name, hint in hints.items() if name not in ("arrays", "return")]
