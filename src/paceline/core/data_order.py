"""The order of the data: which samples are the k-th batch of replica r.

It depends on the fields of :class:`DataOrder` alone, never on which replica is fast, so every aggregation and engine
reads the same stream. Below, N samples, P replicas, batch size b::

    global     epoch e:  one permutation of N, cut into rounds of P·b; chunk k·P + r goes to replica r
                         |r0|r1|r2|r0|r1|r2| ... |r0 r1 r2|   last round: what remains, in P pieces as equal as possible
    disjoint   once:     one permutation of N, cut into P subsets as equal as possible; each replica keeps its own
               epoch e:  each replica shuffles its subset and cuts it into chunks of b; the last may be smaller

Without ``shuffle`` each permutation is the order of the data set. With ``drop_last`` an epoch ends before a last round,
or chunk, that is not full.

A run that goes on with another P or b first takes what its begun epochs have left, in their order, cut as a global
epoch is; then whole epochs follow. So each sample of an epoch is taken exactly once, whatever P and b were before.

The batches of one replica are a *stream* of the order. Who takes the next batch of a stream may change, its replica may
have died, say; which batches there are does not. An order with a single stream serves any number of replicas that
share it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, unknown
from paceline.core.types import ReplicaId

# Positions in the training set, one dimension.
Indices: TypeAlias = NDArray[np.int64]

# Division of the training set among replicas: one permutation for all, or a fixed subset each.
Partition: TypeAlias = Literal["global", "disjoint"]


class BatchRange(NamedTuple):
    """Batches in a row of one stream of an order."""

    stream: ReplicaId
    first: int
    size: int

    @property
    def numbers(self) -> range:
        """Return their numbers in the stream."""
        return range(self.first, self.first + self.size)


class Outstanding(NamedTuple):
    """Batches that were given to a replica, and whose Δ was not applied."""

    batches: BatchRange
    replica: ReplicaId | None
    """None: it has died."""
    clock: int
    """Number of the Δ."""


# Keeps these draws apart from all others made under the same seed.
_TAG = int.from_bytes(b"data order")

# The two kinds of draws of disjoint; without them the subsets and the first shuffle would share a stream.
_SUBSETS, _SHUFFLES = 0, 1

# Number of indices of past and present epochs that are kept (4 MiB): a fast replica may be many short epochs ahead.
_KEPT_INDICES = 2**19

# Bound on that number where replicas are so far apart that epochs are needed again after they were dropped (128 MiB).
_MOST_INDICES = 2**24

# Least number of epochs that are kept, however large the training set.
_KEPT_EPOCHS = 4


def _permutation(order: "DataOrder", *key: int) -> Callable[[int | Indices], Indices]:
    """Return a function that permutes 0 .. n - 1, or given indices; the order as it is, if nothing is shuffled."""
    if not order.shuffle:
        return lambda data: np.arange(data) if isinstance(data, int) else data
    return np.random.default_rng([order.seed, _TAG, *key]).permutation


def _pieces(length: int, pieces: int, piece: int) -> tuple[int, int]:
    """Return start and stop of one of ``pieces`` contiguous pieces, as equal as in ``np.array_split``."""
    size, larger = divmod(length, pieces)
    start = piece * size + min(piece, larger)
    return start, start + size + (piece < larger)


@final
class _Global:
    """Division of a shuffled epoch into batches: one permutation for all replicas.

    Args:
        order: of the data.
        left: the samples that are left of the only epoch; None: whole epochs.
    """

    def __init__(self, order: "DataOrder", left: Indices | None = None) -> None:
        self._order, self._left = order, left
        self._samples = order.samples if left is None else len(left)
        self._full_rounds, self._rest = divmod(self._samples, order.batch_size * order.replicas)
        self._rest = 0 if order.drop_last else self._rest
        self._keep = max(_KEPT_EPOCHS, _KEPT_INDICES // order.samples)
        self._epochs: OrderedDict[int, Indices] = OrderedDict()
        self._dropped: set[int] = set()

    def rounds(self, replica: ReplicaId) -> int:  # noqa: ARG002 - the same for all
        """Return the number of batches of this replica in an epoch."""
        return self._full_rounds + (self._rest > 0)

    def bounds(self, replica: ReplicaId, round_: int) -> tuple[int, int]:
        """Return start and stop of a batch within ``shuffled``."""
        order = self._order
        if round_ < self._full_rounds:
            start = (round_ * order.replicas + replica) * order.batch_size
            return start, start + order.batch_size
        start, stop = _pieces(self._rest, order.replicas, replica)
        return self._samples - self._rest + start, self._samples - self._rest + stop

    def shuffled(self, replica: ReplicaId, epoch: int) -> Indices:  # noqa: ARG002 - the same for all
        """Return the samples of an epoch, in the order in which they are cut."""
        if self._left is not None:
            return self._left
        if epoch not in self._epochs:
            if epoch in self._dropped:
                self._keep = min(2 * self._keep, max(self._keep, _MOST_INDICES // self._order.samples))
            self._epochs[epoch] = _permutation(self._order, epoch)(self._order.samples)
            if len(self._epochs) > self._keep:
                self._dropped.add(self._epochs.popitem(last=False)[0])
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]


@final
class _Disjoint:
    """Division of a shuffled epoch into batches: a subset for each replica."""

    def __init__(self, order: "DataOrder") -> None:
        self._order = order
        self._all: Indices | None = None
        self._current: dict[ReplicaId, tuple[int, Indices]] = {}

    def _subset(self, replica: ReplicaId) -> tuple[int, int]:
        return _pieces(self._order.samples, self._order.replicas, replica)

    def rounds(self, replica: ReplicaId) -> int:
        start, stop = self._subset(replica)
        full, rest = divmod(stop - start, self._order.batch_size)
        return full + (rest > 0 and not self._order.drop_last)

    def bounds(self, replica: ReplicaId, round_: int) -> tuple[int, int]:
        first, last = self._subset(replica)
        start = round_ * self._order.batch_size
        return start, min(start + self._order.batch_size, last - first)

    def shuffled(self, replica: ReplicaId, epoch: int) -> Indices:
        current, order = self._current.get(replica), self._order
        if current is None or current[0] != epoch:
            if self._all is None:
                self._all = _permutation(order, _SUBSETS)(order.samples)
            start, stop = self._subset(replica)
            current = epoch, _permutation(order, _SHUFFLES, epoch, replica)(self._all[start:stop])
            self._current[replica] = current
        return current[1]


_CUTS: dict[Partition, type[_Global] | type[_Disjoint]] = {"global": _Global, "disjoint": _Disjoint}


@dataclass(frozen=True)
class DataOrder:
    """The samples of the k-th batch of replica r; a value, except for the permutations that it caches.

    Under ``global``, P synchronous replicas with batch size b see, round by round, what one process with batch size
    P·b sees, and an epoch covers every sample exactly once. A batch of the last round may hold 0 samples, where fewer
    than P remain. Memory is O(samples), however many replicas there are and however far they are apart.

    Args:
        samples: of the training set.
        batch_size: samples per replica and step.
        replicas: P.
        seed: of all permutations, 0 or more.
        partition: ``global``, or ``disjoint`` as in the Smooth Switch paper (arXiv 2407.00101).
        resumed: where another order stopped; what its begun epochs have left comes first. None: from the beginning.
        shuffle: whether epochs are permuted; False: the order of the data set, in each epoch.
        drop_last: whether an epoch leaves out the samples that do not fill a last round, so that all batches have
            ``batch_size`` samples.

    Raises:
        InputError: a number below 1, a negative seed, an unknown partition, fewer samples than disjoint subsets, or
            than a batch of each replica where the last round is dropped.

    >>> order = DataOrder(samples=10, batch_size=2, replicas=2, seed=0)
    >>> [order.size(replica, k) for k in range(3) for replica in range(2)]
    [2, 2, 2, 2, 1, 1]
    >>> alone = DataOrder(samples=10, batch_size=4, replicas=1, seed=0)
    >>> alone.batch(0, 1).tolist() == order.batch(0, 1).tolist() + order.batch(1, 1).tolist()
    True
    """

    samples: int
    batch_size: int
    replicas: int
    seed: int
    partition: Partition = "global"
    resumed: "DataPosition | None" = None
    shuffle: bool = True
    drop_last: bool = False
    _cut: _Global | _Disjoint = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "replicas"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}, but it must be at least 1; write {name}=1 or more.")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}, but a seed can't be negative; write seed={-self.seed}.")
        if self.partition not in _CUTS:
            raise unknown("partition", self.partition, get_args(Partition))
        if self.partition == "disjoint" and self.replicas > self.samples:
            raise InputError(
                f"partition=disjoint needs a sample for each replica, but there are {self.replicas} replicas and "
                f"{self.samples} samples; write partition=global or replicas={self.samples}."
            )
        before = self.resumed.order.samples if self.resumed is not None and self.resumed.order is not None else None
        if self.resumed is not None and before != self.samples:
            raise InputError(
                f"samples={self.samples}, but the run to go on with took its batches of {before}; write the same "
                "training set"
            )
        object.__setattr__(self, "_cut", _CUTS[self.partition](self))
        if self.drop_last and not all(map(self._cut.rounds, range(self.replicas))):
            raise InputError(
                f"drop_last=True leaves nothing of {self.samples} samples for {self.replicas} replicas with "
                f"batch_size={self.batch_size}; write drop_last=False, or "
                f"batch_size={max(1, self.samples // self.replicas)} or less"
            )

    def batch(self, replica: ReplicaId, k: int) -> Indices:
        """Return the samples of the k-th batch of a replica, k = 0, 1, ... over all epochs; the caller's own copy."""
        cut, epoch, round_ = self._find(replica, k)
        start, stop = cut.bounds(replica, round_)
        # A copy, for a view would keep its whole epoch alive for as long as a slow replica holds it.
        return cut.shuffled(replica, epoch)[start:stop].copy()

    def size(self, replica: ReplicaId, k: int) -> int:
        """Return the number of samples of the k-th batch of a replica; shuffles nothing."""
        cut, _, round_ = self._find(replica, k)
        start, stop = cut.bounds(replica, round_)
        return stop - start

    @cached_property
    def epoch_samples(self) -> int:
        """Number of samples of a whole epoch over all replicas: all, but those that ``drop_last`` leaves out."""
        if not self.drop_last:
            return self.samples
        return sum(self.batch_size * self._cut.rounds(replica) for replica in range(self.replicas))

    def rounds_per_epoch(self, replica: ReplicaId) -> int:
        """Return the number of batches of a replica in a whole epoch; ``disjoint`` subsets may differ by one."""
        assert 0 <= replica < self.replicas, f"replica {replica} of {self.replicas}"
        return self._cut.rounds(replica)

    def epoch_of(self, replica: ReplicaId, k: int) -> int:
        """Return the number of the epoch that the k-th batch of a replica belongs to.

        What an earlier order has left counts as the epochs before its first whole one.
        """
        left, number = self._left
        for i, cut in enumerate(left):
            if k < cut.rounds(replica):
                return number - len(left) + i
            k -= cut.rounds(replica)
        return number + k // self.rounds_per_epoch(replica)

    def batches_of_epoch(self, replica: ReplicaId, epoch: int) -> range:
        """Return the numbers of a replica's batches in an epoch."""
        left, number = self._left
        sizes = [cut.rounds(replica) for cut in left]
        if epoch < number:
            i = epoch - number + len(left)
            return range(sum(sizes[:i]), sum(sizes[: i + 1]))
        rounds = self.rounds_per_epoch(replica)
        first = sum(sizes) + (epoch - number) * rounds
        return range(first, first + rounds)

    @property
    def first_whole_epoch(self) -> int:
        """Return the number of the first epoch that comes after what an earlier order has left."""
        return self._left[1]

    @cached_property
    def _left(self) -> tuple[list[_Global], int]:
        """The divisions of what ``resumed`` has left, one for each begun epoch, and the first epoch that is whole."""
        if self.resumed is None:
            return [], 0
        left, first_epoch = self.resumed.left()
        cuts = (_Global(self, indices) for indices in left)
        return [cut for cut in cuts if cut.rounds(0)], first_epoch

    def _find(self, replica: ReplicaId, k: int) -> tuple[_Global | _Disjoint, int, int]:
        """Return the division, the epoch and the round of the k-th batch of a replica."""
        left, first_epoch = self._left
        for cut in left:
            if k < cut.rounds(replica):
                return cut, 0, k
            k -= cut.rounds(replica)
        epoch, round_ = divmod(k, self.rounds_per_epoch(replica))
        return self._cut, first_epoch + epoch, round_


