"""What one rank holds of A and of the optimizer's state, as chunks of the full tensors.

A parameter's part on a rank is cut twice at most: by the shards of its stage, and by ZeRO-1::

    full tensor -- placement among shards --> this shard's part -- slice of ZeRO-1 --> what this rank steps on
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.checkpoint.base import TensorChunk, chunks_of_range
from paceline.engine.checkpointing import Snapshot
from paceline.engine.distributed.kept_residuals import KeptResiduals
from paceline.engine.distributed.zero1 import ZeroOptimizer
from paceline.engine.run_state import ResumePoint
from paceline.engine.spmd.shard_views import PartChunks
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import DtypeBuffer, TensorEntry
from paceline.replica.optimizer_state import Describe


@dataclass(frozen=True)
class HeldTensors:
    """The tensors of one rank.

    Args:
        state: its part of A and of the running buffers.
        optimizer: steps on its parameters, or on a slice of them; None: it has none.
        describe: a tensor of the optimizer's state -> its chunks.
        writes: name of a tensor of A -> whether this rank writes it; of several that have it, one does.
        writes_slot: a parameter of the optimizer's layout and its name -> whether this rank writes its state.
        writes_any: whether there is anything that this rank writes.
        kept: by a lossy compression; None: there is none.
        own: what the replica itself keeps from Δ to Δ.
    """

    state: Sequence[TensorChunk]
    optimizer: FlatOptimizer | None
    describe: Describe
    writes: Callable[[str], bool]
    writes_slot: Callable[[TensorEntry, str], bool]
    writes_any: bool = True
    kept: KeptResiduals | None = None
    own: Sequence[TensorChunk] = ()

    def written(self) -> list[TensorChunk]:
        """Return the chunks that this rank writes."""

        def describe(prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterator[TensorChunk]:
            for chunk in self.describe(prefix, entry, tensor):
                if self.writes_slot(entry, chunk.name.removeprefix(prefix)):
                    yield chunk

        vectors = self.optimizer.chunks(describe) if self.optimizer is not None else []
        kept = self.kept.written() if self.kept is not None else []
        return [*(chunk for chunk in self.state if self.writes(chunk.name)), *vectors, *kept, *self.own]

    def state_json(self) -> dict[str, Any]:
        """Return what of the optimizer's state is no tensor."""
        return self.optimizer.state_json(self.describe) if self.optimizer is not None and self.writes_any else {}

    def restore(self, resume: ResumePoint) -> None:
        """Read all that this rank holds."""
        checkpoint = resume.checkpoint
        checkpoint.read_into(self.state)
        if self.optimizer is not None:
            self.optimizer.restore(resume.optimizer, checkpoint, self.describe, options=resume.options)
        if self.kept is not None:
            self.kept.restore(resume, checkpoint)

    def copied(self, engine: Mapping[str, Any]) -> Snapshot:
        """Return copies of what this rank writes; ``engine`` is what only the engine understands."""
        chunks = [replace(chunk, tensor=chunk.tensor.clone()) for chunk in self.written()]
        return Snapshot(chunks, self.state_json(), engine)


@dataclass(frozen=True)
class SliceChunks:
    """Describes slices of a part's vectors, as ZeRO-1 cuts them.

    Args:
        part: describes the part.
        slices: the vector's layout and the offset of each slice, by the identity of the slice's only entry.
    """

    part: PartChunks
    slices: Mapping[int, tuple[DtypeBuffer, int]]

    def __call__(self, prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterator[TensorChunk]:
        """Yield the chunks of a slice."""
        block, start = self.slices[id(entry)]
        vector = tensor.reshape(-1)
        for own in block.entries:
            low, high = max(own.start, start), min(own.stop, start + len(vector))
            if low < high:
                elements = vector[low - start : high - start]
                for chunk in chunks_of_range(prefix + own.name, own.shape, low - own.start, elements):
                    yield from self.part.place(prefix, own.name, chunk)


def part_tensors(
    part: PartChunks, state: Sequence[TensorChunk], optimizer: FlatOptimizer | None, owned: Collection[str]
) -> HeldTensors:
    """Return the tensors of a rank that has a part of A, and steps on all of it.

    Args:
        part: describes it.
        state: its chunks.
        optimizer: of the rank.
        owned: names of the tensors that it writes.
    """
    writes = among(owned)
    return HeldTensors(state, optimizer, part, writes, lambda _, name: writes(name), bool(owned))


def zero_tensors(
    update: ZeroOptimizer, part: PartChunks, state: list[TensorChunk], *, first: bool, owned: Collection[str]
) -> HeldTensors:
    """Return the tensors of a rank under ZeRO-1: its part of A, and the optimizer's state of its slice.

    Args:
        update: of the rank.
        part: describes its part of A.
        state: the chunks of that.
        first: whether it is the first of the ranks that have this part.
        owned: names that the ranks with this part write.
    """
    writes = among(owned)

    def writes_slot(entry: TensorEntry, name: str) -> bool:
        return writes(name) and (first or id(entry) not in update.common_entries)

    describe = SliceChunks(part, update.slices) if update.slices else part
    return HeldTensors(state, update.optimizer, describe, lambda name: first and writes(name), writes_slot)


def among(names: Collection[str]) -> Callable[[str], bool]:
    """Return whether a name is one of these, as a function."""
    return set(names).__contains__
