"""The order of the data: which samples are the k-th batch of replica r.

It depends on the five fields of :class:`DataOrder` alone, never on which replica is fast, so every aggregation and
engine reads the same stream. Below, N samples, P replicas, batch size b::

    global     epoch e:  one permutation of N, cut into rounds of P·b; chunk k·P + r goes to replica r
                         |r0|r1|r2|r0|r1|r2| ... |r0 r1 r2|   last round: what remains, in P pieces as equal as possible
    disjoint   once:     one permutation of N, cut into P subsets as equal as possible; each replica keeps its own
               epoch e:  each replica shuffles its subset and cuts it into chunks of b; the last may be smaller
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Division of a shuffled epoch into batches: one permutation for all replicas."""

    def __init__(self, order: "DataOrder") -> None:
        self._order = order
        self._full_rounds, self._rest = divmod(order.samples, order.batch_size * order.replicas)
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
        return order.samples - self._rest + start, order.samples - self._rest + stop

    def shuffled(self, replica: ReplicaId, epoch: int) -> Indices:  # noqa: ARG002 - the same for all
        """Return the samples of an epoch, in the order in which they are cut."""
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
        object.__setattr__(self, "_cut", _CUTS[self.partition](self))

    def batch(self, replica: ReplicaId, k: int) -> Indices:
        """Return the samples of the k-th batch of a replica, k = 0, 1, ... over all epochs; the caller's own copy."""
        epoch, round_ = divmod(k, self.rounds_per_epoch(replica))
        start, stop = self._cut.bounds(replica, round_)
        # A copy, for a view would keep its whole epoch alive for as long as a slow replica holds it.
        return self._cut.shuffled(replica, epoch)[start:stop].copy()

    def size(self, replica: ReplicaId, k: int) -> int:
        """Return the number of samples of the k-th batch of a replica; shuffles nothing."""
        start, stop = self._cut.bounds(replica, k % self.rounds_per_epoch(replica))
        return stop - start

    def rounds_per_epoch(self, replica: ReplicaId) -> int:
        """Return the number of batches of a replica in an epoch; ``disjoint`` subsets may differ by one."""
        assert 0 <= replica < self.replicas, f"replica {replica} of {self.replicas}"
        return self._cut.rounds(replica)
