"""What travels through Ray's object store: a run's job once, and the vectors of A and Δ with every step.

An object of the store lies once on each node, and whoever gets it maps it. So the arrays of a job are left out of its
pickle, as :mod:`paceline.comm.shipping` leaves them out, and are views of the store in each replica. Nobody may write
into them: numpy's arrays are read-only, but Ray 2.60 maps the memory itself to be written, and torch does not know.
"""

import pickle
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm.shipping import parts_of
from paceline.replica.state import Layout, State

Bytes: TypeAlias = NDArray[np.uint8]
"""An array whatever its numbers are; numpy has no name for some of torch's."""


def pack(obj: object) -> list[Bytes]:
    """An object graph as arrays: its pickle, then each large array beside it; raises InputError where it can't be."""
    return [np.frombuffer(part, np.uint8) for part in parts_of(obj)]


def unpack(parts: Sequence[Bytes]) -> Any:
    """Rebuild the object graph; its large arrays are views of ``parts``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch would have its memory writable
        return pickle.loads(parts[0].tobytes(), buffers=parts[1:])


def arrays_of(state: State) -> list[Bytes]:
    """The vectors of a state, in its order; nothing is copied."""
    return [vector.view(torch.uint8).numpy() for vector in state.vectors]


def state_of(layout: Layout, arrays: Sequence[Bytes]) -> State:
    """The state whose vectors these are; nothing is copied."""
    blocks = (*layout.parameters, *layout.buffers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as above
        vectors = [torch.from_numpy(a).view(b.dtype) for a, b in zip(arrays, blocks, strict=True)]
    return State(layout, vectors[: len(layout.parameters)], vectors[len(layout.parameters) :])
