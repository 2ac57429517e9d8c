"""D, the batches of one replica: the seeded order of the data, fetched from whatever kind of data set it is."""

import itertools
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from paceline.core.data_order import DataOrder
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.program import Data, Program, Tree, as_tensors, leaves, map_tree
from paceline.replica.base import Batch

Fetch = Callable[[NDArray[np.int64]], tuple[Tree, Tree]]
Stream: TypeAlias = Generator[Batch, None, None]


def fetcher(data: Data, loader: Mapping[str, Any]) -> Fetch:
    """indices -> (input, target) of these samples, stacked along dim 0."""
    pair = as_tensors(data) if "collate_fn" not in loader else None
    if pair is not None:
        inputs, targets = pair
        return lambda indices: _select(inputs, targets, torch.from_numpy(indices))
    dataset: Any = _Pairs(data) if isinstance(data, tuple) else data
    collate = loader.get("collate_fn") or default_collate
    return lambda indices: _as_pair(collate([dataset[int(i)] for i in indices]))


def stream(program: Program, order: DataOrder | None, replica: ReplicaId, replicas: int) -> Stream:
    """The endless batches of one replica; to be closed where torch's DataLoader may be behind it.

    ``order`` is None where ``program.train`` is a function; such a source is called again each time it runs dry.
    """
    if order is None:
        return _from_source(program, replica, replicas)
    if program.loader.get("num_workers"):
        return _from_loader(program, order, replica)
    return _from_order(fetcher(cast(Data, program.train), program.loader), order, replica)


def _from_order(fetch: Fetch, order: DataOrder, replica: ReplicaId) -> Stream:
    for k in itertools.count():
        indices = order.batch(replica, k)
        yield Batch(*fetch(indices), len(indices)) if len(indices) else EMPTY


def _from_loader(program: Program, order: DataOrder, replica: ReplicaId) -> Stream:
    """Torch's DataLoader fetches ahead in its own workers; its sampler is our order."""
    indices = (order.batch(replica, k).tolist() for k in itertools.count())
    skipped, full = itertools.tee(indices)
    data: Any = _Pairs(program.train) if isinstance(program.train, tuple) else program.train
    batches = iter(DataLoader(data, batch_sampler=filter(None, full), **program.loader))
    for chosen in skipped:
        yield Batch(*_as_pair(next(batches)), len(chosen)) if chosen else EMPTY


def _from_source(program: Program, replica: ReplicaId, replicas: int) -> Stream:
    source = cast(Callable[[int, int, int], Any], program.train)
    while True:
        empty = True
        for item in source(replica, replicas, program.seed):
            empty = False
            yield as_batch(item)
        if empty:
            raise InputError(f"train(replica={replica}, replicas={replicas}, seed={program.seed}) gave no batch")


def as_batch(item: Any) -> Batch:
    """A batch as it is, or made of (input, target) with samples along dim 0 of the target's first tensor."""
    if isinstance(item, Batch):
        return item
    inputs, targets = _as_pair(item)
    tensors = leaves(targets) or leaves(inputs)
    if not tensors or not tensors[0].dim():
        raise InputError("a batch needs a tensor with samples along dim 0; write (inputs, targets), two tensors")
    return Batch(inputs, targets, len(tensors[0]))


EMPTY = Batch(None, None, 0)


def _select(inputs: Tree, targets: Tree, indices: torch.Tensor) -> tuple[Tree, Tree]:
    return map_tree(lambda t: t.index_select(0, indices), inputs), map_tree(
        lambda t: t.index_select(0, indices), targets
    )


def _as_pair(item: Any) -> tuple[Tree, Tree]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InputError(
            f"a batch must be (input, target), but is {type(item).__name__}"
            f"{f' of {len(item)}' if isinstance(item, (tuple, list)) else ''}; put several inputs in one tuple or dict"
        )
    return item[0], item[1]


class _Pairs(torch.utils.data.Dataset[Any]):
    """A pair of trees as a map-style data set."""

    def __init__(self, pair: tuple[Tree, Tree]) -> None:
        self._pair = pair

    def __len__(self) -> int:
        return len(leaves(self._pair)[0])

    def __getitem__(self, index: int) -> tuple[Tree, Tree]:
        inputs, targets = self._pair
        return map_tree(lambda t: t[index], inputs), map_tree(lambda t: t[index], targets)
