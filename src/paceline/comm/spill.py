"""Memory for what a worker needs whole for a while, though it may have no room for it: a model before it is divided.

::

    ordinary memory | ... as long as there is plenty | then files on disk, mapped: | . . . | . . | . . . . |

The system takes back pages of files where memory is short, under a container's limit too, once the file says the same.
To write them out it takes its time, and under a limit it may rather kill; so what is filled is written out at once.
What lies there makes a process slower at worst, where ordinary memory would have it killed.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.comm.free import available_bytes
from paceline.comm.segments import Segment

LEAST_BYTES = 1 << 20
"""Smaller tensors stay in ordinary memory: a file for each would cost more than it saves."""

PIECE_BYTES = 16 << 20
"""As much is copied before it is written out: what is not on disk yet can't be taken back."""

SHARE = 1 / 8
"""Of the memory that is free at the start: what may be filled before files are."""


class Spill:
    """One purpose's memory: so much of it is ordinary, the rest lies on disk.

    Args:
        roomy_bytes: how much; None: an eighth of what is free, divided among the workers of this host.
    """

    def __init__(self, roomy_bytes: int | None = None) -> None:
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._left = int(SHARE * available_bytes() / workers) if roomy_bytes is None else roomy_bytes
        self._mapped: list[weakref.ref[mmap.mmap]] = []

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A new vector; the one before it is written out first.

        Raises:
            PacelineError: there is room for it neither in memory nor on disk.
        """
        nbytes = elements * dtype.itemsize
        if not self.spills(nbytes):
            self._left -= nbytes
            return torch.empty(elements, dtype=dtype)
        _write_out(self._mapped[-1:])
        with contextlib.closing(Segment.on_disk(nbytes)) as segment:
            self._mapped.append(weakref.ref(segment.pages))
            return segment.tensor(0, (elements,), dtype)

    def settle(self) -> None:
        """Write out all that lies on disk and is still there."""
        self._mapped = [each for each in self._mapped if each() is not None]
        _write_out(self._mapped)

    def spills(self, nbytes: int) -> bool:
        """Whether so many bytes more would lie on disk."""
        return nbytes >= LEAST_BYTES and nbytes > self._left

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, without a history."""
        source, spilled = tensor.detach(), self.spills(tensor.nbytes)
        made = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
        if not spilled:
            return made.copy_(source)
        rows = max(1, PIECE_BYTES * len(source) // source.nbytes)
        for target, piece in zip(torch.split(made, rows), torch.split(source, rows), strict=True):
            target.copy_(piece)
            _write_out(self._mapped[-1:])
        return made

    def kept(self, tensor: Tensor) -> Tensor:
        """The tensor itself, without a history, while there is plenty of memory; then a contiguous copy of it."""
        if tensor.device.type == "cpu" and self.spills(tensor.nbytes):
            return self.copy(tensor)
        self._left -= tensor.nbytes
        return tensor.detach()

    def segment(self, name: str, size_bytes: int, *, reserved_bytes: int = 0) -> Segment:
        """Memory to share with other processes; as :meth:`Segment.create`."""
        if self.spills(size_bytes):
            return Segment.on_disk(size_bytes)
        return Segment.create(name, size_bytes, reserved_bytes=reserved_bytes)


def _write_out(mapped: Iterable[weakref.ref[mmap.mmap]]) -> None:
    for each in mapped:
        pages = each()
        if pages is not None:
            pages.flush()
