"""Records spans at next to no cost.

A worker packs each span into a buffer of its own and writes the buffer to a file descriptor, usually of a memfd, when
it is full; any process that has the same file reads them, also after the worker was killed::

    record -> |span|span|span|    |  -- full, or close -->  sink |span|span|span|span|span|sp   <- read_packed
                                                                                           torn by a kill: dropped
"""

import os
import struct
from typing import TypeAlias, final

from paceline.core.types import Nanoseconds
from paceline.trace.spans import ACTIONS, Action, Span

_LAYOUT = struct.Struct("<iiiBiqqqq")
_CODES: dict[Action, int] = {action: code for code, action in enumerate(ACTIONS)}
# Up to 512 spans are lost if a worker is killed; fewer would mean more system calls.
_CAPACITY = 512 * _LAYOUT.size


@final
class Recorder:
    """Records the spans of one worker.

    Args:
        replica: of the worker, -1 for owners and the coordinator.
        stage: of the worker.
        shard: of the worker.
        sink: file descriptor to write to, this recorder's alone; the caller opens and closes it.
    """

    def __init__(self, replica: int, stage: int, shard: int, sink: int) -> None:
        self._worker, self._sink = (replica, stage, shard), sink
        self._buffer = bytearray(_CAPACITY)
        self._used = 0
        self.waited_ns: Nanoseconds = 0
        """Time of the waits so far."""

    def record(
        self,
        action: Action,
        step: int,
        start_ns: Nanoseconds,
        end_ns: Nanoseconds,
        micro_batch: int = 0,
        bytes: int = 0,
    ) -> None:
        """Record one span; both times are readings of ``time.monotonic_ns()``, which all processes of a host share."""
        _LAYOUT.pack_into(
            self._buffer, self._used, *self._worker, _CODES[action], micro_batch, step, start_ns, end_ns, bytes
        )
        self._used += _LAYOUT.size
        if self._used == _CAPACITY:
            self.close()

    def wait(self, step: int, start_ns: Nanoseconds, end_ns: Nanoseconds, micro_batch: int = 0) -> None:
        """Record a wait, and count its time."""
        self.waited_ns += end_ns - start_ns
        self.record("wait", step, start_ns, end_ns, micro_batch)

    def close(self) -> None:
        """Write the buffer. The descriptor stays open, and recording may go on."""
        # A write to a memfd may be partial, as any write.
        rest = memoryview(self._buffer)[: self._used]
        while rest:
            rest = rest[os.write(self._sink, rest) :]
        self._used = 0


def drop_partial_span(sink: int) -> None:
    """Let what is recorded next begin after the last whole span, where a recorder has died while it wrote one."""
    os.ftruncate(sink, os.fstat(sink).st_size // _LAYOUT.size * _LAYOUT.size)
    os.lseek(sink, 0, os.SEEK_END)


@final
class NullRecorder:
    """Records no spans, but counts the time of waits: used while no trace is requested."""

    def __init__(self) -> None:
        self.waited_ns: Nanoseconds = 0
        """Time of the waits so far."""

    def record(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def wait(self, step: int, start_ns: Nanoseconds, end_ns: Nanoseconds, micro_batch: int = 0) -> None:
        """Count the time of a wait."""
        del step, micro_batch
        self.waited_ns += end_ns - start_ns

    def close(self) -> None:
        """Do nothing."""


# Either; callers need not distinguish them.
AnyRecorder: TypeAlias = Recorder | NullRecorder


def read_packed(fd: int) -> list[Span]:
    """Return the spans that a :class:`Recorder` has written to ``fd``, in order; its position stays.

    A last span that is not whole, because its writer was killed, is left out.
    """
    pieces: list[bytes] = []
    offset = 0
    while piece := os.pread(fd, 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    packed = b"".join(pieces)
    whole = memoryview(packed)[: len(packed) - len(packed) % _LAYOUT.size]
    return [
        Span(replica, stage, shard, ACTIONS[code], step, micro_batch, start_ns, end_ns, moved)
        for replica, stage, shard, code, micro_batch, step, start_ns, end_ns, moved in _LAYOUT.iter_unpack(whole)
    ]
