"""A stream from each replica to each server of its run, on which a push and its reply travel.

::

    replica   connect .................. where Δ and A are ............ completion, Δ ........................ read A
    server    listen .................. whether it shares memory ..... decide, apply .............. grant, A

A push by a call of Ray costs some milliseconds, whatever its size, and its object store copies each array once more. So
a call hands out the address and a token for the run (:mod:`paceline.engine.server.wire`); then vectors are sent as the
bytes that they are, of each vector the server's slice. On one host not even they are sent: the server maps the memory
in which the replica writes Δ and reads A. Where no stream can be made, a push is a call of the server.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from paceline.comm.shm.rendezvous import SegmentAddress, host_id
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.core.types import Version
from paceline.engine.run_context import RunContext
from paceline.engine.server import wire
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.messages import Bytes, PushCompletion, Reply, ServerGrant, arrays_of
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.wire import StreamAddress
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_slices import FlatSlice
from paceline.replica.flat_state import Allocate

# Bytes up to which an array is sent together with the header before it, so that the receiver wakes once.
JOINED_BYTES = 256 * 1024

_COMPLETION = struct.Struct("<iiqqq?dqqqqqq?")
"""A completion, the version of the A that this stream has brought last (:data:`NONE`: there was none), and whether Δ
follows, with what the replica keeps: they do not after a cancelled attempt."""

_GRANT = struct.Struct("<?qiqqq?")
"""Whether the replica goes on, its grant, and whether A follows: it does not where that stream has brought it."""

# No version of A.
NONE: Version = -1


class PushListener:
    """The server's end.

    Args:
        part: the server's slice of A.
        codec: decodes Δ; None: it is not compressed.
        push: takes a completion, references (none) and the arrays of its Δ, and whether these may be written again once
            the replica has its next grant; returns that with its A.
        allocate: makes the vectors of Δs; None: ordinary memory.
        own_bytes: most bytes of what a replica keeps.
        workers: of each replica.
        pull_ahead: as of :class:`PushBuffers`.
    """

    def __init__(
        self,
        part: FlatSlice,
        codec: DeltaCodec | None,
        push: Callable[..., Awaitable[Reply]],
        allocate: Allocate | None = None,
        *,
        own_bytes: int = 0,
        workers: int = 1,
        pull_ahead: bool = False,
    ) -> None:
        self._part, self._codec, self._push, self._allocate = part, codec, push, allocate
        self._own_bytes, self._workers, self._pull_ahead = own_bytes, workers, pull_ahead
        self._serving: dict[tuple[int, ...], asyncio.Task[None]] = {}
        """By replica and incarnation."""

    @classmethod
    def of(
        cls,
        context: RunContext,
        part: FlatSlice,
        push: Callable[..., Awaitable[Reply]],
        allocate: Allocate,
        own_bytes: int = 0,
    ) -> "PushListener":
        """Return that of a run."""
        strategy, codec = context.job.strategy, DeltaCodec.of(context, part)
        workers, ahead = strategy.mesh.per_replica, strategy.pull_ahead
        return cls(part, codec, push, allocate, own_bytes=own_bytes, workers=workers, pull_ahead=ahead)

    async def serve(self, connection: socket.socket, memory: Any) -> None:
        """Serve one replica, whose Δ and A are in this memory, until it, or the run, ends."""
        with contextlib.ExitStack() as closing:
            shared = None
            if memory is not None:
                with contextlib.suppress(OSError, PacelineError):
                    shared = self._map(SegmentAddress(**memory))
                    closing.callback(shared.close)
            await asyncio.get_running_loop().sock_sendall(connection, bytes([shared is not None]))
            served: tuple[int, int] | None = None
            while True:
                served = await self._serve_push(connection, shared, served)

    def _map(self, address: SegmentAddress) -> PushBuffers:
        return PushBuffers(
            self._part.whole, address, own_bytes=self._own_bytes, workers=self._workers, pull_ahead=self._pull_ahead
        )

    async def _serve_push(
        self, connection: socket.socket, shared: PushBuffers | None, served: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Take the next push and answer it; return whose it was, by replica and incarnation; ``served``: the last's."""
        *fields, has, follows = _COMPLETION.unpack(await wire.received(connection, _COMPLETION.size))
        completion = PushCompletion._make((*fields[:7], Figures._make(fields[7:-1]), fields[-1]))
        if not 0 <= completion.own_bytes <= self._own_bytes:
            raise EOFError("it keeps more than any replica does")
        if (whose := (completion.replica, completion.incarnation)) != served:
            self._supersede(*whose)
        arrays: Sequence[Bytes] = ()
        if follows and shared is not None:
            arrays = self._part.cut_bytes(shared.arrays(completion))
        elif follows:
            arrays = await self._received(connection, completion.own_bytes)
        reply = await self._push(completion, (), *arrays, lent=shared is not None)
        await self._reply(connection, reply, shared, has)
        return whose

    async def _received(self, connection: socket.socket, own_bytes: int) -> list[Bytes]:
        """Return the slice of a Δ, and what the replica keeps."""
        delta = self._part.layout.new(self._allocate)
        arrays = [*arrays_of(delta), *([np.empty(own_bytes, np.uint8)] if own_bytes else [])]
        messages = [] if self._codec is None else self._codec.messages()
        for array in [*messages, *arrays[len(messages) :]]:
            await wire.receive(connection, array.data)
        if self._codec is not None:
            self._codec.decode(messages, delta)
        return arrays

    def _supersede(self, *process: int) -> None:
        """Let this task alone serve a process: one that has made another stream is answered on that."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        before = self._serving.get(process)
        if before is not None and before is not task:
            before.cancel()
        self._serving[process] = task

    async def _reply(self, connection: socket.socket, reply: Reply, shared: PushBuffers | None, has: Version) -> None:
        """Answer a push; of the A that the replica has this stream brings no second copy."""
        loop, (grant, arrays) = asyncio.get_running_loop(), reply
        if grant is None:
            facts: tuple[Any, ...] = (False, 0, *BatchRange(0, 0, 0), 0, False)
        else:
            facts = (True, grant.attempt, *grant.batches, grant.version, grant.version != has)
        header, arrays = _GRANT.pack(*facts), arrays if facts[-1] else ()
        if shared is not None:
            for target, array in zip(self._part.cut_bytes(shared.coming_arrays), arrays, strict=bool(arrays)):
                target[:] = array
            arrays = ()
        if sum(array.nbytes for array in arrays) <= JOINED_BYTES:
            await loop.sock_sendall(connection, b"".join([header, *(array.data for array in arrays)]))
            return
        await loop.sock_sendall(connection, header)
        for array in arrays:
            await loop.sock_sendall(connection, array.data)


class SliceForwarder:
    """The end of a server that sends its slices of Δs on to its standby, which does not share its memory.

    Args:
        connection: to the standby, :func:`connect_forwarder`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._queue: asyncio.Queue[tuple[PushCompletion, Sequence[Bytes]]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self._send_all(connection))

    def send(self, completion: PushCompletion, arrays: Sequence[Bytes]) -> None:
        """Send one; do nothing where the standby is no more, of which the first server is told."""
        if not self._sending.done():
            self._queue.put_nowait((completion, arrays))

    def close(self) -> None:
        """Send nothing any more."""
        self._sending.cancel()

    async def _send_all(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                completion, arrays = await self._queue.get()
                *fields, figures, own_bytes = completion
                await loop.sock_sendall(connection, _COMPLETION.pack(*fields, *figures, own_bytes, NONE, True))
                for array in arrays:
                    await loop.sock_sendall(connection, array.data)
                await wire.received(connection, _GRANT.size)


def connect_forwarder(address: StreamAddress) -> socket.socket:
    """Connect to the standby of a server; raises OSError and EOFError as :class:`PushStream` does."""
    connection = wire.connect(address, {"forward": True})
    wire.read(connection, 1)  # that it shares no memory
    connection.setblocking(False)
    return connection


class PushStream:
    """The replica's end.

    Args:
        address: of the server.
        buffers: of the replica.
        part: the server's slice of A.

    Raises:
        OSError: there is no way to it.
        EOFError: what listens there does not know the token.
    """

    def __init__(self, address: StreamAddress, buffers: PushBuffers, part: FlatSlice) -> None:
        self._buffers, self._part = buffers, part
        self._sent = part.cut_bytes(buffers.coming_arrays)
        self._has = NONE
        """Version of the A in the buffers that came by this stream."""
        memory = asdict(buffers.address) if address.host_id == host_id() else None
        self._socket = wire.connect(address, {"memory": memory})
        try:
            self._shared = bool(wire.read(self._socket, 1)[0])
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def push(self, completion: PushCompletion, messages: Sequence[Bytes] = (), *, cancelled: bool) -> None:
        """Send the end of an attempt, and Δ, with what the replica keeps, unless it was cancelled.

        Args:
            completion: of the attempt.
            messages: its parameters, where they are compressed.
            cancelled: whether it was.
        """
        *fields, figures, own_bytes = completion
        arrays = [] if self._shared or cancelled else self._part.cut_bytes(self._buffers.arrays(completion))
        if arrays and messages:
            arrays = [*messages, *arrays[len(messages) :]]
        header = _COMPLETION.pack(*fields, *figures, own_bytes, self._has, not cancelled)
        wire.send_all(self._socket, [memoryview(header), *(array.data for array in arrays)])

    def receive(self) -> ServerGrant | None:
        """Wait for the next grant, whose A is in the buffers; return None once training has ended for this replica."""
        goes_on, attempt, stream, first, size, version, follows = _GRANT.unpack(wire.read(self._socket, _GRANT.size))
        if not goes_on:
            return None
        for array in self._sent if follows and not self._shared else ():
            wire.read_into(self._socket, array.data)
        self._has = version
        return ServerGrant(attempt, BatchRange(stream, first, size), version)

    def break_off(self) -> None:
        """Have whoever sends or waits, in another thread, be told that it has broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
