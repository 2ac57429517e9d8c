"""What one worker has of A, and where it lies in the whole.

::

    whole    | stem.weight ......... | head.weight .......... | head.bias |
                                       ^^^^^^^^^^               ^^^^^^^^^
    part                             | head.weight | head.bias |             stage 1, shard 0
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.mesh import Mesh, Place
from paceline.engine.team.parts import Divided
from paceline.replica.state import Layout, State
from paceline.replica.tensor.layouts import Layout as Lies
from paceline.replica.tensor.layouts import Split
from paceline.replica.tensor.parts import counts


class Windows:
    """A part of A, in place and as a copy.

    Args:
        part: a worker's.
        whole: all of A, or of a Δ.
        lies: how tensors lie among the shards of its stage, by name.
        shard: whose part it is.
        names: those that are looked at; None: all that the part has.
    """

    def __init__(
        self, part: State, whole: State, lies: Mapping[str, Lies], shard: int, names: Collection[str] | None = None
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


def answered_for(stages: Sequence[Divided], mesh: Mesh, place: Place) -> set[str]:
    """The tensors that a worker writes: what several have is one's to write, unless they have different parts of it.

    Args:
        stages: of the replica.
        mesh: of its workers.
        place: of the worker.
    """
    if mesh.column(place).copy:
        return set()
    shard = mesh.shard(place)
    earlier = {name for stage in stages[: place.stage] for part in stage.parts for name in _names(part)}
    mine = stages[place.stage]
    held = _names(mine.parts[shard])
    return {name for name in held if name not in earlier and counts(mine.lies.get(name), shard)}


def _names(layout: Layout) -> list[str]:
    return [entry.name for block in (*layout.parameters, *layout.buffers) for entry in block.entries]


def _window(whole: Tensor, how: Lies | None, shard: int) -> Tensor:
    """A shard's part of a tensor, where that lies."""
    if not isinstance(how, Split):
        return whole
    dim, shape = how.dim % whole.dim(), whole.shape
    blocks = whole.view(*shape[:dim], shape[dim] // how.block, how.block, *shape[dim + 1 :])
    return blocks.narrow(dim + 1, how.starts()[shard], how.sizes[shard])
