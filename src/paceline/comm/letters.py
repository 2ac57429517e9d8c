"""Objects between processes of one host, through sockets and a piece of memory that is written anew for each.

::

    small    | pickle |                          one message
    large    | - sizes | + | pickle | array | array | ...      memory, whose descriptor goes along where it is new

The next one may only be written when all have collected the last: a question, and then its answers.
"""

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paceline.comm.nursery import MESSAGE_BYTES
from paceline.comm.segments import Segment, aligned
from paceline.comm.shipping import SHARED_FROM_BYTES, parts_of

LEAST_BYTES = 1 << 20
"""Of the memory, which at least doubles when it is too small."""

_LARGE = b"-"


class Outbox:
    """Where one process writes what others are to have."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def post(self, obj: object, links: Sequence[socket.socket]) -> list[bool]:
        """Send an object graph to all who read this box; whether each of them is still there.

        Args:
            obj: what cloudpickle can carry.
            links: of kind SOCK_SEQPACKET; the same each time.

        Raises:
            InputError: a part of it can't be pickled.
        """
        stream, *arrays = parts_of(obj)
        if not arrays and len(stream) <= SHARED_FROM_BYTES:
            return [_sent(link, bytes(stream), []) for link in links]
        parts = [stream, *arrays]
        sizes = [len(part) for part in parts]
        segment, fds = self._roomy(_ends(sizes)[-1])
        with segment.buffer as target:
            for start, part in zip(_ends(sizes), parts, strict=False):
                target[start : start + len(part)] = part
        message = _LARGE + struct.pack(f"<{len(sizes)}Q", *sizes)
        return [_sent(link, message, fds) for link in links]

    def _roomy(self, size_bytes: int) -> tuple[Segment, list[int]]:
        """The memory, and, where it is new, what others map it by."""
        before = self._segment
        if before is not None and before.size_bytes >= size_bytes:
            return before, []
        capacity = max(size_bytes, LEAST_BYTES, 2 * before.size_bytes if before is not None else 0)
        self.close()
        self._segment = made = Segment.create("letters", capacity, reserved_bytes=capacity)
        return made, [made.fd]

    def close(self) -> None:
        """Let go of the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class Inbox:
    """Where what comes through a link is read.

    Args:
        link: its reading end.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._segment: Segment | None = None

    def collect(self) -> Any:
        """Wait for the next object graph; raises EOFError where the other side has gone."""
        message, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        if not message:
            raise EOFError("the other side has gone")
        if fds:
            self.close()
            self._segment = Segment.attach(fds[0], os.fstat(fds[0]).st_size)
        if message[:1] != _LARGE:
            return pickle.loads(message)
        sizes = [size for (size,) in struct.iter_unpack("<Q", message[1:])]
        assert self._segment is not None, "its descriptor came with the first"
        with self._segment.buffer as source:  # copied out of it, since the next one is written there too
            stream, *arrays = (bytearray(source[a : a + n]) for a, n in zip(_ends(sizes), sizes, strict=False))
        return pickle.loads(stream, buffers=arrays)

    def close(self) -> None:
        """Let go of the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where each part starts, and last, where all ends."""
    return list(accumulate(map(aligned, sizes), initial=0))


def _sent(link: socket.socket, message: bytes, fds: list[int]) -> bool:
    try:
        socket.send_fds(link, [message], fds)
    except OSError:
        return False
    return True
