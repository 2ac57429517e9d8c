"""The batches D of one replica: the seeded order of the data, fetched from whatever kind of data set it is.

Of an IterableDataset, which has an order of its own, each replica reads all batches and takes every P-th::

    pass of r0   |b0|  .  .|b3|  .  .|b6|        each replica iterates over a copy, which draws the same numbers;
    pass of r1     . |b1|  .  .|b4|  .  . |      after its last batch the next pass begins
    pass of r2     .  . |b2|  .  .|b5|  . |

What samples of a data set, or a function, draw as they are read is a function of the seed, the stream and the batch's
number alone, so that a batch that is read again, by a replica that replaces another or in a resumed run, is the same.
"""

import copy
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.comm.shared_memory import ALIGNMENT
from paceline.core.data_order import DataOrder
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.device import OwnGenerators, accelerator, seed_draws, seeded_draws
from paceline.program import Data, Program, Tree, as_tensors, leaves, map_tree
from paceline.replica.autograd import step_seed
from paceline.replica.base import EMPTY, Batch, as_batch, as_pair

Fetch = Callable[[NDArray[np.int64]], tuple[Tree, Tree]]
Stream: TypeAlias = Generator[Batch, None, None]

# Most batches that are gathered at once, and their bytes.
MOST_AHEAD, AHEAD_BYTES = 8, 1 << 18

# Stands for a step, which is never negative, in the seeds of what is drawn as samples are read.
_READING = -2


def fetcher(data: Data, loader: Mapping[str, Any], *, whole: bool = False) -> Fetch:
    """Return a function from indices to (input, target) of these samples, stacked along dim 0.

    Args:
        data: a map-style data set, or a pair of trees of tensors.
        loader: the program's arguments for torch's DataLoader; of them ``collate_fn`` is used.
        whole: whether a batch is the input as a whole, see :func:`~paceline.replica.base.as_pair`.
    """
    if (pair := _rows_of(data, loader)) is not None:

        def select(indices: NDArray[np.int64]) -> tuple[Tree, Tree]:
            rows, (inputs, targets) = torch.from_numpy(indices), pair
            if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):  # the usual case
                chosen = inputs.index_select(0, rows), targets.index_select(0, rows)
            else:
                chosen = (
                    map_tree(lambda t: t.index_select(0, rows), inputs),
                    map_tree(lambda t: t.index_select(0, rows), targets),
                )
            return as_pair(chosen, whole=whole)

        return select
    dataset: Any = _PairDataset(data) if isinstance(data, tuple) else data
    collate = loader.get("collate_fn") or _collator(dataset)
    several = getattr(dataset, "__getitems__", None)  # as torch's DataLoader reads a batch at once

    def fetch(indices: NDArray[np.int64]) -> tuple[Tree, Tree]:
        samples = several(indices.tolist()) if several else [dataset[int(i)] for i in indices]
        return as_pair(collate(samples), whole=whole)

    return fetch


def _rows_of(data: Data, loader: Mapping[str, Any]) -> tuple[Tree, Tree] | None:
    """Return the tensors of which batches are rows, made without anybody's code; None: samples are asked for."""
    return as_tensors(data) if "collate_fn" not in loader else None


