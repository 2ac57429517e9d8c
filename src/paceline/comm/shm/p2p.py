"""Point-to-point messages: a ring of slots for each ordered pair of ranks, and receives matched to what arrives.

A message is taken out of its ring by the first receive that was posted for its source and tag. A message that no
receive matches stays in its slots, unless a receive waits for one behind it: then it is set aside.

::

    sender     writes a piece into a free slot, counts it, wakes the receiver
    slots      | piece | piece | free | free |           written - read pieces are on their way
    receiver   copies it to its destination, counts it, wakes the sender
"""

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.shm.region import LINE, PIECE_BYTES, PIECES, Region, Steps
from paceline.comm.wakeup import FENCED, fence
from paceline.core.errors import CollectiveError

_PACKED = struct.Struct("<3q")

# All dtypes, aliases among them; their order is the same on every rank, which all run the same torch.
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Envelope(NamedTuple):
    """Description of a message, next to each of its pieces.

    >>> print(Envelope.of(torch.zeros(10), tag=7))
    10 float32 with tag 7
    """

    size_bytes: int
    tag: int
    dtype_code: int

    @classmethod
    def of(cls, x: Tensor, tag: int) -> "Envelope":
        return cls(x.nbytes, tag, _DTYPE_CODES[x.dtype])

    def __str__(self) -> str:
        dtype = _DTYPES[self.dtype_code]
        return f"{self.size_bytes // dtype.itemsize:,} {str(dtype).removeprefix('torch.')} with tag {self.tag}"


class Channel:
    """The ring of one direction between two ranks: the sender counts the pieces it writes, the receiver those it reads.

    Each counter has one writer, so neither needs a lock. The piece is written before its counter, and x86 keeps the
    order of stores; other processors need a fence.
    """

    def __init__(self, region: Region, source: int, destination: int) -> None:
        layout = region.layout
        start = layout.channels + (source * layout.size + destination) * layout.channel_bytes
        self._written, self._read = region.words(start, 1), region.words(start + LINE, 1)
        self._envelopes = [region.bytes(start + LINE * (2 + slot), _PACKED.size) for slot in range(PIECES)]
        first = start + layout.channel_bytes - PIECES * PIECE_BYTES
        self._slots = region.tensor(first, PIECES * PIECE_BYTES, torch.uint8)  # keeps the memory mapped
        self._places = [self._slots.data_ptr() + slot * PIECE_BYTES for slot in range(PIECES)]

    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return self._written[0] - self._read[0] < PIECES

    def has_piece(self) -> bool:
        """Return whether a piece can be read."""
        return self._written[0] > self._read[0]

    def put(self, message: Tensor, start: int, envelope: bytes) -> int:
        """Write the piece of a message from its byte ``start`` on; return where the piece ends."""
        slot = self._written[0] % PIECES
        self._envelopes[slot][:] = envelope
        size_bytes = min(message.numel() - start, PIECE_BYTES)
        ctypes.memmove(self._places[slot], message.data_ptr() + start, size_bytes)  # faster than slicing tensors
        if not FENCED:
            fence()
        self._written[0] += 1
        return start + size_bytes

    def envelope(self) -> Envelope:
        """Return the envelope of the message whose piece is next."""
        return Envelope._make(_PACKED.unpack(self._envelopes[self._read[0] % PIECES]))

    def take(self, message: Tensor, start: int) -> int:
        """Read the next piece into a message from its byte ``start`` on; return where the piece ends."""
        size_bytes = min(message.numel() - start, PIECE_BYTES)
        ctypes.memmove(message.data_ptr() + start, self._places[self._read[0] % PIECES], size_bytes)
        if not FENCED:
            fence()
        self._read[0] += 1
        return start + size_bytes


@dataclass(eq=False, slots=True)
class Receive:
    """A posted receive.

    Args:
        source: rank in the group; None: any.
        envelope: of the message that is expected.
        buffer: receives its bytes.
        received_from: the message's source, once it has been received.
    """

    source: int | None
    envelope: Envelope
    buffer: Tensor
    received_from: int | None = None

    def matches(self, source: int, envelope: Envelope) -> bool:
        return self.source in (None, source) and self.envelope.tag == envelope.tag


