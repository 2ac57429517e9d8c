"""Large vectors that are made again and again, without a page fault for every 4 KiB of each.

glibc gives blocks of more than 32 MiB back to the system as soon as they are freed, whatever it is told, and the
system clears each page of the next one. An update of 25 million parameters into a new vector took 64 ms for that
reason, and 14 ms into one whose pages were there (one core of an AMD EPYC).
"""

import mmap
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from paceline.comm.linux import LARGEST_KEPT_BYTES

# Smaller vectors are the C library's, which keeps them (:func:`paceline.comm.linux.keep_freed_memory`).
LEAST_BYTES = LARGEST_KEPT_BYTES


class RecyclingAllocator:
    """Allocates large vectors in the memory of earlier ones to which nothing refers any more.

    A vector's memory is free once the vector, all views of it and all arrays that share it are gone; it is kept as long
    as the allocator lives.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        """By their size in bytes."""

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a vector."""
        nbytes = elements * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return torch.empty(elements, dtype=dtype)
        free = self._free[nbytes]
        memory = free.pop() if free else mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint8)  # what shares its memory refers to it, not to the mapping
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype)
