"""A loader of the user's own, divided among replicas by whole batches, in the order that its samplers give.

::

    loader      b0  b1  b2 | b3  b4  b5 | b6             each replica draws the same order
    replica 0   b0         | b3         | b6
    replica 1       b1     |     b4     |     -          no batch in a round in which others have one
    replica 2           b2 |         b5 |     -
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.device import OwnGenerators
from paceline.loaders import parts_of
from paceline.program import leaves

_END = object()


@dataclass(frozen=True)
class ReplicaLoader:
    """One replica's batches of a loader; each iteration is one pass.

    Args:
        loader: of all replicas' batches.
        replica: number of this one.
        replicas: P.
        batches: loader -> this replica's batches of one pass.
    """

    loader: Any
    replica: ReplicaId
    replicas: int
    batches: Callable[[Any], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches(self.loader)

    def __len__(self) -> int:
        return max(0, math.ceil((len(self.loader) - self.replica) / self.replicas))


def samples_of(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor; 1 where it has none."""
    tensors = leaves(batch)
    return len(tensors[0]) if tensors and tensors[0].dim() else 1


def divided(loader: Any, replica: ReplicaId, replicas: int, seed: int) -> Iterator[Any]:
    """Yield every P-th batch of one pass over a loader, from the ``replica``-th on; then None if others have one more.

    All replicas have to see the same batches in the same order, so what samplers and data sets draw is seeded, unless
    they have generators of their own.

    Args:
        loader: a DataLoader, or any iterable of batches; with one replica it is iterated as it is.
        replica: its number.
        replicas: P.
        seed: the same on all replicas.

    Raises:
        InputError: there was no batch in the whole pass, for any replica.
    """
    generators, number = OwnGenerators(seed), 0
    if replicas == 1:
        for number, batch in enumerate(loader, start=1):  # noqa: B007 (used after the loop)
            yield batch
    elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        with generators:
            # A loader that is iterated draws the seed of its workers first: the order is that of one process then.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            chosen = list(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        yield from _part_of(loader, chosen[replica::replicas])
        number = len(chosen)
    else:
        with generators:
            batches = iter(loader)
        for number in count():
            with generators:
                batch = next(batches, _END)
            if batch is _END:
                break
            if number % replicas == replica:
                yield batch
    if not number:
        raise InputError(
            "the loader gave no batch in a whole pass, to any replica; write drop_last=False or a smaller "
            "batch_size= if it has fewer samples than a batch, give it samples if its sampler or dataset is empty, and "
            "a new iterator for each pass if it is one that can be read once"
        )
    if 0 < number % replicas <= replica:
        yield None


def _part_of(loader: DataLoader[Any], chosen: Sequence[Any]) -> DataLoader[Any]:
    """Return a loader of these batches of another's, or, where that does not make batches, of these samples."""
    options = parts_of(loader).options
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=chosen, **options)
    return DataLoader(loader.dataset, batch_sampler=chosen, **options)
