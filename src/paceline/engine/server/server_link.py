"""The calls of one replica to the servers of its run, or to the standby that has taken over from the only one.

A push goes by a stream (:mod:`paceline.engine.server.push_stream`) as long as one can be made, everything else by
calls. Either is made again of the standby where the server is lost; a server takes no Δ twice. Of several servers each
is sent its slice of Δ and answers with its slice of A, all of one version; the first is asked everything else.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.core.types import Seconds
from paceline.engine.server import messages
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.peer import Peer, PeerLostError
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.push_stream import PushStream
from paceline.engine.server.wire import StreamAddress
from paceline.replica.flat_slices import FlatSlice

# Streams to one server that a replica tries to make before it pushes by calls alone.
MOST_STREAMS = 3

# Smaller arrays travel within a call: Ray's own limit.
INLINE_BYTES = 100 * 1024


class ServerLink:
    """The way of one replica to one server.

    Args:
        server: whom to call.
        patience_s: longest wait for a standby to take over, where there is one; 0: there is none.
        alone: whether it is the only server, which sends its standby what it is sent.
    """

    def __init__(self, server: Peer | None, patience_s: Seconds, *, alone: bool = True) -> None:
        self.server, self._patience_s, self._alone = server, patience_s, alone
        self._changed = threading.Condition()
        self._stream: PushStream | None = None
        self._tries = MOST_STREAMS
        self._broken_off = False

    @property
    def reached(self) -> Peer:
        """Return the server."""
        assert self.server is not None, "no server was named"
        return self.server

    @property
    def has_standby(self) -> bool:
        """Return whether a standby may take over."""
        return self._patience_s > 0

    @property
    def shares_references(self) -> bool:
        """Return whether references of large arrays go to the server, which shares them with its standby."""
        return self.has_standby and self._alone

    def turn_to(self, server: Peer) -> None:
        """Call another server from now on; called by another thread."""
        with self._changed:
            self.server, self._tries = server, MOST_STREAMS
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.break_off()

    def stream(self, buffers: PushBuffers, part: FlatSlice) -> PushStream | None:
        """Return the stream to the server, which has this slice; a new one where it has broken; None: there is none."""
        if self._broken_off:
            raise PeerLostError("the run has failed")
        while self._stream is None and self._tries:
            self._tries -= 1
            server = self.server
            address: StreamAddress | None = self.call("stream")
            if address is None:
                self._tries = 0
                break
            with contextlib.suppress(OSError, EOFError):
                stream = PushStream(address, buffers, part)
                with self._changed:
                    self._stream = stream
                    if self.server is not server:  # the address may be that of the server before
                        stream.break_off()
        return self._stream

    def break_off(self) -> None:
        """Have whoever waits for the server, in another thread, be told that it is lost."""
        with self._changed:
            self._broken_off = True
            if self._stream is not None:
                self._stream.break_off()

    def drop_stream(self) -> None:
        """Close the stream, which has broken, or is used no more."""
        with self._changed:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def begin(self, method: str, *args: Any) -> "PendingCall":
        """Begin a call."""
        return PendingCall(self, method, args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server's run and return the result."""
        return self.begin(method, *args).result()

    def after(self, server: Peer, error: Exception) -> Peer:
        """Return the server that has taken over from one that was lost; raise the error if none has in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.server is not server, self._patience_s):
                raise error
            return self.reached


class PendingCall:
    """A call of the server, which is made again where a standby has taken over meanwhile."""

    def __init__(self, link: ServerLink, method: str, args: tuple[Any, ...]) -> None:
        self._link, self._method, self._args = link, method, args
        self._server = link.reached
        self._reply = self._server.begin("ask", method, *args)

    def result(self) -> Any:
        """Wait for the result."""
        while True:
            try:
                return self._reply.result()
            except PeerLostError as error:
                if not self._link.has_standby:
                    raise
                self._server = self._link.after(self._server, error)
                self._reply = self._server.begin("ask", self._method, *self._args)


class PendingPush:
    """A push, which is made again where its stream breaks, or a standby has taken over meanwhile.

    Args:
        link: to the server.
        part: the server's slice of A.
        completion: the end of an attempt.
        buffers: hold Δ, which is not to be written before there is a grant.
        encoded: its parameters, where they are compressed.
        cancelled: whether there is no Δ.
    """

    def __init__(
        self,
        link: ServerLink,
        part: FlatSlice,
        completion: messages.PushCompletion,
        buffers: PushBuffers,
        encoded: Sequence[messages.Bytes],
        *,
        cancelled: bool,
    ) -> None:
        self._link, self._part, self._buffers, self._cancelled = link, part, buffers, cancelled
        self._encoded = encoded
        # The first server alone has what replicas keep.
        self._completion = completion if part.number == 0 else completion._replace(own_bytes=0)
        self._pending: PushStream | PendingCall = self._push()

    def result(self) -> messages.Reply:
        """Wait for the next grant and the server's slice of its A; of none where that is in the buffers."""
        while isinstance(pending := self._pending, PushStream):
            try:
                grant = pending.receive()
                return grant, ()
            except (OSError, EOFError):
                self._link.drop_stream()
                self._pending = self._push()
        reply: messages.Reply = pending.result()
        return reply

    def _push(self) -> PushStream | PendingCall:
        """Push; return that by which the grant will come."""
        arrays = [] if self._cancelled else self._part.cut_bytes(self._buffers.arrays(self._completion))
        if self._link.shares_references and any(array.nbytes > INLINE_BYTES for array in arrays):
            refs = self._link.reached.put(arrays)  # once, for the server and its standby
            return self._link.begin("push", self._completion, refs, *(refs or arrays))
        while (stream := self._link.stream(self._buffers, self._part)) is not None:
            try:
                stream.push(self._completion, self._encoded, cancelled=self._cancelled)
                return stream
            except OSError:
                self._link.drop_stream()
        return self._link.begin("push", self._completion, [], *arrays)


