"""Parameters of A in memory that all ranks of one host share: each writes its slice, and reads all of it."""

import contextlib
import os

from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.core.errors import PacelineError
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.flat_state import FlatState


class SharedParameters:
    """A whose parameters all ranks of a host share; running buffers are each rank's own.

    Args:
        own: A, in this rank's own memory.
        segment: has its parameters, and is taken over.
        arena: the segment's layout.
    """

    def __init__(self, own: FlatState, segment: SharedMemory, arena: Arena) -> None:
        self._own, self._segment, self._arena = own, segment, arena
        self.state = self._in(segment)
        """Writable: each rank writes its slice alone."""
        with contextlib.closing(segment.readable()) as readable:
            self.readable = self._in(readable)
            """For the replica: a write is a SIGSEGV."""

    @classmethod
    def of(cls, own: FlatState, context: RankContext) -> "SharedParameters | None":
        """Have the parameters once on this host; all ranks, which are on it, call it together.

        Args:
            own: A, the same on all ranks.
            context: of this rank.

        Returns:
            None: that can't be, for memory is short, or ranks are other users' or containers'.
        """
        arena = Arena()
        for number, vector in enumerate(own.parameters):
            arena.add(str(number), vector.shape, vector.dtype)
        segment: SharedMemory | None = None
        path: str | None = None
        if context.is_first:
            with contextlib.suppress(PacelineError):
                segment = SharedMemory.create("parameters", arena.size_bytes, reserved_bytes=arena.size_bytes)
                for vector, shared in zip(own.parameters, arena.tensors(segment).values(), strict=True):
                    shared.copy_(vector)
                path = f"/proc/{os.getpid()}/fd/{segment.fd}"
        path = context.gather(path, "the memory of A")[0]
        if path is not None and not context.is_first:
            with contextlib.suppress(OSError, PacelineError):
                segment = SharedMemory(os.open(path, os.O_RDWR), arena.size_bytes)
        have_all = all(context.gather(segment is not None, "the others' mapping of A"))
        if segment is None or have_all:
            return None if segment is None else cls(own, segment, arena)
        segment.close()
        return None

    def release(self) -> FlatState:
        """Return the parameters in a mapping that is this rank's own, copy-on-write; updates of A have ended."""
        with contextlib.closing(self._segment), contextlib.closing(self._segment.private()) as private:
            return self._in(private)

    def _in(self, segment: SharedMemory) -> FlatState:
        """Return A with the parameters as a segment maps them, which need not stay open for that."""
        return FlatState(self._own.layout, list(self._arena.tensors(segment).values()), self._own.buffers)
