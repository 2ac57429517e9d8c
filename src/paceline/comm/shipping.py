"""Object graphs for many receivers on one host, their arrays in memory only once.

    ship(program) -> Parcel --fd--> receiver: unpack(Parcel(fd)) -> program

cloudpickle takes what pickle can't: lambdas, closures, functions and classes of ``__main__`` and of notebook cells.
Tensor storages and contiguous numpy arrays of 64 KiB and more are left out of the pickle and lie beside it:

    | sizes | pickle | array | array | ...      each part at a multiple of 64 bytes

Receivers map these bytes copy-on-write, so 25 receivers of 100 MB cost 100 MB once, and one that writes into its
tensors changes nobody else's.
"""

import contextlib
import io
import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cloudpickle
import torch
from torch.storage import TypedStorage, UntypedStorage

from paceline.comm.segments import Segment, aligned
from paceline.comm.spill import PIECE_BYTES, Spill
from paceline.core.errors import InputError

SHARED_FROM_BYTES = 64 * 1024
"""Smaller arrays travel in the pickle itself: copying one costs less than its pages of a mapping."""

_INT = 8

_MADV_POPULATE_READ = 22  # not among the names of mmap


@dataclass(frozen=True, slots=True)
class Parcel:
    """A shipped object: one file descriptor, passed on as it is. Its memory goes with the last holder."""

    fd: int

    @property
    def size_bytes(self) -> int:
        """All of it, pickle and arrays."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Once all receivers have it, or, in a receiver, once it is unpacked: what was unpacked stays good."""
        os.close(self.fd)


def ship(obj: object, spill: Spill | None = None) -> Parcel:
    """Put an object graph into shared memory, each distinct tensor storage and large array in it once.

    Args:
        obj: what is sent.
        spill: where it may lie on disk, if there is no memory to spare.

    Raises:
        InputError: where a part of it can't be pickled.
        PacelineError: where there is not enough memory.
    """
    parts = parts_of(obj)
    sizes = [len(part) for part in parts]
    offsets = _offsets(sizes)
    new = Segment.create if spill is None else spill.segment
    segment = new("parcel", offsets[-1], reserved_bytes=offsets[-1])
    try:
        with segment.buffer as target:
            _write(target, 0, memoryview(b"".join(n.to_bytes(_INT, "little") for n in (len(sizes), *sizes))))
            unwritten = 0
            for offset, piece in _pieces(offsets, parts):
                _write(target, offset, piece)
                unwritten += len(piece)
                if unwritten >= PIECE_BYTES:
                    segment.pages.flush()  # nothing to do where it lies in memory
                    unwritten = 0
        return Parcel(os.dup(segment.fd))
    finally:
        segment.close()


def parts_of(obj: object) -> list[memoryview]:
    """The pickle of an object graph, then its large arrays: each distinct one once, and none copied.

    ``pickle.loads(first, buffers=rest)`` rebuilds the graph, its large arrays as views of these.

    Raises:
        InputError: where a part of it can't be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{type(obj).__name__} can't be sent to another process: {error}; "
            "make such parts inside the functions that use them, not outside"
        ) from error
    return [stream.getbuffer(), *pickler.buffers]


def unpack(parcel: Parcel, *, at_once: bool = True) -> Any:
    """Rebuild the object graph; its large arrays are views of the parcel, copied page by page when written to.

    Read-only numpy arrays come back read-only. What two tensors shared, they share again.

    Args:
        parcel: from :func:`ship`.
        at_once: map all of its pages now, rather than each when it is looked at.
    """
    # ACCESS_COPY: a receiver may normalise its data set in place, and no other one must see that.
    pages = mmap.mmap(parcel.fd, parcel.size_bytes, access=mmap.ACCESS_COPY)
    # All pages are there; mapped one by one as samples are drawn, they would cost a page fault each in every process.
    if at_once:
        with contextlib.suppress(OSError):  # before Linux 5.14
            pages.madvise(_MADV_POPULATE_READ)
    view = memoryview(pages)
    count = _number(view, 0)
    sizes = [_number(view, _INT * (i + 1)) for i in range(count)]
    stream, *buffers = (view[o : o + n] for o, n in zip(_offsets(sizes), sizes, strict=False))
    return pickle.loads(stream, buffers=buffers)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves large buffers out; takes tensor storages as buffers and each of them once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_inside)
        self.buffers: list[memoryview] = []
        self._storages: dict[tuple[int, int], UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is TypedStorage and obj._untyped_storage.device.type == "cpu":  # .untyped() would warn
            return _typed_storage, (self._same(obj._untyped_storage), obj.dtype)
        if kind is UntypedStorage and obj.device.type == "cpu":
            same = self._same(obj)
            return _storage, (pickle.PickleBuffer(_bytes_of(same)) if same is obj else same,)
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


def _offsets(sizes: list[int]) -> list[int]:
    """Where each part starts, after the count and the sizes; last, where all ends."""
    return list(accumulate((aligned(n) for n in sizes), initial=aligned(_INT * (len(sizes) + 1))))


def _write(target: memoryview, offset: int, part: memoryview) -> None:
    target[offset : offset + len(part)] = part


def _pieces(offsets: Sequence[int], parts: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """No larger than what is written out at once, each with where it goes."""
    for offset, part in zip(offsets, parts, strict=False):
        for start in range(0, len(part), PIECE_BYTES):
            yield offset + start, part[start : start + PIECE_BYTES]


def _number(view: memoryview, offset: int) -> int:
    return int.from_bytes(view[offset : offset + _INT], "little")


def _bytes_of(storage: UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _storage(source: Any) -> UntypedStorage:
    """Rebuild a storage on the bytes of ``source``, without a copy."""
    if isinstance(source, UntypedStorage):
        return source
    if len(source) == 0:
        return UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(source, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
