"""Objects between processes of one host: pickled once (pickle protocol 5), their arrays out of band in shared memory.

cloudpickle takes what pickle can't: lambdas, closures, functions and classes of ``__main__`` and of notebook cells.
Their code keeps the name of its file, which tracebacks show with its lines; of a cell, the lines go with it.
Tensor storages and contiguous numpy arrays of 64 KiB and more are left out of the pickle and stored after it. So an
object is a list of parts, :func:`parts_of` and :func:`object_of`; in shared memory they are::

    | count, sizes | pickle | array | array | ...      each part at a multiple of 64 bytes

- :func:`share` and :func:`unpack`: an object in memory of its own, which is passed on as a descriptor. Receivers map it
  copy-on-write, so 25 receivers of 100 MB cost 100 MB once, and one that writes into its tensors changes no other's::

    share(program) -> SharedObject --fd--> receiver: unpack(SharedObject(fd)) -> program

- :class:`ObjectSender` and :class:`ObjectReceiver`: a channel over sockets, whose memory is written anew each time. The
  sender may only write the next object when all receivers have collected the last, as in request and answer::

    small    one message: the pickle
    large    one message: "-", with the memory's descriptor if the memory is new; the parts are in the memory
"""

import contextlib
import io
import linecache
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from types import CodeType
from typing import Any

import cloudpickle
import torch
from torch.storage import TypedStorage, UntypedStorage

from paceline.comm.fork_server import MESSAGE_BYTES
from paceline.comm.shared_memory import PIECE_BYTES, SharedMemory, SpillAllocator, aligned
from paceline.core.errors import InputError

# Smaller arrays stay in the pickle itself: copying one costs less than mapping its pages.
SHARED_FROM_BYTES = 64 * 1024

_INT = 8

_MADV_POPULATE_READ = 22  # not among the names of mmap


@dataclass(frozen=True, slots=True)
class SharedObject:
    """An object in shared memory: one file descriptor. The memory is freed when no process has it open or mapped."""

    fd: int

    def close(self) -> None:
        """Close the descriptor; receivers that have their own, and objects that were unpacked, are not affected."""
        os.close(self.fd)


def share(obj: object, spill: SpillAllocator | None = None) -> SharedObject:
    """Put an object graph into shared memory, each distinct tensor storage and large array in it once.

    Args:
        obj: to share.
        spill: allocates on disk if memory is short.

    Raises:
        InputError: a part of it can't be pickled.
        PacelineError: there is not enough memory.
    """
    parts = parts_of(obj)
    size_bytes = _offsets(parts)[-1]
    new = SharedMemory.create if spill is None else spill.segment
    segment = new("shared-object", size_bytes, reserved_bytes=size_bytes)
    try:
        _write(segment, parts)
        return SharedObject(os.dup(segment.fd))
    finally:
        segment.close()