class ServerLinks:
    """The ways of one replica to all servers of its run.

    Args:
        run: number of the run.
        servers: the first one first.
        patience_s: as of :class:`ServerLink`.
    """

    def __init__(self, run: int, servers: Sequence[Peer], patience_s: Seconds) -> None:
        self.run = run
        self.each = [ServerLink(server, patience_s, alone=len(servers) == 1) for server in servers]
        self.first = self.each[0]
        """To the server that decides."""
        self.count = len(servers)
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None

    def push_all(
        self,
        slices: Sequence[FlatSlice],
        codecs: Sequence[DeltaCodec | None],
        completion: messages.PushCompletion,
        buffers: PushBuffers,
        *,
        cancelled: bool,
    ) -> list[PendingPush]:
        """Push to each server its slice of Δ, to all at the same time; ``codecs`` compress what has to travel."""

        def push(link: ServerLink, part: FlatSlice, codec: DeltaCodec | None) -> PendingPush:
            encoded = list[messages.Bytes]()
            if codec is not None and not cancelled:
                encoded = codec.encode(part.of(buffers.delta).parameters)
            return PendingPush(link, part, completion, buffers, encoded, cancelled=cancelled)

        return [*self._map(push, self.each, slices, codecs)]

    def begin_all(self, method: str, *args: Any) -> list[PendingCall]:
        """Begin a call of each server."""
        return [link.begin(method, *args) for link in self.each]

    def results(self, pending: Sequence[PendingPush | PendingCall]) -> list[messages.Reply]:
        """Wait for the reply of each server, of all at the same time."""
        return [*self._map(lambda each: each.result(), pending)]

    def break_off(self) -> None:
        """Have whoever waits for any of them be told that it is lost; called in another thread."""
        for link in self.each:
            link.break_off()

    def close(self) -> None:
        """Close the streams."""
        for link in self.each:
            link.drop_stream()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _map(self, function: Callable[..., Any], *each: Sequence[Any]) -> Iterable[Any]:
        return map(function, *each) if self._threads is None else self._threads.map(function, *each)
