"""Which replicas keep a state of their own from Δ to Δ, and where a checkpoint has it: ``replica/<number>/<name>``.

Where a checkpoint or a replacement is to have it, a replica also leaves it as bytes beside its Δ, which other processes
read: a length, JSON (what is no tensor; name, rectangle and dtype of each chunk), and the chunks, each aligned. Of a
replica of several workers each leaves what it has.
"""

import functools
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.aggregation.state_codec import kind
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import ChunksInMemory
from paceline.comm.shared_memory import SharedMemory, aligned
from paceline.core.delta import InPlace
from paceline.core.errors import InputError, PacelineError
from paceline.core.types import ReplicaId
from paceline.engine.run_context import RunContext
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import KeepsState
from paceline.replica.optimizer_state import merged_json

# Key of what is no tensor of these states, by replica, among what a checkpoint has of the engine.
KEY = "replicas"

# Bounds of these bytes: vectors of A (own parameters, an optimizer's state), and bytes of what is no tensor.
VECTORS, HEAD = 9, 1 << 24

# Bytes of the length before the JSON.
LENGTH_BYTES = 8


def keeps_own_state(context: RunContext) -> bool:
    """Return whether replicas step by themselves, each with an optimizer of its own."""
    return context.local_sgd or isinstance(context.delta, InPlace)


def own_bytes(context: RunContext, state: FlatLayout) -> int:
    """Return more bytes than the state of a replica, or of one of its workers, takes with any optimizer of torch.

    0: replicas keep nothing, or no checkpoint, no replacement and no run that goes on would read it.
    """
    job = context.job
    is_read = job.checkpoint is not None or job.resume is not None or job.on_death == "replace" or job.strategy.elastic
    if not (is_read and keeps_own_state(context)):
        return 0
    return aligned(VECTORS * sum(b.elements * b.dtype.itemsize for b in (*state.parameters, *state.buffers)) + HEAD)


@dataclass(frozen=True)
class OwnState:
    """What one replica keeps, or one of its workers.

    Args:
        saved: what is no tensor.
        parts: chunks of the tensors.
    """

    saved: Mapping[str, Any]
    parts: Sequence[TensorChunk]

    @classmethod
    def of(cls, own: KeepsState) -> "OwnState | None":
        """Return what a replica keeps now, its own tensors; None: nothing yet."""
        saved = own.state_json()
        return None if saved is None else cls(saved, own.chunks())

    @classmethod
    def merged(cls, states: "Sequence[OwnState]") -> "OwnState":
        """Return what the workers of one replica keep together."""
        return cls(merged_json([state.saved for state in states]), [part for state in states for part in state.parts])

    @classmethod
    def saved_for(cls, context: RunContext, replica: ReplicaId) -> "OwnState | None":
        """Return what a checkpoint has of a replica that goes on with it, if anything."""
        saved, resume = saved_states(context).get(replica), context.job.resume
        if saved is None or resume is None:
            return None
        part = resume.checkpoint.under(replica_prefix(replica))
        return cls(saved, [TensorChunk.whole(name, part.read(name)) for name in part.names()])

    @classmethod
    def read(cls, buffer: memoryview) -> "OwnState":
        """Return what :meth:`write` has written; the tensors are views."""
        size = int.from_bytes(buffer[:LENGTH_BYTES], "little")
        saved, rows = json.loads(bytes(buffer[LENGTH_BYTES : LENGTH_BYTES + size]))
        parts, at = list[TensorChunk](), aligned(LENGTH_BYTES + size)
        for name, full, offset, shape, dtype in rows:
            tensor = _view(buffer, at, shape, getattr(torch, dtype))
            parts.append(TensorChunk(name, tuple(full), tuple(offset), tensor))
            at += aligned(tensor.nbytes)
        return cls(saved, parts)

    def write(self, memory: Callable[[int], memoryview | None]) -> int:
        """Write it as bytes; return how many, or 0 where there is no memory.

        Args:
            memory: number of bytes -> so many; None: there are not.
        """
        tensors = [part.tensor.detach() for part in self.parts]
        rows = [
            (part.name, part.shape, part.offset, tuple(tensor.shape), str(tensor.dtype)[6:])
            for part, tensor in zip(self.parts, tensors, strict=True)
        ]
        head = json.dumps([self.saved, rows]).encode()
        at = aligned(LENGTH_BYTES + len(head))
        size = at + sum(aligned(tensor.nbytes) for tensor in tensors)
        buffer = memory(size)
        if buffer is None:
            return 0
        buffer[:LENGTH_BYTES] = len(head).to_bytes(LENGTH_BYTES, "little")
        buffer[LENGTH_BYTES : LENGTH_BYTES + len(head)] = head
        for tensor in tensors:
            _view(buffer, at, tensor.shape, tensor.dtype).copy_(tensor)
            at += aligned(tensor.nbytes)
        return size

    def chunks(self, replica: ReplicaId) -> Iterator[TensorChunk]:
        """Yield the tensors as a checkpoint names them."""
        for part in self.parts:
            yield replace(part, name=replica_prefix(replica) + part.name)

    def restore(self, own: KeepsState, layout: FlatLayout) -> None:
        """Let a replica go on with it, from the A that there is then; ``layout`` is that of A."""
        own.restore({**self.saved, "anew": True}, ChunksInMemory(self.parts), layout)


