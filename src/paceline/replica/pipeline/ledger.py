"""How many bytes are saved for backward, and by which units."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.replica.pipeline.shared import Item


def nbytes(tensor: Tensor) -> int:
    """Of its elements.

    >>> nbytes(torch.zeros(2, 3))
    24
    """
    return tensor.numel() * tensor.element_size()


def address(tensor: Tensor) -> int:
    """Where its memory lies: the same for all views of one tensor. 0 where it has none of its own kind."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class Ledger:
    """Memory that backward needs, each piece once, however many units have saved it."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = {address(tensor) for tensor in own}
        self._kept: dict[int, Tensor] = {}
        self._users: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._alone: list[Item] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These are there until the end, so that an address of theirs stands for nothing else."""
        for tensor in tensors:
            self._kept.setdefault(address(tensor), tensor)

    def enter(self, unit: int, saved: Mapping[int, int]) -> None:
        """What :func:`saving` has seen while a node of this unit ran."""
        for where, size in saved.items():
            if where in self._own:
                continue
            if where in self._kept:
                self._sizes[where] = size
                self._users.setdefault(where, set()).add(unit)
            else:
                self._alone.append(Item(size, (unit,)))

    def items(self) -> list[Item]:
        """All of it, without the model's own tensors."""
        shared = [Item(self._sizes[where], tuple(sorted(users))) for where, users in self._users.items()]
        return [item for item in (*shared, *self._alone) if item.nbytes]


@contextmanager
def saving() -> Iterator[dict[int, int]]:
    """Address -> bytes of the memory that autograd saves meanwhile; whole storages, since a view keeps its base."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[address(tensor)] = tensor.untyped_storage().nbytes() if address(tensor) else nbytes(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
