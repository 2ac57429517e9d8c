"""Compression of what one replica pushes to one server: a message for each vector of parameters of the server's slice.

What a message leaves out is added to the next (error feedback), in the replica's memory alone: it is lost with it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.compression import Compression, parse
from paceline.core.errors import PacelineError
from paceline.engine.run_context import RunContext
from paceline.engine.server.messages import Bytes
from paceline.replica.flat_slices import FlatSlice
from paceline.replica.flat_state import FlatState


class DeltaCodec:
    """Encodes at the replica, with a state of its own, and decodes at the server.

    Args:
        compression: of all.
        part: the server's slice of A.
    """

    def __init__(self, compression: Compression[Any], part: FlatSlice) -> None:
        self._compression = compression
        self._blocks = [([tuple(e.shape) for e in b.entries], b.dtype) for b in part.layout.parameters]
        self._states = list[Any]()

    @classmethod
    def of(cls, context: RunContext, part: FlatSlice) -> "DeltaCodec | None":
        """Return that of a run; None: nothing is compressed."""
        text = context.job.strategy.compression
        return None if text == "none" else cls(parse(text), part)

    @property
    def nbytes(self) -> int:
        """Bytes of the messages of one Δ."""
        return sum(self._compression.message_bytes(*block) for block in self._blocks)

    def encode(self, vectors: Sequence[Tensor]) -> list[Bytes]:
        """Return the messages of the slice of a Δ, whose vectors become what the server will read."""
        if not self._states:
            self._states = [self._compression.start(*block) for block in self._blocks]
        pairs = zip(self._states, vectors, strict=True)
        return [self._compression.encode(state, vector).numpy() for state, vector in pairs]

    def messages(self) -> list[Bytes]:
        """Return memory for the messages of a Δ."""
        return [np.empty(self._compression.message_bytes(*block), np.uint8) for block in self._blocks]

    def decode(self, messages: Sequence[Bytes], out: FlatState) -> None:
        """Write the slice of a Δ; raises PacelineError where a message is none."""
        for (shapes, dtype), message, vector in zip(self._blocks, messages, out.parameters, strict=True):
            if len(message) != self._compression.message_bytes(shapes, dtype):
                raise PacelineError(f"a message of {self._compression} has {len(message)} bytes")
            self._compression.decode(shapes, torch.from_numpy(message), vector)
