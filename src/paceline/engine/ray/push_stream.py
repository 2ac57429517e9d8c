"""A TCP stream from each replica to the server of its run, on which a push and its reply travel without Ray.

::

    replica   connect .................. nonce, MAC ............ completion, Δ ........................ read A
    server    listen, as Ray names it .. MAC ................... decide, apply .............. grant, A

A push through Ray costs some milliseconds, whatever its size, and the object store copies each array once more. So
Ray hands out the address and a token for the run, which both ends prove to know before anything else is read; then
vectors are sent as the bytes that they are, and nothing is unpickled. On one host not even they are sent: the server
maps the memory in which the replica writes Δ and reads A. Where no stream can be made, a push is a call of the actor.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from paceline.comm.shm.rendezvous import SegmentAddress, host_id
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.core.types import Seconds
from paceline.engine.ray.messages import Bytes, RayCompletion, RayGrant, Reply, arrays_of
from paceline.engine.ray.push_buffers import PushBuffers
from paceline.engine.ray.run_control import BackgroundTasks
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import Allocate, FlatLayout

# Time in which a stream is made, or is not.
CONNECT_S: Seconds = 10.0

# Streams that are being made at a time; more are closed at once.
MOST_OPENING = 256

# Bytes up to which an array is sent together with the header before it, so that the receiver wakes once.
JOINED_BYTES = 256 * 1024

_NONCE_BYTES = _MAC_BYTES = 32

_LENGTH = struct.Struct("<I")

# Bytes of the longest JSON that is read.
_LONGEST = 4096

_COMPLETION = struct.Struct("<iiqqq?dqqqqq?")
"""A completion, and whether Δ follows, with what the replica keeps: they do not after a cancelled attempt."""

_GRANT = struct.Struct("<?qiqqq")
"""Whether the replica goes on, and its grant; A follows if it does."""


class StreamAddress(NamedTuple):
    """Where the server of a run listens."""

    host: str
    port: int
    token: bytes
    """Known to those to whom Ray has told it."""
    host_id: str
    """Equal for processes that can share memory with the server."""


class StreamListener:
    """The server's end.

    Args:
        host: address of the interface that it listens at.
        layout: of A.
        push: takes a completion, references (none) and the arrays of its Δ, and whether these may be written again once
            the replica has its next grant; returns that with its A.
        allocate: makes the vectors of Δs; None: ordinary memory.
        own_bytes: most bytes of what a replica keeps.
        workers: of each replica.
    """

    def __init__(
        self,
        host: str,
        layout: FlatLayout,
        push: Callable[..., Awaitable[Reply]],
        allocate: Allocate | None = None,
        *,
        own_bytes: int = 0,
        workers: int = 1,
    ) -> None:
        self._host, self._layout, self._push, self._allocate = host, layout, push, allocate
        self._own_bytes, self._workers = own_bytes, workers
        self._token = secrets.token_bytes(_MAC_BYTES)
        self._socket: socket.socket | None = None
        self._opening = 0
        self._serving: dict[tuple[int, ...], asyncio.Task[None]] = {}
        """By replica and incarnation."""
        self._tasks = BackgroundTasks()

    def address(self) -> StreamAddress | None:
        """Return where it listens, from now on; None: it can't listen there."""
        if self._socket is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                self._socket = socket.create_server((self._host, 0), family=family, backlog=MOST_OPENING)
            except OSError:
                return None
            self._socket.setblocking(False)
            self._tasks.start(self._listen(self._socket))
        host, port = self._socket.getsockname()[:2]
        return StreamAddress(host, port, self._token, host_id())

    def close(self) -> None:
        """Close all streams."""
        self._tasks.cancel()

    async def _listen(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                connection, _ = await loop.sock_accept(listening)
                if self._opening < MOST_OPENING:
                    self._tasks.start(self._serve(connection))
                else:
                    connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one replica until it, or the run, ends."""
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError, EOFError, TimeoutError):
            closing.enter_context(connection)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opening += 1
            try:
                shared = await asyncio.wait_for(self._opened(connection), CONNECT_S)
            finally:
                self._opening -= 1
            if shared is not None:
                closing.callback(shared.close)
            while True:
                *fields, follows = _COMPLETION.unpack(await _received(connection, _COMPLETION.size))
                completion = RayCompletion._make((*fields[:7], Figures._make(fields[7:-1]), fields[-1]))
                if not 0 <= completion.own_bytes <= self._own_bytes:
                    raise EOFError("it keeps more than any replica does")
                self._supersede(completion.replica, completion.incarnation)
                arrays: Sequence[Bytes] = ()
                if follows and shared is not None:
                    arrays = shared.arrays(completion)
                elif follows:
                    own = [np.empty(completion.own_bytes, np.uint8)] if completion.own_bytes else []
                    arrays = [*arrays_of(self._layout.new(self._allocate)), *own]
                    for array in arrays:
                        await _receive(connection, array.data)
                reply = await self._push(completion, (), *arrays, lent=shared is not None)
                await self._reply(connection, reply, shared)

    def _supersede(self, *actor: int) -> None:
        """Let this task alone serve an actor: one that has made another stream is answered on that."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        before = self._serving.get(actor)
        if before is not None and before is not task:
            before.cancel()
        self._serving[actor] = task

    async def _opened(self, connection: socket.socket) -> PushBuffers | None:
        """Open a stream; return the replica's memory, if this process can map it.

        Raises:
            EOFError: the other end does not know the token.
        """
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, nonce)
        answer = await _received(connection, _NONCE_BYTES + _MAC_BYTES)
        theirs, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._token, b"replica", nonce, theirs)):
            raise EOFError("it does not know the token")
        await loop.sock_sendall(connection, _mac(self._token, b"server", nonce, theirs))
        (length,) = _LENGTH.unpack(await _received(connection, _LENGTH.size))
        offered = json.loads(await _received(connection, min(length, _LONGEST)))
        shared = None
        if offered is not None:
            with contextlib.suppress(OSError, PacelineError):
                address = SegmentAddress(**offered)
                shared = PushBuffers(self._layout, address, own_bytes=self._own_bytes, workers=self._workers)
        await loop.sock_sendall(connection, bytes([shared is not None]))
        return shared

    async def _reply(self, connection: socket.socket, reply: Reply, shared: PushBuffers | None) -> None:
        loop, (grant, arrays) = asyncio.get_running_loop(), reply
        batches = BatchRange(0, 0, 0) if grant is None else grant.batches
        facts = (False, 0, *batches, 0) if grant is None else (True, grant.attempt, *batches, grant.version)
        header = _GRANT.pack(*facts)
        if shared is not None:
            for target, array in zip(shared.sent_arrays, arrays, strict=grant is not None):
                target[:] = array
            arrays = ()
        if sum(array.nbytes for array in arrays) <= JOINED_BYTES:
            await loop.sock_sendall(connection, b"".join([header, *(array.data for array in arrays)]))
            return
        await loop.sock_sendall(connection, header)
        for array in arrays:
            await loop.sock_sendall(connection, array.data)


