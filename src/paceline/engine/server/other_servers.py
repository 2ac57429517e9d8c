"""The first server's connections to the others of its run, each of which has a slice of A, and to all their standbys.

::

    replica      Δ, slice by slice .......................................................... A, slice by slice
    first        take its slice ......... all have theirs: event | decide, apply ............ answer
    others       take theirs, tell it ......................... | decide, apply ............. answer
    standbys     are sent it by their server, tell it ......... | decide, apply

All of them have the same state of the run (:mod:`paceline.engine.server.server_state`) but for the tensors, and take
the same events in the same order; so all decide alike, and each version of A exists as a whole. The first sends an
event before it takes it itself: what an update needs of all slices, the norm of the gradient, they add up meanwhile.

Of two servers that have one slice, either may end at any time. The first's standby has each event before any other
server: so it can take over with all that anybody knows, and send the others what they lack.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.typed_json import to_json
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.replica_pace import SILENT_STEPS
from paceline.engine.server import wire
from paceline.engine.server.first_server_link import ACKNOWLEDGED, COUNT, FAILED, PACK, STAGED, FrameLog
from paceline.engine.server.messages import FIRSTS_STANDBY, Bytes, Member, PushCompletion, state_of
from paceline.engine.server.peer import Peer, PeerError
from paceline.engine.server.push_stream import SliceForwarder, connect_forwarder
from paceline.engine.server.run_control import BackgroundTasks, ServerLostError
from paceline.engine.server.wire import StreamAddress
from paceline.replica.flat_slices import FlatSlice, joined
from paceline.replica.flat_state import FlatState

_PIECE_BYTES = 1 << 16


@dataclass
class _Link:
    """The first server's end of the connections to another."""

    peer: Peer
    events: socket.socket
    words: socket.socket
    """On which it tells which Δs it has its slice of, or why it has failed."""
    staged: dict[ReplicaId, tuple[int, Clock]] = field(default_factory=dict)
    """The newest Δ of each replica that it has its slice of."""
    taken: int = 0
    """How many events and requests it has taken."""
    failure: str | None = None
    """Why it says that it has failed."""
    _pending: bytearray = field(default_factory=bytearray)
    """The beginning of a message that has not come whole."""

    def read(self) -> None:
        """Take in what it has told, as far as that has come.

        Raises:
            OSError: its connection is broken, or closed.
            EOFError: it has closed it.
        """
        while True:
            try:
                piece = self.words.recv(_PIECE_BYTES)
            except BlockingIOError:
                return
            if not piece:
                raise EOFError("the other end has closed the connection")
            self._pending += piece
            self._take()

    def _take(self) -> None:
        pending = self._pending
        while len(pending) >= STAGED.size:
            replica, incarnation, attempt, taken = STAGED.unpack_from(pending)
            end = STAGED.size
            if replica != FAILED:
                self.staged[replica], self.taken = (incarnation, attempt), taken
            elif len(pending) < (end := end + attempt):  # which is the length of the reason
                return
            else:
                self.failure = f"it failed: {pending[STAGED.size : end].decode(errors='replace')}"
            del pending[:end]


