"""How Δ is cut into buckets, each of them summed as soon as its gradients are there.

A backward pass makes the gradients of the last layers first, so buckets are cut from the end::

    float32 vector   | conv.weight .......... | conv.bias | fc.weight ... | fc.bias | head.weight | head.bias |
                     '------- bucket 2 -------------------'--- bucket 1 --'-------- bucket 0 -----------------'
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from paceline.replica.state import Block, Layout

BUCKET_BYTES = 4 << 20
"""What a bucket holds at least: its start costs a thirtieth of what moving it does. Gloo's all-reduce between two ranks
of one host took 0.10 ms for 4 KiB and 2.8 ms for 4 MiB (torch 2.13, the quickest of 60)."""

FIRST_BUCKET_BYTES = 1 << 20
"""What the first one holds: while it fills, nothing is under way. DDP's own figure (torch 2.13)."""


class Bucket(NamedTuple):
    """Neighbours in one vector."""

    vector: int
    """Which of the layout's."""
    start: int
    stop: int
    members: tuple[int, ...]
    """Parameters, by their place in the layout."""


def cut(layout: Layout, least_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The buckets of Δ, in the order in which all ranks begin them; one of each vector where all A is small.

    Vectors take turns by how far their buckets lie from the end, since layers may mix dtypes.

    Args:
        layout: of A.
        least_bytes: of a bucket, but for the first and the last ones of a vector.
        first_bytes: of the first ones.

    >>> import torch
    >>> from paceline.replica.state import Entry
    >>> sizes = [100, 10, 200, 20, 5]
    >>> entries = [Entry(str(n), torch.Size([n]), stop - n, stop) for n, stop in zip(sizes, accumulate(sizes))]
    >>> layout = Layout((Block(torch.float32, tuple(entries)),), ())
    >>> for bucket in cut(layout, least_bytes=400, first_bytes=80):
    ...     print(bucket)
    Bucket(vector=0, start=310, stop=335, members=(4, 3))
    Bucket(vector=0, start=110, stop=310, members=(2,))
    Bucket(vector=0, start=0, stop=110, members=(1, 0))
    >>> [bucket.members for bucket in cut(layout)]
    [(4, 3, 2, 1, 0)]
    """
    least, first = (least_bytes, first_bytes) if layout.parameter_bytes > least_bytes else (layout.parameter_bytes,) * 2
    starts = accumulate((len(block.entries) for block in layout.parameters), initial=0)
    found = [
        (1 - bucket.start / block.elements, bucket)
        for vector, (block, index) in enumerate(zip(layout.parameters, starts, strict=False))
        for bucket in _of_vector(block, vector, index, least, first)
    ]
    return tuple(bucket for _, bucket in sorted(found))


def _of_vector(block: Block, vector: int, index: int, least: int, first: int) -> Iterator[Bucket]:
    stop, members = block.elements, []
    for place, entry in reversed(list(enumerate(block.entries, start=index))):
        members.append(place)
        bound = first if stop == block.elements else least
        if place == index or (stop - entry.start) * block.dtype.itemsize >= bound:
            yield Bucket(vector, entry.start, stop, tuple(members))
            stop, members = entry.start, []