@dataclass(frozen=True)
class DataPosition:
    """How far a run has come in its data.

    Args:
        order: of the data; None: they come from a function.
        taken: how many batches of each stream were given out.
        outstanding: those of them whose Δ was not applied.
    """

    order: DataOrder | None
    taken: tuple[int, ...]
    outstanding: tuple[Outstanding, ...] = ()

    def __post_init__(self) -> None:
        streams = len(self.taken) if self.order is None else self.order.replicas
        if len(self.taken) != streams:
            raise InputError(f"{len(self.taken)} counts of batches, but {streams} streams")
        for (stream, first, count), _, _ in self.outstanding:
            if stream >= streams or first + count > self.taken[stream]:
                raise InputError(f"batches {first} to {first + count - 1} of stream {stream} were not given out")

    def left(self) -> tuple[list[Indices], int]:
        """Return the samples that are left of each begun epoch, in their order, and the first epoch not begun."""
        order, taken = self.order, self.taken
        assert order is not None, "data of a function have no epochs"
        streams = range(order.replicas)
        open_: dict[int, list[tuple[int, ReplicaId, int]]] = {}
        """Of each begun epoch (round, stream, number) of the batches that are left."""
        for stream, k in [(b.stream, k) for b, _, _ in self.outstanding for k in b.numbers]:
            epoch = order.epoch_of(stream, k)
            open_.setdefault(epoch, []).append((k - order.batches_of_epoch(stream, epoch).start, stream, k))
        epochs = [order.epoch_of(stream, taken[stream]) for stream in streams]
        # A stream that is at the beginning of an epoch has not begun it.
        begun = [e + (taken[s] > order.batches_of_epoch(s, e).start) for s, e in zip(streams, epochs, strict=True)]
        first_epoch = max([*begun, order.first_whole_epoch])
        for epoch in range(min(epochs), first_epoch):
            for stream in streams:
                numbers = order.batches_of_epoch(stream, epoch)
                rest = range(max(taken[stream], numbers.start), numbers.stop)
                open_.setdefault(epoch, []).extend((k - numbers.start, stream, k) for k in rest)
        left = [[order.batch(s, k) for _, s, k in sorted(each)] for _, each in sorted(open_.items())]
        return [joined for each in left if each and len(joined := np.concatenate(each))], first_epoch

    @property
    def samples(self) -> int:
        """Number of samples that were taken so far, over all epochs, and applied or discarded."""
        assert self.order is not None, "data of a function have no epochs"
        left, first_epoch = self.left()
        return first_epoch * self.order.epoch_samples - sum(map(len, left))
