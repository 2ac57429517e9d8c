"""A as a few flat vectors, one for each dtype, of which each parameter and each running buffer of a module is a slice.

A :class:`FlatLayout` is computed from the module alone, so all processes compute the same one. A :class:`FlatState`
is one set of vectors of that layout: A itself, a copy that a replica reads, or a Δ::

    parameters[0]   | conv.weight ..... | conv.bias | fc.weight ............ | fc.bias |     float32
    buffers[0]      | norm.running_mean | norm.running_var |                                 float32
    buffers[1]      | norm.num_batches_tracked |                                             int64

It holds only what training changes: trainable parameters, and buffers that a training step writes.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from paceline.checkpoint.base import STEP_OPTIONS
from paceline.core.errors import InputError
from paceline.core.partitioning import balanced
from paceline.core.types import Version
from paceline.device import CPU, moved
from paceline.replica.module_utils import tensors_of

# (elements, dtype) -> a flat vector of them.
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


def is_averaged(dtype: torch.dtype) -> bool:
    """Return whether running buffers of this dtype are averaged; others count, or say whether something was seen."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class TensorEntry:
    """The slice of a vector that is one tensor."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True)
class DtypeBuffer:
    """The layout of one vector: the tensors of one dtype, in the module's order."""

    dtype: torch.dtype
    entries: tuple[TensorEntry, ...]

    @property
    def elements(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of the vector ``flat``."""
        return [flat[e.start : e.stop].view(e.shape) for e in self.entries]


@dataclass(frozen=True)
class FlatLayout:
    """The places of all tensors of A; ``parameters`` and ``buffers`` have one block for each dtype."""

    parameters: tuple[DtypeBuffer, ...]
    buffers: tuple[DtypeBuffer, ...]

    @classmethod
    def of(cls, module: nn.Module, running_buffers: Iterable[str] = ()) -> "FlatLayout":
        """Return the layout of a module's trainable parameters (tied ones once) and of the named buffers."""
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError(
                "the model has no parameter to train (none with requires_grad=True); "
                "write model=lambda: nn.Linear(…) or unfreeze a layer"
            )
        names = set(running_buffers)
        buffers = [(n, b) for n, b in module.named_buffers() if n in names]
        parameters, running = ([(n, t.shape, t.dtype) for n, t in named] for named in (trainable, buffers))
        return cls(_blocks(parameters), _blocks(running))

    @property
    def parameter_names(self) -> list[str]:
        """Names of the trainable parameters, in order."""
        return [e.name for block in self.parameters for e in block.entries]

    @property
    def names(self) -> list[str]:
        """Names of all tensors, parameters first."""
        return [e.name for block in (*self.parameters, *self.buffers) for e in block.entries]

    def part(self, names: Collection[str]) -> "FlatLayout":
        """Return the layout of these tensors alone, in the same order; there may be none."""
        return self.reshaped(lambda name, shape: shape if name in names else None)

    def reshaped(self, shape: Callable[[str, torch.Size], Sequence[int] | None]) -> "FlatLayout":
        """Return the layout of parts of these tensors, in the same order.

        Args:
            shape: (name, shape) -> that of its part; None: it has none.
        """

        def parts(blocks: Iterable[DtypeBuffer]) -> tuple[DtypeBuffer, ...]:
            shapes = [(e.name, shape(e.name, e.shape), block.dtype) for block in blocks for e in block.entries]
            return _blocks((name, torch.Size(size), dtype) for name, size, dtype in shapes if size is not None)

        return FlatLayout(parts(self.parameters), parts(self.buffers))

    def new(self, allocate: Allocate | None = None, device: torch.device | str | None = None) -> "FlatState":
        """Return an uninitialised state, in ordinary memory unless an allocator or a device is given."""
        make = allocate or (lambda n, dtype: torch.empty(n, dtype=dtype, device=device))
        parameters, buffers = ([make(b.elements, b.dtype) for b in group] for group in (self.parameters, self.buffers))
        return FlatState(self, parameters, buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return sum(b.elements * b.dtype.itemsize for b in (*self.parameters, *self.buffers))

    @property
    def parameter_bytes(self) -> int:
        """|A|·b: bytes of the trainable parameters."""
        return sum(b.elements * b.dtype.itemsize for b in self.parameters)


@dataclass
class FlatState:
    """One set of vectors of a layout."""

    layout: FlatLayout
    parameters: list[Tensor]
    buffers: list[Tensor]
    version: Version = field(default=0, compare=False)
    """Of the A that a client pulls: t, the number of its updates."""
    _views: "Views | None" = field(default=None, repr=False, compare=False)

    @property
    def vectors(self) -> list[Tensor]:
        """All vectors: those of parameters, then those of buffers."""
        return [*self.parameters, *self.buffers]

    @property
    def device(self) -> torch.device:
        """Device of all vectors; the CPU where there is none."""
        for vectors in (self.parameters, self.buffers):
            if vectors:
                return vectors[0].device
        return CPU

    @property
    def views(self) -> "Views":
        """Each tensor as a view; created once."""
        if self._views is None:  # a state is bound every step, and slicing costs more than the binding
            self._views = Views(
                [v for b, flat in zip(self.layout.parameters, self.parameters, strict=True) for v in b.views(flat)],
                [v for b, flat in zip(self.layout.buffers, self.buffers, strict=True) for v in b.views(flat)],
            )
        return self._views

    def copy_(self, other: "FlatState") -> "FlatState":
        """Copy another state's values; returns this state."""
        for vector, source in zip(self.vectors, other.vectors, strict=True):
            vector.copy_(source)
        return self

    def empty_like(self) -> "FlatState":
        """Return an uninitialised state of the same layout on the same device."""
        return self.layout.new(device=self.device)

    def clone(self) -> "FlatState":
        """Return a copy on the same device, in ordinary memory."""
        parameters, buffers = ([v.clone() for v in vectors] for vectors in (self.parameters, self.buffers))
        return FlatState(self.layout, parameters, buffers, self.version)

    def to(self, device: torch.device) -> "FlatState":
        """Return the state on a device: itself, or a copy."""
        if self.device == device:
            return self
        parameters, buffers = ([moved(v, device) for v in vectors] for vectors in (self.parameters, self.buffers))
        return FlatState(self.layout, parameters, buffers, self.version)

    def take(self, other: "FlatState") -> "FlatState":
        """Copy the tensors that both have, by name; returns this state."""
        own = dict(self.named())
        for name, view in other.named():
            if name in own:
                own[name].copy_(view)
        return self

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (full name, view) of every tensor, parameters first."""
        return ((entry.name, view) for entry, view in self.entries())

    def entries(self) -> "Iterator[tuple[TensorEntry, Tensor]]":
        """Yield (entry of the layout, view) of every tensor, parameters first."""
        entries = (e for b in (*self.layout.parameters, *self.layout.buffers) for e in b.entries)
        return zip(entries, (*self.views.parameters, *self.views.buffers), strict=True)

    def digest(self) -> str:
        """Return the SHA-256 of all bytes of the model: what a loop's optimizer says is not of it."""
        return digest(view for name, view in self.named() if name != STEP_OPTIONS)


@dataclass(frozen=True)
class Views:
    """A state's tensors in their shapes, in layout order."""

    parameters: list[Tensor]
    buffers: list[Tensor]


def read(module: nn.Module, state: FlatState) -> FlatState:
    """Copy a module's values into ``state``; returns it."""
    tensors = tensors_of(module)
    with torch.no_grad():
        for name, view in state.named():
            view.copy_(tensors[name])
    return state


def write(module: nn.Module, state: FlatState) -> nn.Module:
    """Copy ``state`` into a module; returns it."""
    tensors = tensors_of(module)
    with torch.no_grad():
        for name, view in state.named():
            tensors[name].copy_(view)
    return module


def fragment_slices(whole: FlatLayout, layout: FlatLayout, count: int) -> list[list[slice]]:
    """Return the slice of each parameter vector that is in each of so many fragments of A.

    A fragment is a row of whole parameters; the largest one is as small as it can be.

    Args:
        whole: layout of A.
        layout: of A, or of a part of it.
        count: of fragments.

    Raises:
        InputError: A has fewer parameters.
    """
    sizes = [entry.stop - entry.start for block in whole.parameters for entry in block.entries]
    if count > len(sizes):
        raise InputError(
            f"fragments={count}, but the model has {len(sizes)} parameters to train, and a fragment is one of them at "
            f"least; write fragments={len(sizes)} or fewer"
        )
    starts = [0, *balanced(sizes, count), len(sizes)]
    found = list[list[slice]]()
    for first, last in pairwise(starts):
        names = set(whole.parameter_names[first:last])
        own = ([entry for entry in block.entries if entry.name in names] for block in layout.parameters)
        found.append([slice(entries[0].start, entries[-1].stop) if entries else slice(0, 0) for entries in own])
    return found


def finite(vectors: list[Tensor], loss: float) -> bool:
    """Return whether a loss and all elements are finite."""
    if not math.isfinite(loss):
        return False
    # One pass in the usual case: a sum is finite only if all its terms are; it may still overflow.
    return all(math.isfinite(abs(v.sum().item())) or bool(torch.isfinite(v).all()) for v in vectors)


def digest_of(module: nn.Module, layout: FlatLayout) -> str:
    """Return the digest of the state that :func:`read` would fill, without allocating it."""
    tensors = tensors_of(module)
    blocks = (*layout.parameters, *layout.buffers)
    return digest(tensors[e.name] for block in blocks for e in block.entries if e.name != STEP_OPTIONS)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of all bytes of tensors, one after the other."""
    sha = hashlib.sha256()
    for tensor in tensors:  # as bytes: NaNs and signed zeros count
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _blocks(tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> tuple[DtypeBuffer, ...]:
    by_dtype: dict[torch.dtype, list[TensorEntry]] = {}
    for name, shape, dtype in tensors:
        entries = by_dtype.setdefault(dtype, [])
        start = entries[-1].stop if entries else 0
        entries.append(TensorEntry(name, shape, start, start + shape.numel()))
    return tuple(DtypeBuffer(dtype, tuple(entries)) for dtype, entries in by_dtype.items())