class OwnBuffers:
    """Equal buffers in shared memory, for what replicas or their workers keep; each has memory once it is written.

    Args:
        segment: of shared memory.
        begin: where the first one begins.
        each: address space of each.
    """

    def __init__(self, segment: SharedMemory, begin: int, each: int) -> None:
        self._segment, self._begin, self._each = segment, begin, each
        self._reserved = defaultdict[int, int](int)
        """Bytes of each that this process has given memory."""
        self.sizes = defaultdict[int, int](int)
        """Bytes of each that this process has written last."""

    def view(self, index: int, size: int | None = None) -> memoryview:
        """Return the first bytes of a buffer, or all."""
        begin = self._begin + index * self._each
        return self._segment.buffer[begin : begin + (self._each if size is None else size)]

    def write(self, index: int, own: OwnState | None) -> int:
        """Write what is kept, if anything; return how many bytes, or 0: nothing, or there is no memory for it."""
        self.clear(index)
        size = self.sizes[index] = 0 if own is None else own.write(functools.partial(self.memory, index))
        return size

    def clear(self, index: int) -> None:
        """Have nothing kept there."""
        if self._reserved[index]:
            self.view(index, LENGTH_BYTES)[:] = bytes(LENGTH_BYTES)

    def read(self, index: int) -> OwnState | None:
        """Return what was written last; None: nothing."""
        return OwnState.read(self.view(index)) if any(self.view(index, LENGTH_BYTES)) else None

    def memory(self, index: int, size: int) -> memoryview | None:
        """Return the first bytes of a buffer, to be written; None: there is no memory for them."""
        if size > self._each:
            return None
        if self._reserved[index] < size:
            try:
                self._segment.reserve(self._begin + index * self._each, size)
            except PacelineError:
                return None
            self._reserved[index] = size
        return self.view(index, size)


@dataclass(frozen=True)
class OwnBuffer:
    """One of them, as what another host keeps or is to keep comes by a connection.

    Args:
        _all: the buffers.
        _index: of this one.
    """

    _all: OwnBuffers
    _index: int

    @property
    def written(self) -> memoryview:
        """Return the bytes that this process has written last."""
        return self._all.view(self._index, self._all.sizes[self._index])

    def cleared(self, size: int) -> memoryview | None:
        """Return so many bytes, to be written; None: there is no memory for them, and nothing is kept."""
        self._all.clear(self._index)
        return self._all.memory(self._index, size)


def _view(buffer: memoryview, offset: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    shape = tuple(shape)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of memory that can only be read
        return torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def replica_prefix(replica: ReplicaId) -> str:
    """Return what the names of a replica's own tensors begin with."""
    return f"replica/{replica}/"


def replica_chunks(replica: ReplicaId, own: KeepsState) -> Iterator[TensorChunk]:
    """Yield what a replica keeps."""
    for chunk in own.chunks():
        yield replace(chunk, name=replica_prefix(replica) + chunk.name)


def restore_replica(context: RunContext, replica: ReplicaId, own: KeepsState, layout: FlatLayout) -> None:
    """Let a replica go on with what a checkpoint has of it, if anything.

    Args:
        context: of the run.
        replica: its number.
        own: the replica.
        layout: of A.
    """
    saved, resume = saved_states(context).get(replica), context.job.resume
    if saved is not None and resume is not None:
        own.restore(saved, resume.checkpoint.under(replica_prefix(replica)), layout)


def saved_states(context: RunContext) -> dict[ReplicaId, Mapping[str, Any]]:
    """Return what is no tensor of the states with which replicas go on; of the others, there is none.

    Those of another policy are none that replicas could go on with, nor are those of an optimizer with other options.
    """
    resume = context.job.resume
    if resume is None or not resume.options or not keeps_own_state(context):
        return {}
    run = resume.run
    if run.coordinator.policy_kind != kind(context.policy):
        return {}
    saved = run.engine.get(KEY, {})
    if not isinstance(saved, Mapping) or not all(
        str(r).isdecimal() and isinstance(v, Mapping) for r, v in saved.items()
    ):
        raise InputError(f"{resume.folder} can't be read: its states of replicas are none")
    return {int(replica): state for replica, state in saved.items() if int(replica) < context.replicas}
