"""The order of the data: which samples are the k-th batch of replica r.

It depends on the five fields of :class:`DataOrder` alone, never on which replica is fast, so every aggregation and
engine reads the same stream. Below, N samples, P replicas, batch size b::

    global     epoch e:  one permutation of N, cut into rounds of P·b; chunk k·P + r goes to replica r
                         |r0|r1|r2|r0|r1|r2| ... |r0 r1 r2|   last round: what remains, in P pieces as equal as possible
    disjoint   once:     one permutation of N, cut into P subsets as equal as possible; each replica keeps its own
               epoch e:  each replica shuffles its subset and cuts it into chunks of b; the last may be smaller

A run that goes on with another P or b first takes what its begun epochs have left, in their order, cut as a global
epoch is; then whole epochs follow. So each sample of an epoch is taken exactly once, whatever P and b were before.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, unknown
from paceline.core.types import ReplicaId

# Positions in the training set, one dimension.
Indices: TypeAlias = NDArray[np.int64]

# Division of the training set among replicas: one permutation for all, or a fixed subset each.
Partition: TypeAlias = Literal["global", "disjoint"]

# Keeps these draws apart from all others made under the same seed.
_TAG = int.from_bytes(b"data order")

# The two kinds of draws of disjoint; without them the subsets and the first shuffle would share a stream.
_SUBSETS, _SHUFFLES = 0, 1

# Number of indices of past and present epochs that are kept (4 MiB): a fast replica may be many short epochs ahead.
_KEPT_INDICES = 2**19

# Least number of epochs that are kept, however large the training set.
_KEPT_EPOCHS = 4


def _permutation(*key: int) -> Callable[[int | Indices], Indices]:
    return np.random.default_rng([*key]).permutation


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
        self._keep = max(_KEPT_EPOCHS, _KEPT_INDICES // order.samples)
        self._epochs: OrderedDict[int, Indices] = OrderedDict()

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
            self._epochs[epoch] = _permutation(self._order.seed, _TAG, epoch)(self._order.samples)
            if len(self._epochs) > self._keep:
                self._epochs.popitem(last=False)
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
        return -(-(stop - start) // self._order.batch_size)

    def bounds(self, replica: ReplicaId, round_: int) -> tuple[int, int]:
        first, last = self._subset(replica)
        start = round_ * self._order.batch_size
        return start, min(start + self._order.batch_size, last - first)

    def shuffled(self, replica: ReplicaId, epoch: int) -> Indices:
        current, seed = self._current.get(replica), self._order.seed
        if current is None or current[0] != epoch:
            if self._all is None:
                self._all = _permutation(seed, _TAG, _SUBSETS)(self._order.samples)
            start, stop = self._subset(replica)
            current = epoch, _permutation(seed, _TAG, _SHUFFLES, epoch, replica)(self._all[start:stop])
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

    Raises:
        InputError: a number below 1, a negative seed, an unknown partition, or fewer samples than disjoint subsets.

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
        if self.resumed is not None and self.resumed.order.samples != self.samples:
            raise InputError(
                f"samples={self.samples}, but the run to go on with took its batches of {self.resumed.order.samples}; "
                "write the same training set"
            )
        object.__setattr__(self, "_cut", _CUTS[self.partition](self))

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

    def rounds_per_epoch(self, replica: ReplicaId) -> int:
        """Return the number of batches of a replica in a whole epoch; ``disjoint`` subsets may differ by one."""
        assert 0 <= replica < self.replicas, f"replica {replica} of {self.replicas}"
        return self._cut.rounds(replica)

    def epochs(self, taken: tuple[int, ...]) -> Iterator[tuple[int, list[range]]]:
        """Yield each epoch that is begun, or left over, and not done: its number, and the batches left of each replica.

        Args:
            taken: how many batches each replica has taken.
        """
        first = [0] * self.replicas
        left, first_epoch = self._left
        for number, cut in zip(range(-len(left), 0), left, strict=True):
            yield from _left_of_epoch(number, [cut.rounds(r) for r in range(self.replicas)], first, taken)
        rounds = [self.rounds_per_epoch(r) for r in range(self.replicas)]
        done = min(max(0, t - f) // n for t, f, n in zip(taken, first, rounds, strict=True))
        first = [f + done * n for f, n in zip(first, rounds, strict=True)]
        number = first_epoch + done
        while any(t > f for t, f in zip(taken, first, strict=True)):
            yield from _left_of_epoch(number, rounds, first, taken)
            number += 1
        yield number, []

    @cached_property
    def _left(self) -> tuple[list[_Global], int]:
        """The divisions of what ``resumed`` has left, one for each begun epoch, and the first epoch that is whole."""
        if self.resumed is None:
            return [], 0
        left, first_epoch = self.resumed.left()
        return [_Global(self, indices) for indices in left], first_epoch

    def _find(self, replica: ReplicaId, k: int) -> tuple[_Global | _Disjoint, int, int]:
        """Return the division, the epoch and the round of the k-th batch of a replica."""
        left, first_epoch = self._left
        for cut in left:
            if k < cut.rounds(replica):
                return cut, 0, k
            k -= cut.rounds(replica)
        epoch, round_ = divmod(k, self.rounds_per_epoch(replica))
        return self._cut, first_epoch + epoch, round_


def _left_of_epoch(
    number: int, rounds: list[int], first: list[int], taken: tuple[int, ...]
) -> Iterator[tuple[int, list[range]]]:
    """Yield an epoch with the batches that are left of it, unless none is; moves ``first`` to the next epoch."""
    left = [range(max(t, f), f + n) for t, f, n in zip(taken, first, rounds, strict=True)]
    first[:] = [f + n for f, n in zip(first, rounds, strict=True)]
    if any(left):
        yield number, left


@dataclass(frozen=True)
class DataPosition:
    """How far a run has come in its data.

    Args:
        order: of the data.
        taken: how many batches each replica has taken of it.
    """

    order: DataOrder
    taken: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.taken) != self.order.replicas:
            raise InputError(f"{len(self.taken)} counts of batches, but {self.order.replicas} replicas took them")

    def left(self) -> tuple[list[Indices], int]:
        """Return the samples that are left of each begun epoch, in their order, and the first epoch not begun."""
        *begun, (first_epoch, _) = self.order.epochs(self.taken)
        left: list[Indices] = []
        for _, batches in begun:
            rounds = max(len(each) for each in batches)
            # Counted from the end of the epoch, since replicas may have left different numbers of batches.
            pieces = [
                self.order.batch(r, each[-i])
                for i in range(rounds, 0, -1)
                for r, each in enumerate(batches)
                if i <= len(each)
            ]
            left.append(np.concatenate(pieces))
        return [indices for indices in left if len(indices)], first_epoch

    @property
    def samples(self) -> int:
        """Number of samples that were taken so far, over all epochs."""
        left, first_epoch = self.left()
        return first_epoch * self.order.samples - sum(map(len, left))
