"""A ring of slots for each ordered pair of ranks, through which messages go piece by piece.

::

    sender     writes a piece into a free slot, counts it, rings
    slots      | piece | piece | free | free |           written - read pieces are on their way
    receiver   copies it to where it belongs, counts it, rings
"""

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.alarm import FENCED, fence
from paceline.comm.shm.calls import dtype_code, dtype_of
from paceline.comm.shm.layout import LINE, PIECE_BYTES, PIECES
from paceline.comm.shm.room import Room
from paceline.comm.shm.rounds import Steps

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

    def __init__(self, room: Room, source: int, destination: int) -> None:
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


class Outbox:
    """What goes from one rank of a group."""

    def __init__(self, room: Room) -> None:
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