@dataclass(eq=False, slots=True)
class _Message:
    """A message of which pieces are still to come, or that was set aside."""

    envelope: Envelope
    buffer: Tensor
    receive: Receive | None
    filled: int = 0


class Messages:
    """The messages that one rank of a group sends and receives."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._outgoing: dict[int, Channel] = {}
        self._channels = [Channel(region, source, region.rank) for source in range(region.size)]
        self._posted: list[Receive] = []
        self._incoming: list[_Message | None] = [None] * region.size
        self._aside: list[deque[_Message]] = [deque() for _ in range(region.size)]

    def send(self, destination: int, envelope: Envelope, message: Tensor) -> Steps:
        """Write a message's bytes into the ring; ends when all are there, read or not."""
        channel = self._outgoing.get(destination)
        if channel is None:
            channel = self._outgoing[destination] = Channel(self._region, self._region.rank, destination)
        packed = _PACKED.pack(*envelope)
        written = -1  # an empty message is a piece too
        while written < message.numel():
            if not channel.has_room():
                yield channel.has_room
            written = channel.put(message, max(written, 0), packed)
            self._region.peers[destination].wakeup.notify()

    def receive(self, receive: Receive) -> Steps:
        """Wait for the receive's message."""
        if self._take_from_aside(receive):
            return
        self._posted.append(receive)
        sources = [receive.source] if receive.source is not None else range(self._region.size)
        ready = self._ready(receive, sources)
        while receive.received_from is None:
            if not ready():
                yield ready
            for source in sources:
                self._take_all(source)

    def _ready(self, receive: Receive, sources: Sequence[int]) -> Callable[[], bool]:
        # Another receive may take this one's message out of the ring, on the way to its own.
        if len(sources) == 1:
            has_piece = self._channels[sources[0]].has_piece
            return lambda: has_piece() or receive.received_from is not None
        channels = [self._channels[source] for source in sources]
        return lambda: any(channel.has_piece() for channel in channels) or receive.received_from is not None

    def _take_all(self, source: int) -> None:
        """Read pieces from a source as long as there is a buffer for them."""
        channel, has_read = self._channels[source], False
        while channel.has_piece():
            message = self._incoming[source] or self._open(source, channel.envelope())
            if message is None:
                break
            message.filled = channel.take(message.buffer, message.filled)
            has_read = True
            complete = message.filled == message.envelope.size_bytes
            self._incoming[source] = None if complete else message
            if complete:
                self._complete(source, message)
        if has_read:
            self._region.peers[source].wakeup.notify()

    def _open(self, source: int, envelope: Envelope) -> _Message | None:
        """Choose the buffer of a message: a matching receive's, or one of its own if it blocks the ring."""
        blocks = False
        for position, receive in enumerate(self._posted):
            if receive.matches(source, envelope):
                self._check(receive, source, envelope)
                del self._posted[position]
                return _Message(envelope, receive.buffer, receive)
            blocks |= receive.source in (None, source)
        return _Message(envelope, torch.empty(envelope.size_bytes, dtype=torch.uint8), None) if blocks else None

    def _complete(self, source: int, message: _Message) -> None:
        if message.receive is not None:
            message.receive.received_from = source
            return
        self._aside[source].append(message)
        for receive in self._posted:  # one may have been posted since its first piece came
            if receive.matches(source, message.envelope):
                self._posted.remove(receive)
                self._take_from_aside(receive)
                return

    def _take_from_aside(self, receive: Receive) -> bool:
        """Return whether the receive's message had been set aside; the receive then has it."""
        for source, messages in enumerate(self._aside):
            for message in messages:
                if receive.matches(source, message.envelope):
                    messages.remove(message)
                    self._check(receive, source, message.envelope)
                    receive.buffer.copy_(message.buffer)
                    receive.received_from = source
                    return True
        return False

    def _check(self, receive: Receive, source: int, envelope: Envelope) -> None:
        """Raise CollectiveError if a message is not of the size and dtype that are expected."""
        if envelope != receive.envelope:
            raise CollectiveError(
                f"{self._region.named([source])} sends {envelope} to {self._region.named([self._region.rank])}, which "
                f"receives {receive.envelope}, in group {self._region.name}; make both the same"
            )
