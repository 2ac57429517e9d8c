"""Views of a shard in the full tensors of A, and the gather of the full state.

What one worker has of A, and where it lies in the whole.

::

    whole    | stem.weight ......... | head.weight .......... | head.bias |
                                       ^^^^^^^^^^               ^^^^^^^^^
    part                             | head.weight | head.bias |             stage 1, shard 0

A, of the parts that the workers of a replica have of it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.mesh import Coordinate, Mesh
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.tensor.placements import Placement as Lies
from paceline.replica.tensor.placements import Shard, is_counted_on


@dataclass(frozen=True)
class StageSharding:
    """How one stage's part of A lies among its shards."""

    lies: Mapping[str, Lies]
    """By name; every shard has those tensors that are not named."""
    parts: Sequence[FlatLayout]
    """Of each shard."""
    copies: int = 1
    """How many columns have them."""


class ShardViews:
    """A part of A, in place and as a copy.

    Args:
        part: a worker's.
        whole: all of A, or of a Δ.
        lies: how tensors lie among the shards of its stage, by name.
        shard: whose part it is.
        names: those that are looked at; None: all that the part has.
    """

    def __init__(
        self,
        part: FlatState,
        whole: FlatState,
        lies: Mapping[str, Lies],
        shard: int,
        names: Collection[str] | None = None,
    ) -> None:
        there = dict(whole.named())
        chosen = [(name, own) for name, own in part.named() if names is None or name in names]
        self._wholes = [_window(there[name], lies.get(name), shard) for name, _ in chosen]
        self._parts = [own.view(window.shape) for (_, own), window in zip(chosen, self._wholes, strict=True)]

    @torch.no_grad()
    def take(self) -> None:
        """Let the part be as the whole is."""
        if self._parts:
            torch._foreach_copy_(self._parts, self._wholes)

    @torch.no_grad()
    def put(self) -> None:
        """Let the whole be, there, as the part is."""
        if self._parts:
            torch._foreach_copy_(self._wholes, self._parts)


def owned_names(stages: Sequence[StageSharding], mesh: Mesh, place: Coordinate) -> set[str]:
    """The tensors that a worker writes: what several have is one's to write, unless they have different parts of it.

    Args:
        stages: of the replica.
        mesh: of its workers.
        place: of the worker.
    """
    if mesh.stage_replica(place).copy:
        return set()
    shard = mesh.shard(place)
    earlier = {name for stage in stages[: place.stage] for part in stage.parts for name in _names(part)}
    mine = stages[place.stage]
    held = _names(mine.parts[shard])
    return {name for name in held if name not in earlier and is_counted_on(mine.lies.get(name), shard)}


def _names(layout: FlatLayout) -> list[str]:
    return [entry.name for block in (*layout.parameters, *layout.buffers) for entry in block.entries]


def _window(whole: Tensor, how: Lies | None, shard: int) -> Tensor:
    """A shard's part of a tensor, where that lies."""
    if not isinstance(how, Shard):
        return whole
    dim, shape = how.dim % whole.dim(), whole.shape
    blocks = whole.view(*shape[:dim], shape[dim] // how.block_size, how.block_size, *shape[dim + 1 :])
    return blocks.narrow(dim + 1, how.offsets[shard], how.sizes[shard])


@dataclass(frozen=True)
class FullStateGather:
    """A of the parts of all workers of a replica, one part after the other.

    Args:
        mine: this rank's part.
        whole: the layout of A.
        stages: in order.
        rank: whose.
        communicator: to the others; None: this part is all.
    """

    mine: FlatState
    whole: FlatLayout
    stages: Sequence[StageSharding]
    rank: int
    communicator: Communicator | None

    def __call__(self, *, wanted: bool) -> FlatState | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""
        spill = SpillAllocator()
        found = self.whole.new(spill.empty) if wanted else None
        written = set[str]()
        for source, stage, shard in self._sources():
            part = self._part(source, stage.parts[shard])
            names = {n for n, _ in part.named() if n not in written or isinstance(stage.lies.get(n), Shard)}
            if found is not None:
                ShardViews(part, found, stage.lies, shard, names).put()
                spill.settle()
            written |= names
        return found

    def _part(self, source: int, layout: FlatLayout) -> FlatState:
        """That of one rank."""
        part = self.mine if source == self.rank else layout.new()
        if self.communicator is not None:
            sent = self.communicator.sent_bytes  # it is for scores, so its bytes are not counted as training's
            for vector in part.vectors:
                self.communicator.broadcast(vector, source, "the gathering of A")
            self.communicator.sent_bytes = sent
        return part

    def _sources(self) -> Iterator[tuple[int, StageSharding, int]]:
        """Who tell of their parts: of the first replica, whose ranks come first, the first column of each stage."""
        start = 0
        for stage in self.stages:
            for shard in range(len(stage.parts)):
                yield start + shard, stage, shard
            start += stage.copies * len(stage.parts)