class OtherServers:
    """The first server's ends; without others, everything here is done at once.

    Args:
        peers: the others, and the standbys.
        timeout_s: longest wait for one of them.
        suspect_after_s: time after which one whose slice another has, too, is lost where it does not answer, at least.
        log: the newest events and requests of the first server before this one; None: the run begins.
    """

    def __init__(
        self,
        peers: Mapping[Member, Peer],
        timeout_s: Seconds,
        suspect_after_s: Seconds,
        log: FrameLog | None = None,
    ) -> None:
        self._peers, self._timeout_s, self._suspect_after_s = peers, timeout_s, suspect_after_s
        self._log = log or FrameLog()
        self._sent = self._log.count
        """How many events and requests there have been."""
        self.servers = servers_of(peers)
        self.lost: Callable[[ServerLostError], None] = lambda _: None
        """Called when nobody has a slice any more."""
        self._links: dict[Member, _Link] = {}
        """To those that live, the first's standby first."""
        self.changed: Callable[[], None] = lambda: None
        """Called when one of them has ended."""
        self.ended: dict[Member, str] = {}
        """Why those are no more that have ended."""
        self._forwarder: SliceForwarder | None = None
        """To the first's standby."""
        self._broken = False
        """Whether nobody has one of the slices."""
        self._longest_s: Seconds = 0.0
        """Longest time in which the first's standby has acknowledged an event."""
        self._changed = asyncio.Condition()
        self._tasks = BackgroundTasks()

    async def connect(self) -> None:
        """Connect to all of them, and send each what it lacks.

        Raises:
            ServerLostError: nobody who has a slice can be reached.
        """
        results = await asyncio.gather(*(self._connected(member, peer) for member, peer in self._peers.items()))
        found = dict(zip(self._peers, results, strict=True))
        for member in sorted(found, key=lambda member: member != FIRSTS_STANDBY):
            if not isinstance(connections := found[member], str):
                self._links[member] = connections
                self._tasks.start(self._listen(member, connections))
        for member, reason in found.items():
            if isinstance(reason, str):
                self._end(member, reason)

    async def _connected(self, member: Member, peer: Peer) -> _Link | str:
        """Return the connections to one of them, which has all events then, or why there are none."""
        try:
            address: StreamAddress | None = await peer.call("ask", "stream")
            if address is None:
                raise OSError("it can't listen")
            # In threads: one may wait for another, in a sum, until that has all events.
            events = await asyncio.to_thread(wire.connect, address, {"first": "events"})
            (taken,) = COUNT.unpack(await asyncio.to_thread(wire.read, events, COUNT.size))
            events.settimeout(self._timeout_s)
            for frame in self._log.after(taken):
                events.sendall(frame)
            words = await asyncio.to_thread(wire.connect, address, {"first": "staged"})
            if member == FIRSTS_STANDBY:
                self._forwarder = SliceForwarder(await asyncio.to_thread(connect_forwarder, address))
            words.setblocking(False)
        except (OSError, EOFError, PeerError) as error:
            hint = "write servers=1, or let the cluster's nodes connect to each other"
            return f"it can't be reached by the first: {error}; {hint}"
        return _Link(peer, events, words, taken=taken)

    def why(self, member: Member) -> str | None:
        """Return why a server says that it has failed, or why it is no more; None: nothing is known."""
        link = self._links.get(member)
        if link is None:
            return self.ended.get(member)
        with contextlib.suppress(OSError, EOFError):  # what has come may not have been read yet
            link.read()
        return link.failure

    def send(self, event: str, args: Sequence[Any], counts: tuple[int, int]) -> None:
        """Send an event, or a request, that this server takes next itself.

        Args:
            event: name of a method of the state.
            args: its arguments, but for arrays.
            counts: updates and Δs before it, which all servers must have counted alike.
        """
        if not self._peers:
            return
        floor = min((link.taken for member, link in self._links.items() if member != FIRSTS_STANDBY), default=0)
        frame = wire.json_bytes([event, to_json(tuple(args)), counts, floor])
        self._sent += 1
        for member, link in [*self._links.items()]:
            with self._ending(member):
                link.events.sendall(frame)
                if member == FIRSTS_STANDBY:
                    self._wait_for_standby(link)

    def _wait_for_standby(self, link: _Link) -> None:
        """Wait until the first's standby has an event."""
        began = time.monotonic()
        link.events.settimeout(self._bound)
        wire.read(link.events, len(ACKNOWLEDGED))
        self._longest_s = max(self._longest_s, time.monotonic() - began)

    @property
    def _bound(self) -> Seconds:
        """Longest wait for one of two servers with a slice."""
        return min(self._timeout_s, max(self._suspect_after_s, SILENT_STEPS * self._longest_s))

    def packed(self, counts: tuple[int, int]) -> list[Bytes]:
        """Return what all other servers have of A, its optimizer and the Δs that wait, as bytes."""
        frame = wire.json_bytes([PACK, [], counts, 0])
        return [self._packed(number, frame) for number in range(1, self.servers)]

    def _with_slice(self, number: int) -> list[tuple[Member, _Link]]:
        """Return those that have a slice."""
        return [(member, link) for member, link in self._links.items() if member.number == number]

    def _packed(self, number: int, frame: bytes) -> Bytes:
        for member, link in self._with_slice(number):
            with self._ending(member):
                link.events.settimeout(self._bound if member.other in self._links else self._timeout_s)
                link.events.sendall(frame)
                (size,) = COUNT.unpack(wire.read(link.events, COUNT.size))
                found = np.empty(size, np.uint8)
                wire.read_into(link.events, found.data)
                return found
        raise ServerLostError(f"server {number} died, and its slice of A with it")

    async def staged(self, completion: PushCompletion, arrays: Sequence[Bytes]) -> None:
        """Wait until each server has its slice of a Δ, of which these are the first's, or the replica is replaced."""
        replica, newest = completion.replica, (completion.incarnation, completion.attempt)
        if self._forwarder is not None:
            self._forwarder.send(completion, arrays)

        def lacking() -> list[Member]:
            links = {} if self._broken else self._links
            return [member for member, link in links.items() if link.staged.get(replica, (0, 0)) < newest]

        while lacking():
            try:
                async with self._changed:
                    changed = self._changed.wait_for(lambda: not lacking())
                    await asyncio.wait_for(changed, self._suspect_after_s)
            except TimeoutError:
                await asyncio.gather(*(self._look_after(member) for member in lacking()))

    async def _look_after(self, member: Member) -> None:
        """Lose a server that does not answer, if another has its slice."""
        link = self._links.get(member)
        if link is None or not (member.number == 0 or member.other in self._links):
            return
        try:
            await asyncio.wait_for(link.peer.call("alive"), self._suspect_after_s)
        except TimeoutError:
            await self._lose(member, f"it has not answered for {self._suspect_after_s:.1f} s")
        except PeerError as error:
            await self._lose(member, str(error))

    async def replaced(self, replica: ReplicaId, incarnation: int) -> None:
        """Wait for no Δ of earlier processes of a replica."""
        for link in self._links.values():
            link.staged[replica] = max(link.staged.get(replica, (0, 0)), (incarnation, 0))
        async with self._changed:
            self._changed.notify_all()

    async def joined(self, method: str, state: FlatState, slices: Sequence[FlatSlice]) -> FlatState:
        """Return all of an A.

        Args:
            method: of the other servers, which returns their slices of it.
            state: the slice of this server.
            slices: of all.
        """
        if self.servers == 1:
            return state
        arrays = await self._ask(method, self._sent)
        others = (state_of(part.layout, own) for part, own in zip(slices[1:], arrays, strict=True))
        return joined(slices, [state, *others])

    async def optimizer_bytes(self) -> int:
        """Return the size of the optimizer's state that they have."""
        return sum(await self._ask("optimizer_bytes"))

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of one server of each slice, and return the results."""
        return await asyncio.gather(*(self._ask_one(number, method, args) for number in range(1, self.servers)))

    async def _ask_one(self, number: int, method: str, args: Sequence[Any]) -> Any:
        reason = "it is lost"
        for _, link in self._with_slice(number):
            try:
                return await link.peer.call("ask", method, *args)
            except PeerError as error:
                reason = str(error)
        raise ServerLostError(f"server {number} died, and its slice of A with it: {reason}")

    def close(self) -> None:
        """Close the connections."""
        self._tasks.cancel()
        for link in self._links.values():
            link.events.close()
        if self._forwarder is not None:
            self._forwarder.close()

    async def _listen(self, member: Member, link: _Link) -> None:
        """Note of which Δs a server has its slice, until it fails or ends."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        with link.words as words:
            loop.add_reader(words, come.set)
            try:
                while link.failure is None:
                    await come.wait()
                    come.clear()
                    link.read()
                    async with self._changed:
                        self._changed.notify_all()
                reason = link.failure
            except (OSError, EOFError) as error:
                reason = link.failure or str(error)
            finally:
                loop.remove_reader(words)
        await self._lose(member, reason)

    async def _lose(self, member: Member, reason: str) -> None:
        """Go on without a server, or tell that nobody has its slice; nobody waits for what it has staged."""
        with contextlib.suppress(ServerLostError):
            self._end(member, reason)
        async with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _ending(self, member: Member) -> Any:
        """Context manager: what goes wrong with a connection means that the server behind it is lost."""
        try:
            yield
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError) and error.errno is None  # not the kernel's, which has lost the host
            within_s = self._links[member].events.gettimeout()
            reason = f"it has not answered the first for {within_s:.1f} s" if late else str(error)
            self._end(member, self.why(member) or reason)

    def _end(self, member: Member, reason: str) -> None:
        """Go on without a server.

        Raises:
            ServerLostError: nobody else has its slice.
        """
        link = self._links.pop(member, None)
        if link is not None:
            link.events.close()
        if member == FIRSTS_STANDBY and self._forwarder is not None:
            self._forwarder.close()
        if member in self.ended:
            return
        self.ended[member] = reason
        self.changed()
        if member.number and member.other not in self._links:
            self._broken = True
            error = ServerLostError(f"{member.label} died, and its slice of A with it: {reason}")
            self.lost(error)
            raise error


def servers_of(peers: Iterable[Member]) -> int:
    """Return how many slices there are, that of the first server included."""
    return 1 + max((member.number for member in peers), default=0)
