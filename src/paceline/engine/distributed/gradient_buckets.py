"""Buckets of Δ: neighbouring parameters whose gradients are handed on together.

A backward pass computes the gradients of the last layers first, so buckets are cut from the end::

    float32 vector   | conv.weight .......... | conv.bias | fc.weight ... | fc.bias | head.weight | head.bias |
                     '------- bucket 2 -------------------'--- bucket 1 --'-------- bucket 0 -----------------'

All ranks begin the same buckets in the same order: one that is full early waits for those before it, and buckets that
a rank has no gradients for are begun with the exchange.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.replica.flat_state import FlatLayout

# Least bytes of a bucket: its start costs a thirtieth of its transfer. Gloo's all-reduce between two ranks of one host
# took 0.10 ms for 4 KiB and 2.8 ms for 4 MiB (torch 2.13, the fastest of 60).
BUCKET_BYTES = 4 << 20

# Least bytes of the first bucket: nothing is sent while it fills. DDP's own figure (torch 2.13).
FIRST_BUCKET_BYTES = 1 << 20

# Bytes of a parameter from which backend shm takes its gradient by itself: a copy of 4 MiB takes 0.4 ms on 2 cores of
# an AMD EPYC, two collectives more, for what comes before it and after it, about 0.1.
APART_BYTES = 4 << 20


class Bucket(NamedTuple):
    """Neighbouring parameters in one vector.

    Args:
        vector: index in the layout.
        members: indices of the parameters in the layout.
    """

    vector: int
    start: int
    stop: int
    members: tuple[int, ...]

    def nbytes(self, layout: FlatLayout) -> int:
        """Return its size in this layout."""
        return (self.stop - self.start) * layout.parameters[self.vector].dtype.itemsize


def cut(
    layout: FlatLayout, least_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Cut Δ into buckets, in the order in which all ranks begin them; one for each vector where all of A is small.

    Vectors alternate by how far their buckets are from the end, since layers may mix dtypes.

    Args:
        layout: of A.
        least_bytes: of a bucket, but for the first and the last ones of a vector.
        first_bytes: of the first ones.

    >>> import torch
    >>> from itertools import accumulate
    >>> from paceline.replica.flat_state import DtypeBuffer, TensorEntry
    >>> sizes = [100, 10, 200, 20, 5]
    >>> entries = [TensorEntry(str(n), torch.Size([n]), stop - n, stop) for n, stop in zip(sizes, accumulate(sizes))]
    >>> layout = FlatLayout((DtypeBuffer(torch.float32, tuple(entries)),), ())
    >>> for bucket in cut(layout, least_bytes=400, first_bytes=80):
    ...     print(bucket)
    Bucket(vector=0, start=310, stop=335, members=(4, 3))
    Bucket(vector=0, start=110, stop=310, members=(2,))
    Bucket(vector=0, start=0, stop=110, members=(1, 0))
    >>> [bucket.members for bucket in cut(layout)]
    [(4, 3, 2, 1, 0)]
    """
    if layout.parameter_bytes <= least_bytes:
        least_bytes = first_bytes = layout.parameter_bytes
    buckets: list[tuple[float, Bucket]] = []
    first = 0
    for vector, block in enumerate(layout.parameters):
        stop, members = block.elements, list[int]()
        for index, entry in reversed(list(enumerate(block.entries, start=first))):
            members.append(index)
            least = first_bytes if stop == block.elements else least_bytes
            if index == first or (stop - entry.start) * block.dtype.itemsize >= least:
                bucket = Bucket(vector, entry.start, stop, tuple(members))
                buckets.append((1 - entry.start / block.elements, bucket))
                stop, members = entry.start, []
        first += len(block.entries)
    return tuple(bucket for _, bucket in sorted(buckets))


