"""Slices of A, of which each server has one: a part of each of its vectors, anywhere or at the borders of parameters.

::

    A          | conv.weight ..... | conv.bias | fc.weight ............ | fc.bias |
    server 0   | conv.weight ..... | conv.bias | fc.w |
    server 1                                          | fc.weight ..... | fc.bias |

Where an optimizer treats each element alone, slices are equal; one that looks at whole parameters gets whole ones.
Running buffers are in the first slice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.base import TensorChunk, chunks_of_range
from paceline.core.partitioning import cut_at_borders
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState, TensorEntry
from paceline.replica.optimizer_factory import (
    OptimizerFactory,
    build_optimizer,
    optimizer_of_part,
    optimizer_of_vectors,
    shape_only_parameters,
    steps_on_vectors,
)


@dataclass(frozen=True)
class FlatSlice:
    """One slice of A.

    Args:
        whole: layout of A.
        number: of the slice.
        spans: its elements of each vector of A, parameters first.
        anywhere: whether parameters may be cut.
    """

    whole: FlatLayout
    number: int
    spans: tuple[slice, ...]
    anywhere: bool

    @cached_property
    def layout(self) -> FlatLayout:
        """Layout of the slice: under their names the parameters that it has elements of, cut ones with one dim."""
        parameters, count = self.whole.parameters, len(self.whole.parameters)
        cut = [_cut(b, s, whole=not self.anywhere) for b, s in zip(parameters, self.spans, strict=False)]
        buffers = [_cut(b, s, whole=True) for b, s in zip(self.whole.buffers, self.spans[count:], strict=True)]
        return FlatLayout(tuple(cut), tuple(buffers))

    def of(self, state: FlatState) -> FlatState:
        """Return the slice of a state that has all of A, without a copy."""
        parts, count = self.cut(state.vectors), len(self.whole.parameters)
        return FlatState(self.layout, parts[:count], parts[count:], state.version)

    def cut(self, vectors: Sequence[Any]) -> list[Any]:
        """Return the slices of vectors of A."""
        return [vector[span] for vector, span in zip(vectors, self.spans, strict=True)]

    def cut_bytes(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the slices of the vectors of A as arrays of bytes; what follows these is the first slice's."""
        blocks = (*self.whole.parameters, *self.whole.buffers)
        sizes = [block.dtype.itemsize for block in blocks]
        own = [a[s.start * n : s.stop * n] for a, s, n in zip(arrays, self.spans, sizes, strict=False)]
        return own if self.number else [*own, *arrays[len(blocks) :]]

    def optimizer(self, make: OptimizerFactory) -> OptimizerFactory:
        """Return the optimizer of this slice that ``make`` makes of all parameters."""
        if self.anywhere:
            return optimizer_of_vectors(make, self.whole)
        return optimizer_of_part(make, self.whole, self.layout)

    def chunks(self, state: FlatState, prefix: str = "") -> list[TensorChunk]:
        """Return the tensors of a state of this slice as chunks of the full ones."""
        return [chunk for entry, view in state.entries() for chunk in self.describe(prefix, entry, view)]

    def describe(self, prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterable[TensorChunk]:
        """Yield the chunks of a tensor of the shape of one of the slice's entries, in the full tensor."""
        shape, start = self._places[entry.name]
        yield from chunks_of_range(prefix + entry.name, shape, start, tensor.reshape(-1))

    @cached_property
    def _places(self) -> dict[str, tuple[torch.Size, int]]:
        """By name: the full shape, and the first of its elements that is in the slice."""
        blocks = (*self.whole.parameters, *self.whole.buffers)
        return {
            entry.name: (entry.shape, max(0, span.start - entry.start))
            for block, span in zip(blocks, self.spans, strict=True)
            for entry in block.entries
        }


def slices_of(
    layout: FlatLayout, count: int, make: OptimizerFactory, *, whole_parameters: bool = False
) -> list[FlatSlice]:
    """Return the slices of A for so many servers; some may be empty.

    Args:
        layout: of A.
        count: of servers.
        make: their optimizer, which may need whole parameters.
        whole_parameters: whether they are needed in any case.
    """
    shapes = list(shape_only_parameters(layout).values())
    anywhere = not whole_parameters and steps_on_vectors(build_optimizer(make, shapes), len(shapes))
    cuts = list[Sequence[int]]()
    for block in layout.parameters:
        sizes = [entry.stop - entry.start for entry in block.entries]
        even = tuple(block.elements * i // count for i in range(count + 1))
        cuts.append(even if anywhere else cut_at_borders(sizes, count))
    cuts += [(0, *[block.elements] * count) for block in layout.buffers]
    spans = zip(*([slice(start, stop) for start, stop in pairwise(cut)] for cut in cuts), strict=True)
    return [FlatSlice(layout, number, own, anywhere) for number, own in enumerate(spans)]


def joined(slices: Sequence[FlatSlice], states: Iterable[FlatState]) -> FlatState:
    """Return all of A, a copy, of the states of its slices in their order."""
    whole = slices[0].whole.new()
    for part, state in zip(slices, states, strict=True):
        part.of(whole).copy_(state)
    return whole


def _cut(block: DtypeBuffer, span: slice, *, whole: bool) -> DtypeBuffer:
    return DtypeBuffer(block.dtype, tuple(_entries(block, span, whole=whole)))


def _entries(block: DtypeBuffer, span: slice, *, whole: bool) -> Iterator[TensorEntry]:
    for entry in block.entries:
        start, stop = max(entry.start, span.start), min(entry.stop, span.stop)
        if start < stop or (whole and span.start <= entry.start < span.stop):
            shape = entry.shape if whole else torch.Size([stop - start])
            yield TensorEntry(entry.name, shape, start - span.start, stop - span.start)