def collate_samples(samples: Sequence[Any], *, columns: bool = False) -> Any:
    """As torch's ``default_collate``, but in dicts lists of numbers, as a tokenizer makes them, are tensors.

    Args:
        samples: of one batch.
        columns: whether the data set has ``remove_columns``, as those of Hugging Face have.

    Raises:
        InputError: a dict holds text, or tensors of samples differ in shape.

    >>> collate_samples([{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3, 4], "labels": 1}])
    {'input_ids': tensor([[1, 2], [3, 4]]), 'labels': tensor([0, 1])}
    """
    if not isinstance(samples[0], Mapping):
        return _stacked(samples)
    texts = [name for name, value in samples[0].items() if isinstance(value, (str, bytes))]
    if texts:
        instead = f"train=dataset.remove_columns({texts})" if columns else "a data set whose samples leave them out"
        raise InputError(f"samples hold text, {texts}; write {instead}, or collate_fn=")
    tensors = [{k: torch.tensor(v) if isinstance(v, list) else v for k, v in each.items()} for each in samples]
    for name, value in tensors[0].items():
        sizes = {tuple(each[name].shape) for each in tensors if isinstance(each.get(name), torch.Tensor)}
        if isinstance(value, torch.Tensor) and len(sizes) > 1:
            raise InputError(
                f"{name!r} is of shapes {', '.join(map(str, sorted(sizes)[:3]))} in samples of one batch; pad them: "
                "write loader={'collate_fn': transformers.DataCollatorWithPadding(tokenizer)}, or another collate_fn"
            )
    return _stacked(tensors)


def _collator(data: Any) -> Callable[[Sequence[Any]], Any]:
    return functools.partial(collate_samples, columns=hasattr(data, "remove_columns"))


def _stacked(samples: Sequence[Any]) -> Any:
    try:
        return default_collate(samples)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise InputError(
            f"samples of one batch can't be stacked: {error}; give them one shape, or write "
            "loader={'collate_fn': pad}, with a function that makes a batch of a list of samples"
        ) from error