def cut_apart(layout: FlatLayout, least_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Cut Δ into a bucket for each large parameter, and one for those between two of them, from the end of each vector.

    Args:
        layout: of A.
        least_bytes: of a large one; None: those from which on it pays.
    """
    least_bytes = APART_BYTES if least_bytes is None else least_bytes
    buckets, first = list[Bucket](), 0
    for vector, block in enumerate(layout.parameters):
        stop, members = block.elements, list[int]()
        for index, entry in reversed(list(enumerate(block.entries, start=first))):
            large = (entry.stop - entry.start) * block.dtype.itemsize >= least_bytes
            if large and members:
                buckets.append(Bucket(vector, entry.stop, stop, tuple(members)))
                stop, members = entry.stop, []
            members.append(index)
            if large or index == first:
                buckets.append(Bucket(vector, entry.start, stop, tuple(members)))
                stop, members = entry.start, []
        first += len(block.entries)
    return tuple(buckets)


class GradientBuckets(ABC):
    """Takes the gradients of one rank's Δ one by one, into buckets; subclasses say what happens to a full one.

    Args:
        buckets: in the order in which all ranks begin them.
        layout: of A.
        vectors: of Δ, to which gradients are copied.
        early: whether gradients are to come as soon as they are final; else, once all are, those that are a bucket of
            their own stay where they are.
    """

    def __init__(
        self, buckets: tuple[Bucket, ...], layout: FlatLayout, vectors: Sequence[Tensor], *, early: bool
    ) -> None:
        self.buckets, self.early = buckets, early
        self._vectors = vectors
        pairs = zip(layout.parameters, vectors, strict=True)
        self._views = [view for block, vector in pairs for view in block.views(vector)]
        self._bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
        self._reset()

    def add(self, index: int, gradient: Tensor, weight: float) -> None:
        """Take a gradient of this rank's Δ, and begin the buckets that are full.

        Args:
            index: of the parameter, in the layout's order.
            gradient: copied, or read where it is: it stays as it is until the update of A.
            weight: of the whole Δ.
        """
        if index not in self._missing:
            raise PacelineError(
                "a Δ that has been handed over in part was begun anew; let what worker.step() raises end the loop"
            )
        self._missing.remove(index)
        number, view = self._bucket_of[index], self._views[index]
        alone = not self.early and len(self.buckets[number].members) == 1
        if alone and weight == 1.0 and gradient.is_contiguous() and gradient.dtype == view.dtype:
            self._given[number] = gradient.detach().view(-1)
        else:
            view.copy_(gradient)
        self._left[number] -= 1
        while self._begun < len(self.buckets) and not self._left[self._begun]:
            self._begin(weight)

    def flush(self) -> None:
        """Begin the remaining buckets; a rank without a Δ contributes zeros, in the same order."""
        if 0 < len(self._missing) < len(self._bucket_of):
            raise PacelineError(
                "a Δ that has been handed over in part was left; let what worker.step() raises end the loop"
            )
        while self._begun < len(self.buckets):
            self._begin(0.0)

    @abstractmethod
    def wait(self, description: str) -> None:
        """Wait until what was begun is done, and be ready for the next Δ.

        Args:
            description: of what is waited for, in words that follow "waited for".
        """

    @abstractmethod
    def _start(self, part: Tensor, given: Tensor | None) -> None:
        """Begin the next bucket.

        Args:
            part: its part of Δ.
            given: what this rank contributes; None: it is in the part.
        """

    def _begin(self, weight: float) -> None:
        bucket, given = self.buckets[self._begun], self._given.pop(self._begun, None)
        part = self._vectors[bucket.vector][bucket.start : bucket.stop]
        if given is None and weight == 0.0:
            part.zero_()
        elif given is None and weight != 1.0:
            part.mul_(weight)
        self._begun += 1
        self._start(part, given)

    def _reset(self) -> None:
        self._begun = 0
        """Buckets that have begun."""
        self._given: dict[int, Tensor] = {}
        """Gradients that are a bucket of their own, which has not begun."""
        self._missing = set(self._bucket_of)
        self._left = [len(bucket.members) for bucket in self.buckets]


def apart_pays(layout: FlatLayout) -> bool:
    """Return whether most of Δ need not be copied where large gradients stay where autograd has left them."""
    sizes = [bucket.nbytes(layout) for bucket in cut_apart(layout) if len(bucket.members) == 1]
    return 2 * sum(nbytes for nbytes in sizes if nbytes >= APART_BYTES) >= layout.parameter_bytes
