"""Point-to-point messages: a ring of slots for each ordered pair of ranks, and receives matched to what arrives.

What comes to a rank, and which receive each message belongs to.

A message is taken out by the first receive that was posted for its source and tag. One that nobody waits for stays in
its slots, unless a receive waits for what lies behind it: then it is set aside.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.shm.region import LINE, PIECE_BYTES, PIECES, Region
from paceline.comm.shm.staging import Steps, dtype_code, dtype_of
from paceline.comm.wakeup import FENCED, fence
from paceline.core.errors import CollectiveError

_PACKED = struct.Struct("<3q")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a message says of itself: beside its first piece.

    >>> envelope = Envelope(40, 7, torch.float32)
    >>> Envelope.unpacked(envelope.packed()) == envelope, str(envelope)
    (True, '10 float32 with tag 7')
    """

    size_bytes: int
    tag: int
    dtype: torch.dtype

    def packed(self) -> bytes:
        """As it lies in a slot."""
        return _PACKED.pack(self.size_bytes, self.tag, dtype_code(self.dtype))

    @classmethod
    def unpacked(cls, said: bytes) -> "Envelope":
        """What a slot says."""
        size_bytes, tag, code = _PACKED.unpack(said)
        return cls(size_bytes, tag, dtype_of(code))

    def __str__(self) -> str:
        elements = self.size_bytes // self.dtype.itemsize
        return f"{elements:,} {str(self.dtype).removeprefix('torch.')} with tag {self.tag}"


class Channel:
    """One direction between two ranks."""

    def __init__(self, room: Region, source: int, destination: int) -> None:
        start = room.layout.channel(source, destination)
        self._written, self._read = room.words(start, 1), room.words(start + LINE, 1)
        self._envelopes = [room.bytes(start + LINE * (2 + slot), _PACKED.size) for slot in range(PIECES)]
        first = start + room.layout.channel_bytes - PIECES * PIECE_BYTES
        self._slots = room.tensor(first, PIECES * PIECE_BYTES, torch.uint8)  # keeps the memory mapped
        self._places = [self._slots.data_ptr() + slot * PIECE_BYTES for slot in range(PIECES)]

    def has_room(self) -> bool:
        """Whether a slot is free."""
        return self._written[0] - self._read[0] < PIECES

    def has_news(self) -> bool:
        """Whether a piece is on its way."""
        return self._written[0] > self._read[0]

    def put(self, message: Tensor, start: int, envelope: bytes) -> int:
        """Write the piece of a message from its byte ``start`` on; returns where it ends."""
        slot = self._written[0] % PIECES
        self._envelopes[slot][:] = envelope
        size_bytes = min(message.numel() - start, PIECE_BYTES)
        ctypes.memmove(self._places[slot], message.data_ptr() + start, size_bytes)  # quicker than slicing tensors
        if not FENCED:
            fence()
        self._written[0] += 1
        return start + size_bytes

    def envelope(self) -> bytes:
        """Of the message whose piece is next."""
        return bytes(self._envelopes[self._read[0] % PIECES])

    def take(self, message: Tensor, start: int) -> int:
        """Read the next piece into a message from its byte ``start`` on; returns where it ends."""
        size_bytes = min(message.numel() - start, PIECE_BYTES)
        ctypes.memmove(message.data_ptr() + start, self._places[self._read[0] % PIECES], size_bytes)
        if not FENCED:
            fence()
        self._read[0] += 1
        return start + size_bytes


class SendQueue:
    """What goes from one rank of a group."""

    def __init__(self, room: Region) -> None:
        self._room = room
        self._channels: dict[int, Channel] = {}

    def send(self, destination: int, tag: int, message: Tensor, dtype: torch.dtype) -> Steps:
        """Write a message's bytes into the channel; ends when all are there, read or not."""
        channel = self._channels.get(destination)
        if channel is None:
            channel = self._channels[destination] = Channel(self._room, self._room.rank, destination)
        envelope = _PACKED.pack(message.numel(), tag, dtype_code(dtype))
        written = -1  # an empty message is a piece too
        while written < message.numel():
            if not channel.has_room():
                yield channel.has_room
            written = channel.put(message, max(written, 0), envelope)
            self._room.wake_one(destination)


