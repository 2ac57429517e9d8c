"""Bytes of what is kept between forward and backward, measured where shapes are new and counted from then on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Holdings:
    """What a worker holds, and the most that it has held."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0

    def hold(self, size: int) -> None:
        """So many bytes more."""
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, size: int) -> None:
        """So many bytes less."""
        self.live_bytes -= size


class Tally:
    """Storages, each counted once.

    Args:
        ignored: tensors whose storages don't count: they are there anyway.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._sizes: dict[int, int] = {}
        self.passing_bytes = 0
        """What is there for a while on top, and is not kept."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """While it is entered, what autograd saves is there for a while: the most of several such whiles counts."""
        inner = Tally(())
        inner._ignored = self._ignored
        with inner.watching():
            yield
        self.passing_bytes = max(self.passing_bytes, inner.nbytes)

    def add(self, tensor: Tensor) -> None:
        """Count what a tensor holds, which is all of its storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self._sizes[storage.data_ptr()] = storage.nbytes()

    def add_all(self, values: Iterable[object]) -> None:
        """Count those that are tensors."""
        for value in values:
            if isinstance(value, Tensor):
                self.add(value)

    @property
    def nbytes(self) -> int:
        """Of all that have been added."""
        return sum(self._sizes.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add what autograd saves while it is entered."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor.detach()  # an output kept as it is would keep the node that keeps it


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