class PushStream:
    """The replica's end.

    Args:
        address: of the server.
        buffers: of the replica.

    Raises:
        OSError: there is no way to it.
        EOFError: what listens there does not know the token.
    """

    def __init__(self, address: StreamAddress, buffers: PushBuffers) -> None:
        self._buffers = buffers
        self._socket = connection = socket.create_connection(address[:2], CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, nonce, answer = bytearray(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES), bytearray(_MAC_BYTES)
            self._receive(memoryview(theirs))
            connection.sendall(nonce + _mac(address.token, b"replica", bytes(theirs), nonce))
            self._receive(memoryview(answer))
            if not hmac.compare_digest(answer, _mac(address.token, b"server", bytes(theirs), nonce)):
                raise EOFError("another process listens at the server's address")
            offer = asdict(buffers.address) if address.host_id == host_id() else None
            content, taken = json.dumps(offer).encode(), bytearray(1)
            connection.sendall(_LENGTH.pack(len(content)) + content)
            self._receive(memoryview(taken))
            self._shared = bool(taken[0])
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise

    def push(self, completion: RayCompletion, *, cancelled: bool) -> None:
        """Send the end of an attempt, and Δ, with what the replica keeps, unless it was cancelled."""
        *fields, figures, own_bytes = completion
        arrays = () if self._shared or cancelled else self._buffers.arrays(completion)
        header = _COMPLETION.pack(*fields, *figures, own_bytes, not cancelled)
        parts = [memoryview(header), *(array.data for array in arrays)]
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self) -> RayGrant | None:
        """Wait for the next grant, whose A is in the buffers; return None once training has ended for this replica."""
        header = bytearray(_GRANT.size)
        self._receive(memoryview(header))
        goes_on, attempt, stream, first, size, version = _GRANT.unpack(header)
        if not goes_on:
            return None
        for array in () if self._shared else self._buffers.sent_arrays:
            self._receive(array.data)
        return RayGrant(attempt, BatchRange(stream, first, size), version)

    def break_off(self) -> None:
        """Have whoever sends or waits, in another thread, be told that it has broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _receive(self, view: memoryview) -> None:
        while view.nbytes:
            received = self._socket.recv_into(view, flags=socket.MSG_WAITALL)
            if not received:
                raise EOFError("the server has closed the stream")
            view = view[received:]


async def _receive(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer; raises EOFError where the other end has closed."""
    loop = asyncio.get_running_loop()
    while view.nbytes:
        received = await loop.sock_recv_into(connection, view)
        if not received:
            raise EOFError("the replica has closed the stream")
        view = view[received:]


async def _received(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    await _receive(connection, memoryview(buffer))
    return bytes(buffer)


def _mac(token: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token, role + b"".join(nonces), "sha256")
