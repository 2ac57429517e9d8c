"""Bytes that are kept between forward and backward: measured where shapes are new, counted from then on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


class StorageCounter:
    """Adds up the bytes of tensors' storages, each storage once.

    Args:
        ignored: tensors whose storages don't count: parameters, buffers and the batch are there anyway.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._sizes: dict[int, int] = {}
        self.transient_bytes = 0
        """The most that is there for a while on top of :attr:`nbytes`, and not kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that were added."""
        return sum(self._sizes.values())

    def add(self, values: Iterable[object]) -> None:
        """Count whole storages of those values that are tensors."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._ignored:
                    self._sizes[storage.data_ptr()] = storage.nbytes()

    @contextmanager
    def counting_saved(self) -> Iterator[None]:
        """Context manager: add the tensors that autograd saves within."""

        def pack(tensor: Tensor) -> Tensor:
            self.add([tensor])
            return tensor.detach()  # an output saved as it is would keep the node that saves it: a cycle

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @contextmanager
    def counting_transient(self) -> Iterator[None]:
        """Context manager: count the tensors that autograd saves within as transient; of several, the largest."""
        inner = StorageCounter(())
        inner._ignored = self._ignored
        with inner.counting_saved():
            yield
        self.transient_bytes = max(self.transient_bytes, inner.nbytes)


@dataclass
class ActivationMemory:
    """Counts the bytes that a worker keeps for backward passes, and the most that it has kept at one time."""

    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, size: int) -> None:
        """Count ``size`` bytes more (less where it is below 0)."""
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
