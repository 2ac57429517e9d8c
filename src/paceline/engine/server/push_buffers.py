"""The memory of one replica's pushes, which other workers of it, and a server on its host, map."""

import numpy as np
import torch

from paceline.comm.shared_memory import Arena
from paceline.comm.shm.region import TOKEN_BYTES
from paceline.comm.shm.rendezvous import SegmentAddress, address_of, create_segment
from paceline.core.errors import PacelineError
from paceline.core.types import Clock
from paceline.engine.own_states import OwnBuffer, OwnBuffers, OwnState
from paceline.engine.server.messages import Bytes, PushCompletion, arrays_of
from paceline.replica.flat_state import FlatLayout, FlatState


class PushBuffers:
    """The memory in which a replica writes Δ and what it keeps, and in which it reads A.

    What it keeps is in one buffer after even attempts and in another after odd ones: so the newest that the server has
    been told of is whole, also where the replica dies while it writes the other one. Of a replica of several workers,
    all but the first have a buffer for their part of it besides.

    Args:
        layout: of A.
        own_bytes: address space of each of these buffers.
        workers: of the replica.
        address: where another process finds the memory; None: this one creates it.
        sparse: whether it has memory only where it is written, since one worker has its part of A there.
        pull_ahead: whether the next A comes while this one is read, to memory of its own.

    Raises:
        PacelineError: there is not so much, or other memory at the address.
        OSError: there is none at the address.
    """

    def __init__(
        self,
        layout: FlatLayout,
        address: SegmentAddress | None = None,
        *,
        own_bytes: int = 0,
        workers: int = 1,
        sparse: bool = False,
        pull_ahead: bool = False,
    ) -> None:
        arena = Arena()
        arena.add("token", (TOKEN_BYTES,), torch.uint8)
        blocks = [*layout.parameters, *layout.buffers]
        for name in ("delta", "sent", *(("coming",) if pull_ahead else ())):
            for i, block in enumerate(blocks):
                arena.add(f"{name} {i}", (block.elements,), block.dtype)
        arena.add("version", (), torch.int64)
        touched = arena.size_bytes
        own_begin = arena.add("own", ((workers + 1) * own_bytes,), torch.uint8)
        if address is None:
            self._segment = create_segment("push", arena.size_bytes, reserved_bytes=0 if sparse else touched)
        elif address.size_bytes == arena.size_bytes:
            self._segment = address.open()
        else:
            raise PacelineError(f"Δ and A have {arena.size_bytes} bytes, and {address.size_bytes} were offered")

        def state(name: str) -> FlatState:
            vectors = [arena.tensor(self._segment, f"{name} {i}") for i in range(len(blocks))]
            return FlatState(layout, vectors[: len(layout.parameters)], vectors[len(layout.parameters) :])

        self.delta, self.sent = state("delta"), state("sent")
        """Δ; the A that the replica reads."""
        self.coming = state("coming") if pull_ahead else self.sent
        """The A that was sent last."""
        self.version = arena.tensor(self._segment, "version")
        """Of the A that is read, for other workers of the replica."""
        self.delta_arrays, self.coming_arrays = arrays_of(self.delta), arrays_of(self.coming)
        self._own = OwnBuffers(self._segment, own_begin, own_bytes)

    def arrays(self, completion: PushCompletion) -> list[Bytes]:
        """Return Δ, and, if it is told of, what the replica keeps after this attempt."""
        attempt, size = completion.attempt, completion.own_bytes
        own = [np.frombuffer(self._own.view(attempt % 2, size), np.uint8)] if size else []
        return [*self.delta_arrays, *own]

    def leave(self, attempt: Clock, own: OwnState | None) -> int:
        """Write what the replica keeps after an attempt, if anything; return how many bytes, or 0 where it is not."""
        return self._own.write(attempt % 2, own)

    def kept(self, attempt: Clock) -> OwnState | None:
        """Return what the replica has left of what it kept after an attempt."""
        return self._own.read(attempt % 2)

    def leave_part(self, worker: int, own: OwnState | None) -> None:
        """Write what a worker but the first keeps, if anything."""
        self._own.write(worker + 1, own)

    def part(self, worker: int) -> OwnState | None:
        """Return what a worker but the first has left; None: nothing."""
        return self._own.read(worker + 1)

    def kept_bytes(self, attempt: Clock) -> memoryview:
        """Return what this process has written of what the replica keeps after an attempt; empty: nothing."""
        return OwnBuffer(self._own, attempt % 2).written

    def part_buffer(self, worker: int) -> OwnBuffer:
        """Return the buffer of what a worker but the first keeps."""
        return OwnBuffer(self._own, worker + 1)

    @property
    def address(self) -> SegmentAddress:
        """Where another process finds it."""
        return address_of(self._segment)

    def close(self) -> None:
        """Release it; it goes with the last array."""
        self._segment.close()
