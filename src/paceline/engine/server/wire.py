"""Connections of a run: both ends prove to know its token, which the engine hands out; bytes or JSON, no pickles.

::

    connects   ............ nonce, MAC ............ hello, as JSON ....
    listens    nonce ...................... MAC ........................

Who listens does so at the address by which the engine knows its host, and for processes of this host at a Unix socket,
by which a small message costs a third of the processor's time that it costs by TCP.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from paceline.comm.shm.rendezvous import host_id
from paceline.core.errors import PacelineError
from paceline.core.types import Seconds
from paceline.engine.server.run_control import BackgroundTasks

# Time in which a connection is made, or is not.
CONNECT_S: Seconds = 10.0

# Time after which a connection whose other host does not answer is broken: it is off, or its link is.
SILENT_S = 15

# Connections that are being made at a time; more are closed at once.
MOST_OPENING = 256

# Bytes of the longest JSON that says who connects.
LONGEST_HELLO = 4096

_NONCE_BYTES = _MAC_BYTES = 32

_LENGTH = struct.Struct("<I")


class StreamAddress(NamedTuple):
    """Where a server of a run listens."""

    host: str
    port: int
    token: bytes
    """Known to those to whom the engine has told it."""
    host_id: str
    """Equal for processes that can share memory with the server."""
    name: str = ""
    """Of its Unix socket, in Linux's abstract namespace; empty: there is none."""


class Listener:
    """Accepts connections from those who know the token.

    Args:
        host: address of the interface that it listens at.
        serve: serves a connection, which does not block, to whom has said this hello; it is closed afterwards.
        port: that it listens at; 0: any that is free.
        token: None: a new one.
    """

    def __init__(
        self,
        host: str,
        serve: Callable[[socket.socket, Any], Awaitable[None]],
        *,
        port: int = 0,
        token: bytes | None = None,
    ) -> None:
        self._host, self._port, self._serve = host, port, serve
        self._token = token or secrets.token_bytes(_MAC_BYTES)
        self._address: StreamAddress | None = None
        self._opening = 0
        self._tasks = BackgroundTasks()

    def address(self) -> StreamAddress | None:
        """Return where it listens, from now on; None: it can't listen there."""
        if self._address is not None:
            return self._address
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self._port), family=family, backlog=MOST_OPENING)
        except OSError:
            return None
        name = f"paceline-{secrets.token_hex(16)}" if sys.platform == "linux" else ""
        if name:
            local = socket.socket(socket.AF_UNIX)
            local.bind(f"\0{name}")
            local.listen(MOST_OPENING)
            self._tasks.start(self._listen(local))
        self._tasks.start(self._listen(listening))
        host, port = listening.getsockname()[:2]
        self._address = StreamAddress(host, port, self._token, host_id(), name)
        return self._address

    def close(self) -> None:
        """Close it, and all of its connections."""
        self._tasks.cancel()

    async def _listen(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        with listening:
            while True:
                connection, _ = await loop.sock_accept(listening)
                if self._opening < MOST_OPENING:
                    self._tasks.start(self._accept(connection))
                else:
                    connection.close()

    async def _accept(self, connection: socket.socket) -> None:
        wrong = OSError, EOFError, TimeoutError, ValueError, PacelineError
        with connection, contextlib.suppress(*wrong):
            connection.setblocking(False)
            _set_options(connection)
            self._opening += 1
            try:
                hello = await asyncio.wait_for(self._proven(connection), CONNECT_S)
            finally:
                self._opening -= 1
            await self._serve(connection, hello)

    async def _proven(self, connection: socket.socket) -> Any:
        """Have both ends prove that they know the token; return the hello of the other one.

        Raises:
            EOFError: it does not know the token.
        """
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, nonce)
        answer = await received(connection, _NONCE_BYTES + _MAC_BYTES)
        theirs, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._token, b"connects", nonce, theirs)):
            raise EOFError("it does not know the token")
        await loop.sock_sendall(connection, _mac(self._token, b"listens", nonce, theirs))
        return await received_json(connection, LONGEST_HELLO)


def connect(address: StreamAddress, hello: Any) -> socket.socket:
    """Connect to a server; the connection blocks, for :data:`CONNECT_S` at most.

    Raises:
        OSError: there is no way to it.
        EOFError: what listens there does not know the token.
    """
    connection = _connected(address)
    try:
        theirs, nonce = read(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce + _mac(address.token, b"connects", theirs, nonce))
        answer = read(connection, _MAC_BYTES)
        if not hmac.compare_digest(answer, _mac(address.token, b"listens", theirs, nonce)):
            raise EOFError("another process listens at the server's address")
        connection.sendall(json_bytes(hello))
    except BaseException:
        connection.close()
        raise
    return connection


def _connected(address: StreamAddress) -> socket.socket:
    if address.name and address.host_id == host_id():
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(CONNECT_S)
        try:
            local.connect(f"\0{address.name}")
            return local
        except OSError:
            local.close()
    connection = socket.create_connection(address[:2], CONNECT_S)
    _set_options(connection)
    return connection


def _set_options(connection: socket.socket) -> None:
    """Send small messages of TCP at once, and break where the other host is silent."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s, probes = 3, SILENT_S // 3 - 1
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, every_s),
        (socket.TCP_KEEPINTVL, every_s),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON with its length before it."""
    content = json.dumps(value).encode()
    return _LENGTH.pack(len(content)) + content


async def received_frame(connection: socket.socket, longest: int) -> bytes:
    """Return the next JSON with its length before it; raises EOFError if it is longer."""
    head = await received(connection, _LENGTH.size)
    (length,) = _LENGTH.unpack(head)
    if length > longest:
        raise EOFError(f"the other end has sent JSON of {length} bytes")
    return head + await received(connection, length)


def json_of(frame: bytes) -> Any:
    """Return the value that is in a frame."""
    return json.loads(frame[_LENGTH.size :])


async def received_json(connection: socket.socket, longest: int) -> Any:
    """Return the next JSON; raises EOFError if it is longer."""
    return json_of(await received_frame(connection, longest))


async def receive(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a connection that does not block; raises EOFError where the other end has closed."""
    loop = asyncio.get_running_loop()
    while view.nbytes:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise EOFError("the other end has closed the connection")
        view = view[count:]


async def received(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes; raises EOFError as above."""
    buffer = bytearray(size)
    await receive(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a connection that blocks; raises EOFError as above."""
    while view.nbytes:
        count = connection.recv_into(view, flags=socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other end has closed the connection")
        view = view[count:]


def read(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection that blocks; raises EOFError as above."""
    buffer = bytearray(size)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def send_all(connection: socket.socket, parts: list[memoryview]) -> None:
    """Send buffers by a connection that blocks, without joining them."""
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][sent:]


def _mac(token: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token, role + b"".join(nonces), "sha256")
