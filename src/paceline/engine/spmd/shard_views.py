"""A worker's part of A: views of it in the full tensors, and the names that it owns.

::

    whole    | stem.weight ......... | head.weight .......... | head.bias |
                                       ^^^^^^^^^^               ^^^^^^^^^
    part                             | head.weight | head.bias |             stage 1, shard 0
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from paceline.checkpoint.base import TensorChunk
from paceline.core.mesh import Coordinate, Mesh
from paceline.replica.flat_state import FlatLayout, FlatState, TensorEntry
from paceline.replica.tensor.placements import Placement, Shard, is_counted_on


@dataclass(frozen=True)
class StageSharding:
    """Division of one stage's part of A among its shards.

    Args:
        placements: by name; every shard has the tensors that are not named.
        parts: layout of each shard.
        copies: number of replicas of the stage.
    """

    placements: Mapping[str, Placement]
    parts: Sequence[FlatLayout]
    copies: int = 1


class ShardViews:
    """A worker's part of A or of a Δ, paired with views of the same values in the whole.

    Args:
        part: the worker's.
        whole: all of it.
        placements: of the tensors among the shards of its stage, by name.
        shard: number of the worker's shard.
        names: of the tensors to copy; None: all of the part.
    """

    def __init__(
        self,
        part: FlatState,
        whole: FlatState,
        placements: Mapping[str, Placement],
        shard: int,
        names: Collection[str] | None = None,
    ) -> None:
        chosen = {name: own for name, own in part.named() if names is None or name in names}
        self._wholes = part_of(whole, chosen, placements, shard)
        self._parts = [own.view(window.shape) for own, window in zip(chosen.values(), self._wholes, strict=True)]

    @torch.no_grad()
    def take(self) -> None:
        """Copy from the whole to the part."""
        if self._parts:
            torch._foreach_copy_(self._parts, self._wholes)

    @torch.no_grad()
    def put(self) -> None:
        """Copy from the part to the whole."""
        if self._parts:
            torch._foreach_copy_(self._wholes, self._parts)


def part_of(whole: FlatState, names: Iterable[str], placements: Mapping[str, Placement], shard: int) -> list[Tensor]:
    """Return views of these tensors of a worker's part in the whole; other arguments as of :class:`ShardViews`."""
    full = dict(whole.named())
    return [_view(full[name], placements.get(name), shard) for name in names]


@dataclass(frozen=True)
class PartChunks:
    """Describes tensors of one shard's part of A.

    Args:
        whole: layout of A.
        placements: of the tensors among the shards, by name; of others each shard has all.
        shard: number of the shard.
    """

    whole: FlatLayout
    placements: Mapping[str, Placement]
    shard: int

    def of(self, state: FlatState) -> list[TensorChunk]:
        """Return the chunks of a part of A."""
        return [chunk for entry, view in state.entries() for chunk in self("", entry, view)]

    def __call__(self, prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterable[TensorChunk]:
        """Yield the chunks of a tensor of the shape of a parameter's part."""
        return self.place(prefix, entry.name, TensorChunk.whole(prefix + entry.name, tensor))

    def place(self, prefix: str, name: str, part: TensorChunk) -> Iterator[TensorChunk]:
        """Yield a chunk of a shard's part of a tensor as chunks of the full tensor."""
        shape, placement = tuple(self._shapes[name]), self.placements.get(name)
        if not isinstance(placement, Shard):
            yield TensorChunk(prefix + name, shape, part.offset, part.tensor)
            return
        dim, size, first = placement.dim % len(shape), placement.sizes[self.shard], placement.offsets[self.shard]
        start, stop = part.offset[dim], part.offset[dim] + part.tensor.shape[dim]
        for block in range(shape[dim] // placement.block_size):
            low, high = max(start, block * size), min(stop, (block + 1) * size)
            if low < high:
                at = block * placement.block_size + first + low - block * size
                offset = (*part.offset[:dim], at, *part.offset[dim + 1 :])
                yield TensorChunk(prefix + name, shape, offset, part.tensor.narrow(dim, low - start, high - low))

    @property
    def _shapes(self) -> dict[str, Size]:
        blocks = (*self.whole.parameters, *self.whole.buffers)
        return {entry.name: entry.shape for block in blocks for entry in block.entries}


def owned_names(stages: Sequence[StageSharding], mesh: Mesh, place: Coordinate) -> set[str]:
    """Return the tensors that a worker writes: each worker its shard, and one of several what they all have.

    Args:
        stages: of the replica.
        mesh: of its workers.
        place: coordinates of the worker.
    """
    if mesh.stage_replica(place).copy:
        return set()
    return names_of_part(stages, place.stage, mesh.shard(place))


def names_of_part(stages: Sequence[StageSharding], stage: int, shard: int) -> set[str]:
    """Return the tensors that the workers with one shard of one stage write; what several parts have, the first does.

    Args:
        stages: of the replica.
        stage: number of the stage.
        shard: number of the shard.
    """
    earlier = {name for each in stages[:stage] for part in each.parts for name in part.names}
    own = stages[stage]
    return {
        name
        for name in own.parts[shard].names
        if name not in earlier and is_counted_on(own.placements.get(name), shard)
    }


def _view(whole: Tensor, placement: Placement | None, shard: int) -> Tensor:
    """Return a view of a shard's part of a tensor."""
    if not isinstance(placement, Shard):
        return whole
    dim, shape = placement.dim % whole.dim(), whole.shape
    blocks = whole.view(*shape[:dim], shape[dim] // placement.block_size, placement.block_size, *shape[dim + 1 :])
    return blocks.narrow(dim + 1, placement.offsets[shard], placement.sizes[shard])
