"""The batches D of one replica: the seeded order of the data, fetched from whatever kind of data set it is."""

import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
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


def stream(program: Program, order: DataOrder | None, replica: ReplicaId, replicas: int, first: int = 0) -> Stream:
    """Yield the batches of one replica without end.

    Args:
        program: holds the data.
        order: of the samples; None where ``program.train`` is a function, which is called again when it is exhausted.
        replica: that takes the batches.
        replicas: all there are.
        first: number of the first batch; a function is called from the start, and gives those before in vain.

    The generator has to be closed where torch's DataLoader may be behind it.
    """
    if order is None:
        source = cast(Callable[[int, int, int], Any], program.train)
        while True:
            item = None
            for item in source(replica, replicas, program.seed):
                if first > 0:
                    first -= 1
                else:
                    yield as_batch(item)
            if item is None:
                raise InputError(f"train(replica={replica}, replicas={replicas}, seed={program.seed}) gave no batch")
    batches = (order.batch(replica, k) for k in itertools.count(first))
    if not program.loader.get("num_workers"):
        fetch = fetcher(cast(Data, program.train), program.loader)
        for indices in batches:
            yield Batch(*fetch(indices), len(indices)) if len(indices) else EMPTY
    # Torch's DataLoader fetches ahead in its own workers; its sampler is our order.
    own, sampler = itertools.tee(indices.tolist() for indices in batches)
    data: Any = _PairDataset(program.train) if isinstance(program.train, tuple) else program.train
    # The sampler runs ahead of the batches that are yielded; empty ones it never sees.
    fetched = iter(DataLoader(data, batch_sampler=filter(None, sampler), **program.loader))
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
