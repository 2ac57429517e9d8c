"""Anonymous shared memory, and where the named tensors in it lie.

A segment has no name in any file system: it is a file descriptor that is passed on, and its memory goes with the last
process that holds or maps it, however that process ends. So there is nothing to unlink and nothing to leak. The same
holds for one on disk, whose pages the system may write out and take back whenever memory is short.
"""

import mmap
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from paceline.comm.free import available_bytes
from paceline.comm.kernel import memfd_create
from paceline.core.errors import PacelineError

ALIGNMENT = 64
"""Bytes. One cache line: neighbours in a segment never share one, and every dtype may start there."""


def aligned(offset: int) -> int:
    """The first multiple of 64 at or above ``offset``.

    >>> [aligned(n) for n in (0, 1, 64, 65)]
    [0, 64, 64, 128]
    """
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Segment:
    """Shared memory behind a file descriptor. Pages that nobody has touched cost nothing and read as zero.

    >>> segment = Segment.create("example", 4096)
    >>> segment.tensor(64, (2, 3), torch.float32).fill_(1.0).sum().item()
    6.0
    >>> segment.close()
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        """Map ``fd``, which from now on belongs to the segment; ``create`` and ``attach`` say it more clearly."""
        self._fd, self.size_bytes, self._writable = fd, size_bytes, writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise _no_memory(size_bytes, str(error)) from error

    @classmethod
    def create(cls, name: str, size_bytes: int, *, reserved_bytes: int = 0) -> "Segment":
        """New shared memory.

        Args:
            name: shown in /proc/PID/maps; need not be unique.
            size_bytes: at least 1; address space only, until it is written or reserved.
            reserved_bytes: how many bytes from the start on are reserved at once.

        Raises:
            PacelineError: where the system refuses that size, or has not that much memory to reserve.
        """
        fd = memfd_create(f"paceline:{name}")
        try:
            os.ftruncate(fd, size_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _no_memory(size_bytes, str(error)) from error
        segment = cls(fd, size_bytes)
        try:
            if reserved_bytes:
                segment.reserve(0, reserved_bytes)
        except PacelineError:
            segment.close()
            raise
        return segment

    @classmethod
    def on_disk(cls, size_bytes: int) -> "Segment":
        """New memory that is a file without a name, in ``TMPDIR`` or /var/tmp; there is room for all of it.

        Raises:
            PacelineError: there is not.
        """
        folder = os.environ.get("TMPDIR") or next(filter(os.path.isdir, ("/var/tmp", tempfile.gettempdir())))
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                return cls(os.dup(file.fileno()), size_bytes)
        except OSError as error:
            raise PacelineError(
                f"a file of {size_bytes:,} bytes can't be had in {folder} ({error.strerror}), for a model that is too "
                "large for the memory that is free; set TMPDIR to a folder with more room, or free some memory"
            ) from error

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> "Segment":
        """The segment behind an ``fd`` that was inherited or received; closing the segment closes it."""
        return cls(fd, size_bytes)

    def readable(self) -> "Segment":
        """The same memory again, where a write is a SIGSEGV."""
        return Segment(os.dup(self._fd), self.size_bytes, writable=False)

    @property
    def fd(self) -> int:
        """What to pass to another process."""
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """All its bytes, writable; release it before ``close`` to have the memory go at once."""
        return memoryview(self._mapping())

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous view of the shared bytes from ``offset`` on; it stays good after ``close``."""
        count = prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        with warnings.catch_warnings():
            if not self._writable:  # torch has no tensors that can't be written, and says so
                warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self._mapping(), dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Give these bytes memory now, so that a write can't meet a full memory later (which would kill by SIGBUS).

        Raises:
            PacelineError: where there is not that much; names the bytes wanted.
        """
        available = available_bytes()
        if size_bytes > available:
            raise _no_memory(size_bytes, f"{available:,} bytes are free")
        try:
            os.posix_fallocate(self._fd, offset, size_bytes)
        except OSError as error:
            raise _no_memory(size_bytes, str(error)) from error

    @property
    def pages(self) -> mmap.mmap:
        """All of it; ``flush`` has a file on disk say what is in memory, whose pages can then be taken back."""
        return self._mapping()

    def close(self) -> None:
        """Let go of the memory; idempotent. Tensors and buffers made before keep it mapped as long as they live."""
        # Dropped, not closed: torch.frombuffer holds the mmap object but no export of it, so that mmap.close() would
        # unmap the memory under living tensors.
        if self._map is not None:
            self._map = None
            os.close(self._fd)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise PacelineError("this segment is closed; take tensors from it before close()")
        return self._map


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one named tensor lies."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Without padding."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Arena:
    """The layout of a segment: the same names, shapes and dtypes in the same order give the same offsets everywhere.

    >>> arena = Arena()
    >>> arena.add("weight", (2, 3), torch.float32), arena.add("bias", (3,), torch.float32)
    (0, 64)
    >>> arena.size_bytes
    128
    """

    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    size_bytes: int = ALIGNMENT
    """Of a segment that holds it all; never 0, which can't be mapped."""
    _end: int = field(default=0, repr=False)

    def add(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Place one more tensor, at a multiple of 64 bytes; returns its offset."""
        assert name not in self.slots, f"{name} has a slot already"
        slot = Slot(self._end, tuple(shape), dtype)
        self.slots[name] = slot
        self._end = aligned(slot.offset + slot.size_bytes)
        self.size_bytes = max(self.size_bytes, self._end)
        return slot.offset

    def tensor(self, segment: Segment, name: str) -> Tensor:
        """The view of ``name`` in ``segment``."""
        slot = self.slots[name]
        return segment.tensor(slot.offset, slot.shape, slot.dtype)

    def tensors(self, segment: Segment) -> dict[str, Tensor]:
        """All views, by name."""
        return {name: self.tensor(segment, name) for name in self.slots}


def _no_memory(size_bytes: int, reason: str) -> PacelineError:
    return PacelineError(
        f"{size_bytes:,} bytes of shared memory can't be had ({reason}); "
        "write fewer replicas=, a smaller model or less data, or give this machine or container more memory"
    )
