"""The batches D of one replica: the seeded order of the data, fetched from whatever kind of data set it is."""

import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from paceline.core.data_order import DataOrder
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.program import Data, Program, Tree, as_tensors, leaves, map_tree
from paceline.replica.base import EMPTY, Batch, as_batch, as_pair

Fetch = Callable[[NDArray[np.int64]], tuple[Tree, Tree]]
Stream: TypeAlias = Generator[Batch, None, None]


def fetcher(data: Data, loader: Mapping[str, Any]) -> Fetch:
    """Return a function from indices to (input, target) of these samples, stacked along dim 0.

    Args:
        data: a map-style data set, or a pair of trees of tensors.
        loader: the program's arguments for torch's DataLoader; of them ``collate_fn`` is used.
    """
    pair = as_tensors(data) if "collate_fn" not in loader else None
    if pair is not None:

        def select(indices: NDArray[np.int64]) -> tuple[Tree, Tree]:
            rows = torch.from_numpy(indices)
            inputs, targets = (map_tree(lambda t: t.index_select(0, rows), tree) for tree in pair)
            return inputs, targets

        return select
    dataset: Any = _PairDataset(data) if isinstance(data, tuple) else data
    collate = loader.get("collate_fn") or default_collate
    return lambda indices: as_pair(collate([dataset[int(i)] for i in indices]))


class BatchSource:
    """The batches of a run by stream and number; close it, for torch's DataLoader may be behind it.

    Those of a replica's own stream are fetched ahead by the DataLoader's workers, if the program asks for them; others,
    as those that a dead replica has left, or of a stream that all replicas share, when they are asked for.

    Args:
        program: holds the data.
        order: of the samples; None where ``program.train`` is a function, which is called again when it is exhausted.
        replicas: P.
    """

    def __init__(self, program: Program, order: DataOrder | None, replicas: int) -> None:
        self._program, self._order, self._replicas = program, order, replicas
        self._fetch: Fetch | None = None
        self._ahead: Stream | None = None
        """Batches in a row; of a function from 0 on."""
        self._next: tuple[ReplicaId, int] | None = None
        """Stream and number of its next one."""

    def at(self, stream: ReplicaId, number: int) -> Batch:
        """Return a batch; a function gives those before in vain, and none again."""
        if self._order is None:
            return self._of_function(stream, number)
        shared = self._order.replicas < self._replicas
        if self._program.loader.get("num_workers") and not shared:
            if self._ahead is None or self._next is None:
                self._ahead, self._next = self._prefetched(self._order, stream, number), (stream, number)
            own, next_number = self._next
            if stream == own and number >= next_number:
                self._next = stream, number + 1
                return next(islice(self._ahead, number - next_number, None))
        if self._fetch is None:
            self._fetch = fetcher(cast(Data, self._program.train), self._program.loader)
        indices = self._order.batch(stream, number)
        return Batch(*self._fetch(indices), len(indices)) if len(indices) else EMPTY

    def stream(self, stream: ReplicaId, first: int = 0) -> Stream:
        """Yield the batches of a stream without end, from number ``first`` on."""
        return (self.at(stream, number) for number in itertools.count(first))

    def first(self) -> Batch:
        """Return the first batch that has samples; close the source."""
        try:
            return next(batch for batch in self.stream(0) if batch.samples)
        finally:
            self.close()

    def close(self) -> None:
        """Release what fetches ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _of_function(self, stream: ReplicaId, number: int) -> Batch:
        if self._next is None:
            self._ahead, self._next = self._of_source(stream), (stream, 0)
        assert self._ahead is not None, "it has begun"
        assert stream == self._next[0], "a function's batches are its own replica's"
        skipped = number - self._next[1]
        self._next = stream, number + 1
        return next(islice(self._ahead, max(0, skipped), None))

    def _of_source(self, replica: ReplicaId) -> Stream:
        source = cast(Callable[[int, int, int], Any], self._program.train)
        while True:
            item = None
            for item in source(replica, self._replicas, self._program.seed):
                yield as_batch(item)
            if item is None:
                raise InputError(
                    f"train(replica={replica}, replicas={self._replicas}, seed={self._program.seed}) gave no batch"
                )

    def _prefetched(self, order: DataOrder, stream: ReplicaId, first: int) -> Stream:
        batches = (order.batch(stream, k).tolist() for k in itertools.count(first))
        own, sampler = itertools.tee(batches)
        train = self._program.train
        data: Any = _PairDataset(train) if isinstance(train, tuple) else train
        # The sampler runs ahead of the batches that are yielded; empty ones it never sees.
        fetched = iter(DataLoader(data, batch_sampler=filter(None, sampler), **self._program.loader))
        for chosen in own:
            yield Batch(*as_pair(next(fetched)), len(chosen)) if chosen else EMPTY


@dataclass(eq=False)
class _PairDataset(torch.utils.data.Dataset[Any]):
    """A pair of trees as a map-style data set."""

    pair: tuple[Tree, Tree]

    def __len__(self) -> int:
        return len(leaves(self.pair)[0])

    def __getitem__(self, index: int) -> tuple[Tree, Tree]:
        inputs, targets = self.pair
        return map_tree(lambda t: t[index], inputs), map_tree(lambda t: t[index], targets)