class Receive:
    """A posted receive.

    Args:
        source: rank in the group; None: any.
        tag: of the message.
        into: its bytes.
        dtype: of its elements.
    """

    def __init__(self, source: int | None, tag: int, into: Tensor, dtype: torch.dtype) -> None:
        self.source, self.tag, self.into = source, tag, into
        self.expected = Envelope(into.numel(), tag, dtype)
        self.came_from: int | None = None
        """The source, once the message is here."""

    def wants(self, source: int, envelope: Envelope) -> bool:
        """Whether a message is for it."""
        return self.source in (None, source) and self.tag == envelope.tag


@dataclass(slots=True)
class _Message:
    """One of which pieces are still to come, or that was set aside."""

    envelope: Envelope
    into: Tensor
    receive: Receive | None
    filled: int = 0


class RecvMatching:
    """What comes to one rank of a group."""

    def __init__(self, room: Region) -> None:
        self._room = room
        self._channels = [Channel(room, source, room.rank) for source in range(room.size)]
        self._posted: list[Receive] = []
        self._incoming: list[_Message | None] = [None] * room.size
        self._aside: list[deque[_Message]] = [deque() for _ in range(room.size)]

    def receive(self, receive: Receive) -> Steps:
        """Wait for its message."""
        if self._take_from_aside(receive):
            return
        self._posted.append(receive)
        sources = [receive.source] if receive.source is not None else range(self._room.size)
        ready = self._ready(receive, sources)
        while receive.came_from is None:
            if not ready():
                yield ready
            for source in sources:
                self._take_all(source)

    def _ready(self, receive: Receive, sources: Sequence[int]) -> Callable[[], bool]:
        if len(sources) == 1:
            has_news = self._channels[sources[0]].has_news
            return lambda: has_news() or receive.came_from is not None
        channels = [self._channels[source] for source in sources]
        return lambda: any(channel.has_news() for channel in channels) or receive.came_from is not None

    def _take_all(self, source: int) -> None:
        """What has come from a source, as long as it belongs somewhere."""
        channel, took = self._channels[source], False
        while channel.has_news():
            message = self._incoming[source] or self._open(source, channel.envelope())
            if message is None:
                break
            message.filled = channel.take(message.into, message.filled)
            took = True
            complete = message.filled == message.envelope.size_bytes
            self._incoming[source] = None if complete else message
            if complete:
                self._completed(source, message)
        if took:
            self._room.wake_one(source)

    def _open(self, source: int, said: bytes) -> _Message | None:
        """Where a message goes; None: nowhere yet."""
        envelope = Envelope.unpacked(said)
        waited_for = False
        for place, receive in enumerate(self._posted):
            if receive.wants(source, envelope):
                self._check(receive, source, envelope)
                del self._posted[place]
                return _Message(envelope, receive.into, receive)
            waited_for |= receive.source in (None, source)
        if waited_for:
            return _Message(envelope, torch.empty(envelope.size_bytes, dtype=torch.uint8), None)
        return None

    def _completed(self, source: int, message: _Message) -> None:
        if message.receive is not None:
            message.receive.came_from = source
            return
        self._aside[source].append(message)
        for receive in self._posted:  # one may have been posted since its first piece came
            if receive.wants(source, message.envelope):
                self._posted.remove(receive)
                self._take_from_aside(receive)
                return

    def _take_from_aside(self, receive: Receive) -> bool:
        """Whether its message had come before, and it has it now."""
        for source, messages in enumerate(self._aside):
            for message in messages:
                if receive.wants(source, message.envelope):
                    messages.remove(message)
                    self._check(receive, source, message.envelope)
                    receive.into.copy_(message.into)
                    receive.came_from = source
                    return True
        return False

    def _check(self, receive: Receive, source: int, envelope: Envelope) -> None:
        """Raise CollectiveError where a message is not of the size and dtype that are expected."""
        if envelope != receive.expected:
            raise CollectiveError(
                f"{self._room.named([source])} sends {envelope} to {self._room.named([self._room.rank])}, which "
                f"receives {receive.expected}, in group {self._room.name}; make both the same"
            )