class BatchSource:
    """The batches of a run by stream and number; close it, for torch's DataLoader may be behind it.

    Those of a replica's own stream are fetched ahead by the DataLoader's workers, if the program asks for them; others,
    as those that a dead replica has left, or of a stream that all replicas share, when they are asked for.

    Args:
        program: holds the data.
        order: of the samples; None where ``program.train`` is a function or an IterableDataset, which is called, or
            iterated, again when it is exhausted.
        replicas: P.
    """

    def __init__(self, program: Program, order: DataOrder | None, replicas: int) -> None:
        self._program, self._order, self._replicas = program, order, replicas
        self._fetch: Fetch | None = None
        self._ahead: Stream | None = None
        """Batches in a row; those without an order from 0 on."""
        self._next: tuple[ReplicaId, int] | None = None
        """Stream and number of its next one."""
        shared = order is not None and order.replicas < replicas
        self._prefetches = order is not None and bool(program.loader.get("num_workers")) and not shared
        self._guess: tuple[ReplicaId, int] | None = None
        """Stream and number after the last batch."""
        self._in_turn = 0
        """How many batches up to the last were each the one after the one before."""
        self._prepared: deque[Batch] = deque()
        """That one, and those after it."""
        self._row_bytes: list[int] | None = None
        """Of each tensor whose rows are the samples; None: samples are asked for."""

    def at(self, stream: ReplicaId, number: int) -> Batch:
        """Return a batch; without an order those before are made in vain, and none again."""
        if self._order is None:
            return self._in_a_row(stream, number)
        if self._prefetches:
            if self._ahead is None or self._next is None:
                self._ahead, self._next = self._prefetched(self._order, stream, number), (stream, number)
            own, next_number = self._next
            if stream == own and number >= next_number:
                self._next = stream, number + 1
                return next(islice(self._ahead, number - next_number, None))
        in_turn, self._guess = (stream, number) == self._guess, (stream, number + 1)
        self._in_turn = self._in_turn + 1 if in_turn else 0
        if in_turn and self._prepared:
            return self._prepared.popleft()
        self._prepared.clear()
        return self._fetched(self._order.batch(stream, number), stream, number)

    def prepare(self) -> None:
        """Fetch the next batches where they are known and take nobody's code, for a caller with time to wait.

        Small ones are gathered several at once, as many as have come in turn before them.
        """
        guess, order, in_turn = self._guess, self._order, self._in_turn
        if self._prepared or not in_turn or self._row_bytes is None or order is None or guess is None:
            return
        stream, number = guess
        first = order.batch(stream, number)
        count = min(in_turn, self._at_once(len(first)))
        later = (order.batch(stream, number + i) for i in range(1, count))
        alike = [first, *takewhile(lambda indices: len(indices) == len(first), later)]
        self._prepared.extend(_divided(self._fetched(np.concatenate(alike), stream, number), len(alike)))

    def _at_once(self, samples: int) -> int:
        """Return how many batches of so many samples are gathered at once.

        Each begins at a cache line, as one that is gathered by itself does: kernels may round by alignment.
        """
        sizes = [samples * row for row in self._row_bytes or ()]
        if not samples or any(size % ALIGNMENT for size in sizes):
            return 1
        return max(1, min(MOST_AHEAD, AHEAD_BYTES // max(1, sum(sizes))))

    def _fetched(self, indices: NDArray[np.int64], stream: ReplicaId, number: int) -> Batch:
        if self._fetch is None:
            train, program = cast(Data, self._program.train), self._program
            self._fetch = fetcher(train, program.loader, whole=program.model_makes_loss)
            rows = _rows_of(train, program.loader)
            self._row_bytes = None if rows is None else [t.nbytes // max(1, len(t)) for t in leaves(rows)]
        if not len(indices):
            return EMPTY
        if self._row_bytes is not None:  # nobody draws
            return Batch(*self._fetch(indices), len(indices))
        with seeded_draws(self._draws_seed(stream, number)):
            return Batch(*self._fetch(indices), len(indices))

    def _draws_seed(self, stream: ReplicaId, number: int) -> int:
        """Return the seed of what is drawn as a batch is read; no micro-step's dropout has it."""
        return step_seed(step_seed(self._program.seed, stream, _READING), 0, number)

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

    def _in_a_row(self, stream: ReplicaId, number: int) -> Batch:
        if self._next is None:
            self._ahead, self._next = self._passes(stream), (stream, 0)
        assert self._ahead is not None, "it has begun"
        assert stream == self._next[0], "batches without an order are their own replica's"
        skipped = number - self._next[1]
        self._next = stream, number + 1
        return next(islice(self._ahead, max(0, skipped), None))

    def _passes(self, replica: ReplicaId) -> Stream:
        """Yield the batches of one pass after the other."""
        program, replicas = self._program, self._replicas
        train: Any = program.train
        iterable = _OfIterable(program, train) if isinstance(train, IterableDataset) else None
        made = itertools.count()
        for number in itertools.count():
            if iterable is None:
                name = f"train(replica={replica}, replicas={replicas}, seed={program.seed}) gave no batch"
                items = self._drawn(train(replica, replicas, program.seed), replica, made)
            else:
                name = f"train={type(train).__name__} has no batch for replica {replica} of {replicas} in a pass"
                items = islice(iterable.batches(number), replica, None, replicas)
            found = False
            for item in items:
                found = True
                yield as_batch(item, whole=program.model_makes_loss)
            if not found:
                raise InputError(name)

    def _drawn(self, batches: Iterable[Any], replica: ReplicaId, made: Iterator[int]) -> Iterator[Any]:
        """Yield the batches of a function, each drawn from generators that are seeded for it; ``made`` numbers them."""
        items = iter(batches)
        for number in made:
            with seeded_draws(self._draws_seed(replica, number)):
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _prefetched(self, order: DataOrder, stream: ReplicaId, first: int) -> Stream:
        numbered = ((k, order.batch(stream, k).tolist()) for k in itertools.count(first))
        own, ahead = itertools.tee(numbered)
        train, whole = self._program.train, self._program.model_makes_loss
        data: Any = _PairDataset(train) if isinstance(train, tuple) else train
        # The sampler runs ahead of the batches that are yielded; empty ones it never sees.
        sampler = ([self._draws_seed(stream, k), *chosen] for k, chosen in ahead if chosen)
        options = loader_options(self._program)
        options["worker_init_fn"] = _WorkerInit(options.get("worker_init_fn"))
        fetched = iter(DataLoader(_DrawnByBatch(data), batch_sampler=sampler, **options))
        for _, chosen in own:
            yield Batch(*as_pair(next(fetched), whole=whole), len(chosen)) if chosen else EMPTY


def _divided(batch: Batch, count: int) -> list[Batch]:
    """Return the batches of equal size that were gathered at once; none knows of the others.

    A view has the version counter of what it is a view of, by which autograd would take a forward that writes into one
    batch for one that has written into all. ``data`` has its own.
    """
    if count == 1:
        return [batch]
    inputs, targets, samples = batch
    size = samples // count
    if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):  # the usual case
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        return [Batch(each.data, target.data, size) for each, target in pairs]

    def rows(first: int, tree: Tree) -> Tree:
        return map_tree(lambda t: t.narrow(0, first, size).data, tree)

    return [Batch(rows(first, inputs), rows(first, targets), size) for first in range(0, samples, size)]


def loader_options(program: Program) -> dict[str, Any]:
    """Return the keyword arguments of DataLoader, without memory that is pinned where nothing copies from it."""
    options = {"collate_fn": _collator(program.train), **program.loader}
    if accelerator() is None:
        options.pop("pin_memory", None)
    return options


class _OfIterable:
    """Passes over a copy of an IterableDataset: the user's stays as it is, whoever iterates beside this one."""

    def __init__(self, program: Program, dataset: IterableDataset[Any]) -> None:
        options = loader_options(program)
        if "batch_size" not in options:
            options |= {"batch_size": program.per_replica_batch(1), "drop_last": bool(program.drop_last)}
        elif "collate_fn" not in program.loader:  # each item is a batch
            del options["collate_fn"]
        try:
            self._dataset: Any = copy.deepcopy(dataset)
        except Exception as error:
            raise InputError(
                f"train={type(dataset).__name__} can't be copied for each replica: {type(error).__name__}: {error}; "
                "open files and generators in __iter__, or write train=function, (replica, replicas, seed) -> batches"
            ) from error
        # Seeds those of its workers alike in all replicas, or they would divide different passes.
        drawn = torch.Generator().manual_seed(program.seed)
        self._loader = DataLoader(self._dataset, generator=drawn, **options)
        # Workers of the loader have generators of their own; entering these takes 0.3 ms, most of it NumPy's.
        workers = bool(options.get("num_workers"))
        self._generators: AbstractContextManager[None] = nullcontext() if workers else OwnGenerators(program.seed)

    def batches(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass, drawn from generators of its own."""
        if hasattr(self._dataset, "set_epoch"):  # as data sets of Hugging Face are shuffled anew
            self._dataset.set_epoch(number)
        with self._generators:
            items = iter(self._loader)
        while True:
            with self._generators:
                item = next(items, _END)
            if item is _END:
                return
            yield item


_END = object()


@dataclass(eq=False)
class _DrawnByBatch(torch.utils.data.Dataset[Any]):
    """A map-style data set as workers of a DataLoader read it: by the seed of what a batch draws, then its indices."""

    dataset: Any

    def __getitems__(self, seed_and_indices: Sequence[int]) -> Any:
        number, *indices = seed_and_indices
        seed_draws(number)  # this process has nobody else who draws
        several = getattr(self.dataset, "__getitems__", None)
        return several(indices) if several else [self.dataset[i] for i in indices]


@dataclass(frozen=True)
class _WorkerInit:
    """The start of a worker of a DataLoader: the user's function of it, and users' code sees their own data set."""

    given: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # its own refuses assignments
        if self.given is not None:
            self.given(worker)


@dataclass(eq=False)
class _PairDataset(torch.utils.data.Dataset[Any]):
    """A pair of trees as a map-style data set."""

    pair: tuple[Tree, Tree]

    def __len__(self) -> int:
        return len(leaves(self.pair)[0])

    def __getitem__(self, index: int) -> tuple[Tree, Tree]:
        inputs, targets = self.pair
        return map_tree(lambda t: t[index], inputs), map_tree(lambda t: t[index], targets)