def parts_of(obj: object, known: Mapping[str, object] | None = None) -> list[memoryview]:
    """Return the pickle of an object graph, then its large arrays: each distinct one once, and none copied.

    Args:
        obj: the root of the graph.
        known: objects that the other process has as well, by a name that stands for them.

    Raises:
        InputError: a part of it can't be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream) if known is None else _NamingPickler(stream, known)
    try:
        pickler.dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{type(obj).__name__} can't be sent to another process: {error}; "
            "make such parts inside the functions that use them, not outside"
        ) from error
    return [stream.getbuffer(), *pickler.buffers]


def object_of(parts: Sequence[Any], known: Mapping[str, object] | None = None) -> Any:
    """Rebuild an object graph of the parts, or of any buffers that hold them; its large arrays are views of these."""
    if known is None:
        return pickle.loads(parts[0], buffers=parts[1:])
    return _NamingUnpickler(io.BytesIO(parts[0]), known, parts[1:]).load()


def unpack(shared: SharedObject, *, at_once: bool = True) -> Any:
    """Rebuild the object graph; its large arrays are views of the shared memory, copied page by page on write.

    Read-only numpy arrays come back read-only. What two tensors shared, they share again.

    Args:
        shared: from :func:`share`.
        at_once: map all of its pages now, rather than each when it is looked at.
    """
    # ACCESS_COPY: a receiver may normalise its data set in place, which must not change that of others.
    pages = mmap.mmap(shared.fd, 0, access=mmap.ACCESS_COPY)
    # All pages are there; mapped one by one as samples are drawn, they would cost a page fault each in every process.
    if at_once:
        with contextlib.suppress(OSError):  # before Linux 5.14
            pages.madvise(_MADV_POPULATE_READ)
    return object_of(_read(memoryview(pages)))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves large buffers out; takes tensor storages as buffers and each of them once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_inside)
        self.buffers: list[memoryview] = []
        self._storages: dict[tuple[int, int], UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is CodeType:
            return _code, (*self.dispatch_table[CodeType](obj), *_file_of(obj))
        if kind is TypedStorage and obj._untyped_storage.device.type == "cpu":  # .untyped() would warn
            return _typed_storage, (self._same(obj._untyped_storage), obj.dtype)
        if kind is UntypedStorage and obj.device.type == "cpu":
            same = self._same(obj)
            content: Any = torch.empty(0, dtype=torch.uint8).set_(same).numpy()
            return _storage, (pickle.PickleBuffer(content) if same is obj else same,)
        return super().reducer_override(obj)

    def _same(self, storage: UntypedStorage) -> UntypedStorage:
        # Every tensor makes a new Python object for its storage; pickle knows objects by identity. The size belongs to
        # the key: from_numpy gives views of one array storages of different sizes at one address.
        return self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)

    def _keep_inside(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SHARED_FROM_BYTES:
            return True
        self.buffers.append(raw)
        return False


class _NamingPickler(_Pickler):
    """Writes names for objects that the other process has as well."""

    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self._names = {id(obj): name for name, obj in known.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _NamingUnpickler(pickle.Unpickler):
    """Puts that process's own objects in their places."""

    def __init__(self, file: io.BytesIO, known: Mapping[str, object], buffers: Sequence[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known

    def persistent_load(self, pid: str) -> Any:
        return self._known[pid]


def _file_of(code: CodeType) -> tuple[str, list[str]]:
    """Return the file of some code, and its lines where they are in this process alone, as those of a notebook are."""
    name = code.co_filename
    return (os.path.abspath(name), []) if os.path.exists(name) else (name, linecache.getlines(name))


def _code(kind: type[CodeType], args: tuple[Any, ...], file: str, lines: list[str]) -> CodeType:
    """Rebuild code as of its file, whose name cloudpickle 3.1 leaves out."""
    if lines:
        linecache.cache.setdefault(file, (sum(map(len, lines)), None, lines, file))
    return kind(*args).replace(co_filename=file)


def _offsets(parts: Sequence[Sized]) -> list[int]:
    """Return where each part starts, after the count and the sizes, and where the last one ends."""
    return list(accumulate((aligned(len(part)) for part in parts), initial=aligned(_INT * (len(parts) + 1))))


def _write(segment: SharedMemory, parts: Sequence[memoryview]) -> None:
    """Write the parts in pieces, which memory on disk can then evict."""
    header = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    unwritten = 0
    with segment.buffer as target:
        target[: len(header)] = header
        for offset, part in zip(_offsets(parts), parts, strict=False):
            for start in range(0, len(part), PIECE_BYTES):
                piece = part[start : start + PIECE_BYTES]
                target[offset + start : offset + start + len(piece)] = piece
                unwritten += len(piece)
                if unwritten >= PIECE_BYTES:
                    segment.pages.flush()  # nothing to do where it lies in memory
                    unwritten = 0


def _read(source: memoryview) -> list[memoryview]:
    [count] = struct.unpack_from("<Q", source)
    start, parts = aligned(_INT * (count + 1)), list[memoryview]()
    for size in struct.unpack_from(f"<{count}Q", source, _INT):
        parts.append(source[start : start + size])
        start += aligned(size)
    return parts


def _storage(source: Any) -> UntypedStorage:
    """Rebuild a storage on the bytes of ``source``, without a copy."""
    if isinstance(source, UntypedStorage):
        return source
    if len(source) == 0:
        return UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(source, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


# Smallest size of a channel's memory, which at least doubles when it is too small.
LEAST_BYTES = 1 << 20

_LARGE = b"-"


class ObjectSender:
    """Sends objects from one process to others."""

    _segment: SharedMemory | None = None

    def post(self, obj: object, links: Sequence[socket.socket]) -> list[bool]:
        """Send an object graph to all receivers; return for each whether its socket is still open.

        Args:
            obj: anything that cloudpickle can pickle.
            links: sockets of kind SOCK_SEQPACKET; the same each time.

        Raises:
            InputError: a part of it can't be pickled.
        """
        parts, fds = parts_of(obj), list[int]()
        if len(parts) == 1 and len(parts[0]) <= SHARED_FROM_BYTES:
            message = bytes(parts[0])
        else:
            message, size_bytes, segment = _LARGE, _offsets(parts)[-1], self._segment
            if segment is None or segment.size_bytes < size_bytes:
                capacity = max(size_bytes, LEAST_BYTES, 2 * segment.size_bytes if segment is not None else 0)
                self.close()
                self._segment = segment = SharedMemory.create("objects", capacity, reserved_bytes=capacity)
                fds = [segment.fd]
            _write(segment, parts)
        return [_sent(link, message, fds) for link in links]

    def close(self) -> None:
        """Unmap the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class ObjectReceiver:
    """Receives the objects of one sender.

    Args:
        link: the other end of the sender's socket.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._segment: SharedMemory | None = None

    def collect(self) -> Any:
        """Wait for the next object graph; raise EOFError if the sender has closed its end."""
        message, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        if not message:
            raise EOFError("the sender has closed its end")
        if fds:
            self.close()
            self._segment = SharedMemory(fds[0], os.fstat(fds[0]).st_size)
        if message != _LARGE:
            return pickle.loads(message)
        assert self._segment is not None, "its descriptor came with the first"
        with self._segment.buffer as source:  # copied: the next object is written to the same memory
            parts = [bytearray(part) for part in _read(source)]
        return object_of(parts)

    def close(self) -> None:
        """Unmap the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _sent(link: socket.socket, message: bytes, fds: list[int]) -> bool:
    try:
        socket.send_fds(link, [message], fds)
    except OSError:
        return False
    return True
