"""Calls of methods by a connection, where no other system makes them: one process hosts an object, others call it.

::

    caller    connect, prove (wire.py) .... method, arguments ....................... result
    host      accept, prove ............... run it, beside those of other callers ... or why there is none
              tell: a method of the caller, whose result nobody waits for

A message is pickled, its large arrays apart, as they are in memory; it is unpickled from those alone who have proven
to know the token of the host. Between processes of which neither has started the other, nor a launcher both, it is JSON
(:data:`JSON`), of which nothing is executed.
"""

import asyncio
import contextlib
import inspect
import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, final

import numpy as np

from paceline.core.errors import PacelineError
from paceline.engine.server import wire
from paceline.engine.server.messages import Bytes, pack, unpack
from paceline.engine.server.peer import Peer, PeerError, PeerLostError
from paceline.engine.server.run_control import BackgroundTasks
from paceline.engine.server.wire import StreamAddress

_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")

# Parts of the longest message: more come from no caller.
_MOST_PARTS = 1 << 20

# Name in JSON of an array, which follows as a part of its own.
_ARRAY = "\0array"


class Codec(NamedTuple):
    """How messages become parts, and parts a message."""

    pack: Callable[[Any], Sequence[Bytes]]
    unpack: Callable[[Sequence[Bytes]], Any]


def _as_json(message: Any) -> list[Bytes]:
    arrays = list[Bytes]()

    def apart(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} is no message")
        arrays.append(value)
        return {_ARRAY: len(arrays)}

    text = json.dumps(message, default=apart).encode()
    return [np.frombuffer(text, np.uint8), *arrays]


def _of_json(parts: Sequence[Bytes]) -> Any:
    return json.loads(bytes(parts[0]), object_hook=lambda found: parts[found[_ARRAY]] if _ARRAY in found else found)


PICKLE = Codec(pack, unpack)
JSON = Codec(_as_json, _of_json)
"""Numbers, texts, lists, mappings and arrays of bytes; named tuples arrive as lists."""


@final
class SocketPeer(Peer):
    """The host at the other end of a connection that this process makes.

    Args:
        address: of the host.
        hello: says who calls.
        told: takes the method and the arguments of what the host tells this process, in a thread of its own.
        codec: of messages, the host's.

    Raises:
        OSError: there is no way to it.
        EOFError: what listens there does not know the token.
    """

    def __init__(
        self, address: StreamAddress, hello: Any, told: Callable[..., None] | None = None, codec: Codec = PICKLE
    ) -> None:
        self._socket, self._told, self._codec = wire.connect(address, hello), told, codec
        self._socket.settimeout(None)
        self._sending, self._numbers = threading.Lock(), itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lost = ""
        """Why no call is answered any more."""
        threading.Thread(target=self._receive, name="calls", daemon=True).start()

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self.begin(method, *args))

    def begin(self, method: str, *args: Any) -> Future[Any]:
        future, number = Future[Any](), next(self._numbers)
        with self._sending:
            self._pending[number] = future
            try:
                if self._lost:
                    raise OSError(self._lost)
                wire.send_all(self._socket, _frame(self._codec.pack((number, method, args))))
            except OSError as error:
                if self._pending.pop(number, None) is not None:
                    future.set_exception(PeerLostError(str(error)))
        return future

    def tell(self, method: str, *args: Any) -> None:
        self.begin(method, *args)

    def put(self, arrays: Sequence[Bytes]) -> list[Any]:
        del arrays
        return []

    def close(self) -> None:
        """Close the connection; whoever waits is told that the host is lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """Take what the host sends, until the connection ends."""
        try:
            with self._socket:
                while True:
                    (count,) = _COUNT.unpack(wire.read(self._socket, _COUNT.size))
                    parts = [self._read_part() for _ in range(_checked(count))]
                    number, failure, value = self._codec.unpack(parts)
                    if number == 0:
                        if self._told is not None:
                            self._told(*value)
                    elif (future := self._pending.pop(number, None)) is not None:
                        if failure is None:
                            future.set_result(value)
                        else:
                            future.set_exception(PeerError(failure))
        except Exception as error:  # the connection has ended, or something came that can't be read
            with self._sending:
                self._lost = str(error) or type(error).__name__
            for number in [*self._pending]:
                if (future := self._pending.pop(number, None)) is not None:
                    future.set_exception(PeerLostError(self._lost))

    def _read_part(self) -> Bytes:
        (size,) = _SIZE.unpack(wire.read(self._socket, _SIZE.size))
        part = np.empty(size, np.uint8)
        wire.read_into(self._socket, part.data)
        return part


class Caller:
    """One who calls, at the host: answers calls, and may be told something.

    Args:
        connection: that does not block.
        host: whose methods are called.
        codec: of messages.
    """

    def __init__(self, connection: socket.socket, host: object, codec: Codec = PICKLE) -> None:
        self._connection, self._host, self._codec = connection, host, codec
        self._sending, self._tasks = asyncio.Lock(), BackgroundTasks()

    async def serve(self) -> None:
        """Answer calls, each as soon as it has a result.

        Raises:
            OSError, EOFError: the connection has ended.
        """
        try:
            while True:
                (count,) = _COUNT.unpack(await wire.received(self._connection, _COUNT.size))
                parts = [await self._received_part() for _ in range(_checked(count))]
                number, method, args = self._codec.unpack(parts)
                self._tasks.start(self._answer(number, method, args))
        finally:
            self._tasks.cancel()

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the caller; called in the event loop."""
        self._tasks.start(self._send((0, None, (method, *args))))

    async def _answer(self, number: int, method: str, args: Sequence[Any]) -> None:
        failure: str | None = None
        result: Any = None
        try:
            if method.startswith("_"):
                raise PacelineError(f"{method} is no call")
            result = getattr(self._host, method)(*args)
            if inspect.isawaitable(result):
                result = await result
        except PacelineError as error:
            failure, result = str(error), None
        except Exception as error:
            failure, result = f"{type(error).__name__}: {error}", None
        await self._send((number, failure, result))

    async def _send(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # whoever reads sees that it has ended
            async with self._sending:
                for part in _frame(self._codec.pack(message)):
                    await loop.sock_sendall(self._connection, part)

    async def _received_part(self) -> Bytes:
        (size,) = _SIZE.unpack(await wire.received(self._connection, _SIZE.size))
        part = np.empty(size, np.uint8)
        await wire.receive(self._connection, part.data)
        return part


def _frame(parts: Sequence[Bytes]) -> list[memoryview]:
    """Return a message as what is sent: the number of parts, then the size of each and the part."""
    frame = [memoryview(_COUNT.pack(len(parts)))]
    for part in parts:
        frame += [memoryview(_SIZE.pack(part.nbytes)), part.data]
    return frame


def _checked(count: int) -> int:
    if not 0 < count < _MOST_PARTS:
        raise EOFError(f"the other end has sent a message of {count} parts")
    return count
