"""Anonymous shared memory, tensors in it, and an allocator that spills to disk.

A worker needs some data whole for a while, as the model before it is partitioned, even without memory for it::

    ordinary memory | ... while there is plenty | then files on disk, mapped: | . . . | . . | . . . . |

The kernel evicts pages of files when memory is short, under a container's limit too, once they have been written out.
It writes them late, and under a limit it may kill the process instead; so filled pages are written out at once. Spilled
data makes a process slower at worst, while ordinary memory would have it killed.

Shared memory has no name in any file system: it is a file descriptor that is passed on, and it is freed with the last
process that holds or maps it, however that process ends. So there is nothing to unlink and nothing to leak. The same
holds for memory on disk, whose pages the system may write out and read back whenever memory is short.
"""

import contextlib
import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from paceline.comm.linux import available_bytes, memfd_create
from paceline.core.errors import PacelineError

# Bytes. One cache line: neighbours in a segment never share one, and every dtype may start there.
ALIGNMENT = 64


def aligned(offset: int) -> int:
    """The first multiple of 64 at or above ``offset``.

    >>> [aligned(n) for n in (0, 1, 64, 65)]
    [0, 64, 64, 128]
    """
    return -(-offset // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """Shared memory behind a file descriptor. Pages that were never written cost nothing and read as zero.

    >>> segment = SharedMemory.create("example", 4096)
    >>> segment.tensor(64, (2, 3), torch.float32).fill_(1.0).sum().item()
    6.0
    >>> segment.close()
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True, private: bool = False) -> None:
        """Map an ``fd`` that was created, inherited or received, and take it over: ``close`` closes it."""
        self.fd, self.size_bytes, self._writable = fd, size_bytes, writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, flags, access)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise _no_memory(size_bytes, error) from error

    @classmethod
    def create(cls, name: str, size_bytes: int, *, reserved_bytes: int = 0) -> "SharedMemory":
        """Create shared memory.

        Args:
            name: shown in /proc/PID/maps; need not be unique.
            size_bytes: at least 1; address space only, until it is written or reserved.
            reserved_bytes: how many bytes from the start on are reserved at once.

        Raises:
            PacelineError: the system refuses that size, or has not that much memory to reserve.
        """
        fd = memfd_create(f"paceline:{name}")
        try:
            os.ftruncate(fd, size_bytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _no_memory(size_bytes, error) from error
        segment = cls(fd, size_bytes)
        try:
            if reserved_bytes:
                segment.reserve(0, reserved_bytes)
        except PacelineError:
            segment.close()
            raise
        return segment

    @classmethod
    def on_disk(cls, size_bytes: int) -> "SharedMemory":
        """Create memory that is a file without a name, in ``TMPDIR`` or /var/tmp, with disk space for all of it.

        Raises:
            PacelineError: there is not enough.
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

    def readable(self) -> "SharedMemory":
        """Map the same memory again, read-only: a write is a SIGSEGV."""
        return SharedMemory(os.dup(self.fd), self.size_bytes, writable=False)

    def private(self) -> "SharedMemory":
        """Map the same memory again, copy-on-write: what is written there no other process sees."""
        return SharedMemory(os.dup(self.fd), self.size_bytes, private=True)

    @property
    def pages(self) -> mmap.mmap:
        """The mapping; its ``flush`` writes out the pages of a file on disk, which can then be evicted."""
        if self._map is None:
            raise PacelineError("this segment is closed; take tensors from it before close()")
        return self._map

    @property
    def buffer(self) -> memoryview:
        """All its bytes, writable; release it before ``close`` to have the memory go at once."""
        return memoryview(self.pages)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous view of the bytes from ``offset`` on; it keeps them mapped after ``close``."""
        count = prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        with warnings.catch_warnings():
            if not self._writable:  # torch has no tensors that can't be written, and says so
                warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self.pages, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Give these bytes memory now, so that a write can't meet a full memory later (which would kill by SIGBUS).

        Raises:
            PacelineError: there is not that much.
        """
        available = available_bytes()
        if size_bytes > available:
            raise _no_memory(size_bytes, f"{available:,} bytes are free")
        try:
            os.posix_fallocate(self.fd, offset, size_bytes)
        except OSError as error:
            raise _no_memory(size_bytes, error) from error

    def close(self) -> None:
        """Unmap the memory; idempotent. Tensors and buffers of it keep it mapped as long as they live."""
        # Dropped, not closed: torch.frombuffer holds the mmap object but no export of it, so that mmap.close() would
        # unmap the memory under living tensors.
        if self._map is not None:
            self._map = None
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Offset, shape and dtype of a tensor in a segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Arena:
    """The layout of a segment: the same names, shapes and dtypes in the same order give the same offsets everywhere.

    >>> arena = Arena()
    >>> arena.add("weight", (2, 3), torch.float32), arena.add("bias", (3,), torch.float32)
    (0, 64)
    >>> arena.size_bytes
    128
    """

    slots: dict[str, TensorSlot] = field(default_factory=dict[str, TensorSlot])
    size_bytes: int = ALIGNMENT
    """Size of a segment with all tensors; never 0, which can't be mapped."""
    _end: int = field(default=0, repr=False)

    def add(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Place one more tensor, at a multiple of 64 bytes; returns its offset."""
        assert name not in self.slots, f"{name} has a slot already"
        offset = self._end
        self.slots[name] = TensorSlot(offset, tuple(shape), dtype)
        self._end = aligned(offset + prod(shape) * dtype.itemsize)
        self.size_bytes = max(self.size_bytes, self._end)
        return offset

    def tensor(self, segment: SharedMemory, name: str) -> Tensor:
        """Return the view of ``name`` in ``segment``."""
        slot = self.slots[name]
        return segment.tensor(slot.offset, slot.shape, slot.dtype)

    def tensors(self, segment: SharedMemory) -> dict[str, Tensor]:
        """Return all views, by name."""
        return {name: self.tensor(segment, name) for name in self.slots}


def _no_memory(size_bytes: int, reason: str | Exception) -> PacelineError:
    if isinstance(reason, OSError) and reason.errno == errno.EFBIG:
        return PacelineError(
            f"{size_bytes:,} bytes of shared memory are more than a file of this process may have; write "
            "ulimit -f unlimited before it is started"
        )
    return PacelineError(
        f"{size_bytes:,} bytes of shared memory can't be had ({reason}); "
        "write fewer replicas=, a smaller model or less data, or give this machine or container more memory"
    )


# Smaller tensors stay in ordinary memory: a file for each would cost more than it saves.
LEAST_BYTES = 1 << 20

# Bytes that are copied before they are written out: pages that are not on disk yet can't be evicted.
PIECE_BYTES = 16 << 20

# Share of the memory that is free at the start which is filled before files are.
SHARE = 1 / 8


class SpillAllocator:
    """Allocates ordinary memory up to a budget, and files on disk beyond it.

    Args:
        budget_bytes: the budget; None: an eighth of what is free, divided among the workers of this host.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes, self._used = budget_bytes, 0
        self._mapped: list[weakref.ref[mmap.mmap]] = []

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a vector, after the one before it has been written out.

        Raises:
            PacelineError: it fits neither in memory nor on disk.
        """
        nbytes = elements * dtype.itemsize
        if not self.spills(nbytes):
            self._used += nbytes
            return torch.empty(elements, dtype=dtype)
        _write_out(self._mapped[-1:])
        with contextlib.closing(SharedMemory.on_disk(nbytes)) as segment:
            self._mapped.append(weakref.ref(segment.pages))
            return segment.tensor(0, (elements,), dtype)

    def settle(self) -> None:
        """Write out all files on disk that are still mapped."""
        self._mapped = [each for each in self._mapped if each() is not None]
        _write_out(self._mapped)

    def spills(self, nbytes: int) -> bool:
        """Return whether so many bytes more would be allocated on disk."""
        if nbytes < LEAST_BYTES:
            return False
        if self._budget_bytes is None:  # what is free is looked up for the first large tensor
            workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self._budget_bytes = int(SHARE * available_bytes() / workers)
        return nbytes > self._budget_bytes - self._used

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy, detached."""
        source, spilled = tensor.detach(), self.spills(tensor.nbytes)
        copy = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
        if not spilled:
            return copy.copy_(source)
        rows = max(1, PIECE_BYTES * len(source) // source.nbytes)
        for target, piece in zip(torch.split(copy, rows), torch.split(source, rows), strict=True):
            target.copy_(piece)
            _write_out(self._mapped[-1:])
        return copy

    def kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, detached, within the budget; beyond it a contiguous copy on disk."""
        if tensor.device.type == "cpu" and self.spills(tensor.nbytes):
            return self.copy(tensor)
        self._used += tensor.nbytes
        return tensor.detach()

    def segment(self, name: str, size_bytes: int, *, reserved_bytes: int = 0) -> SharedMemory:
        """Allocate memory to share with other processes; as :meth:`SharedMemory.create`."""
        if self.spills(size_bytes):
            return SharedMemory.on_disk(size_bytes)
        return SharedMemory.create(name, size_bytes, reserved_bytes=reserved_bytes)


def _write_out(mapped: Iterable[weakref.ref[mmap.mmap]]) -> None:
    for each in mapped:
        pages = each()
        if pages is not None:
            pages.flush()
