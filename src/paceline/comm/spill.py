"""Memory for what a worker needs whole for a while, though it may have no room for it: a model before it is divided.

::

    ordinary memory | ... as long as there is plenty | then files on disk, mapped: | . . . | . . | . . . . |

The system writes pages of files out and takes them back where memory is short, under a container's limit too. So what
lies there makes a process slower at worst, where what lies in ordinary memory would have it killed.
"""

import os

import torch
from torch import Tensor

from paceline.comm.free import available_bytes
from paceline.comm.segments import Segment

LEAST_BYTES = 1 << 20
"""Smaller tensors stay in ordinary memory: a file for each would cost more than it saves."""

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

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A new vector.

        Raises:
            PacelineError: there is room for it neither in memory nor on disk.
        """
        nbytes = elements * dtype.itemsize
        if not self.spills(nbytes):
            self._left -= nbytes
            return torch.empty(elements, dtype=dtype)
        segment = Segment.on_disk(nbytes)
        try:
            return segment.tensor(0, (elements,), dtype)
        finally:
            segment.close()

    def spills(self, nbytes: int) -> bool:
        """Whether so many bytes more would lie on disk."""
        return nbytes >= LEAST_BYTES and nbytes > self._left

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, without a history."""
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor.detach())

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
