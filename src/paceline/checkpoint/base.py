"""A chunk of a tensor: the rectangle of a full tensor that one process holds.

Whoever holds tensors describes them once, as chunks, and both directions follow: a checkpoint is written from chunks,
and read into them. How a model is split decides only which rectangles there are::

    data parallel   rank 0: all of w        shards   rank 0: w[:, :4]   ZeRO-1   rank 0: w[0:2, :], w[2, 0:3]
                    rank 1: nothing                  rank 1: w[:, 4:]            rank 1: w[2, 3:], w[3:6, :]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.checkpoint.manifest import DTYPES, chunk_key
from paceline.core.errors import InputError

# Names of optimizer state begin so: optimizer/<slot>/<full name of the parameter>.
OPTIMIZER = "optimizer/"
# Names of what a lossy compression keeps begin so.
COMPRESSION = "compression/"
# Of what own loops' optimizers say, as a running buffer of A; a run without a loop saves none.
STEP_OPTIONS = "loop/step_options"
# Names that no parameter may begin with: also of Δs that are held, versions that attempts read, what replicas keep.
RESERVED = (OPTIMIZER, COMPRESSION, "delta/", "read/", "replica/", "loop/")


_DTYPES = {getattr(torch, name): name for name in DTYPES}


@dataclass(frozen=True, eq=False, slots=True)
class TensorChunk:
    """A rectangle of a full tensor, and the memory of its values in this process.

    Args:
        name: of the full tensor.
        shape: of the full tensor.
        offset: of the rectangle's first element, one number for each dim.
        tensor: the values, of the rectangle's shape; may be a view, and is written when a checkpoint is loaded.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "TensorChunk":
        """Return the chunk that is all of a tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def key(self) -> str:
        """Name of the chunk within a file."""
        return chunk_key(self.name, self.offset)


def slot_name(slot: str, parameter: str) -> str:
    """Return the name of an optimizer's state tensor.

    >>> slot_name("exp_avg", "head.weight")
    'optimizer/exp_avg/head.weight'
    """
    return f"{OPTIMIZER}{slot}/{parameter}"


def parameter_of(name: str) -> str:
    """Return the name of the parameter whose state has this name, or the name itself.

    >>> parameter_of("optimizer/exp_avg/head.weight"), parameter_of("head.weight")
    ('head.weight', 'head.weight')
    """
    return name.split("/", 2)[2] if name.startswith(OPTIMIZER) else name


def check_saveable(state: Mapping[str, Tensor]) -> None:
    """Require that checkpoints can hold parameters and buffers, given by full name.

    Raises:
        InputError: a name begins like those of an optimizer's state, say, or a dtype can't be written.
    """
    for name, tensor in state.items():
        prefix = next(filter(name.startswith, RESERVED), None) if name != STEP_OPTIONS else None
        if prefix is not None:
            raise InputError(
                f"a parameter or buffer is called {name}, but checkpoints have other tensors by names that begin with "
                f"{prefix}; write another name for the module {name.partition('.')[0]}"
            )
        dtype_name(name, tensor)


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without "torch."; raise InputError if no checkpoint can hold it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InputError(
            f"{name} has dtype {tensor.dtype}, which safetensors has not; write one of: {', '.join(DTYPES)}"
        )
    return dtype


def chunks_of_range(name: str, shape: Sequence[int], start: int, vector: Tensor) -> Iterator[TensorChunk]:
    """Yield the chunks of elements ``start``, ``start + 1``, … of a tensor, counted as it lies in memory, row by row.

    Args:
        name: of the full tensor.
        shape: of the full tensor.
        start: number of the first element.
        vector: the values, with one dim.

    >>> import torch
    >>> [(c.offset, tuple(c.tensor.shape)) for c in chunks_of_range("w", (4, 3), 2, torch.arange(7))]
    [((0, 2), (1, 1)), ((1, 0), (2, 3))]
    """
    shape, stop = tuple(shape), start + len(vector)
    if start == stop:
        return
    if not shape:
        yield TensorChunk(name, shape, (), vector.view(()))
        return
    at = start
    while at < stop:
        # The largest run of whole sub-tensors that begins here: find the outermost dim along which one fits.
        dim = next(d for d in range(len(shape)) if at % prod(shape[d + 1 :]) == 0 and at + prod(shape[d + 1 :]) <= stop)
        each = prod(shape[dim + 1 :])
        index = at // each % shape[dim]
        count = min(shape[dim] - index, (stop - at) // each)
        offset = tuple(at // prod(shape[d + 1 :]) % shape[d] for d in range(len(shape)))
        extent = (1,) * dim + (count,) + shape[dim + 1 :]
        yield TensorChunk(name, shape, offset, vector[at - start : at - start + count * each].view(extent))
        at += count * each
