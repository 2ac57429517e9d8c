"""A as a few flat vectors: where each parameter and each running buffer of a module lies.

A :class:`FlatLayout` is computed from the module alone, so all processes compute the same one. A :class:`FlatState`
is one set of vectors laid out so: A itself, a copy that a replica reads, or a Δ. There is one vector for each dtype::

    parameters[0]   | conv.weight ..... | conv.bias | fc.weight ............ | fc.bias |     float32
    buffers[0]      | norm.running_mean | norm.running_var |                                 float32
    buffers[1]      | norm.num_batches_tracked |                                             int64

Only what training changes is in it: trainable parameters, and buffers that a training step writes.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) -> a flat vector."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place in its vector."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True)
class DtypeBuffer:
    """One vector: the tensors of one dtype, in the module's order."""

    dtype: torch.dtype
    entries: tuple[TensorEntry, ...]

    @property
    def elements(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors of this block as views of ``flat``."""
        return [flat[e.start : e.stop].view(e.shape) for e in self.entries]


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor of A lies; ``parameters`` and ``buffers`` have one block for each dtype."""

    parameters: tuple[DtypeBuffer, ...]
    buffers: tuple[DtypeBuffer, ...]

    @classmethod
    def of(cls, module: nn.Module, running_buffers: Iterable[str] = ()) -> "FlatLayout":
        """The layout of a module's trainable parameters (tied ones once) and of the named buffers."""
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError(
                "the model has no parameter to train (none with requires_grad=True); "
                "write model=lambda: nn.Linear(…) or unfreeze a layer"
            )
        wanted = set(running_buffers)
        return cls(_blocks(trainable), _blocks((n, b) for n, b in module.named_buffers() if n in wanted))

    @property
    def parameter_names(self) -> list[str]:
        """Of the trainable parameters, in order."""
        return [e.name for block in self.parameters for e in block.entries]

    def part(self, names: Collection[str]) -> "FlatLayout":
        """The layout of these tensors alone, in the same order; there may be none."""
        return FlatLayout(_chosen(self.parameters, names), _chosen(self.buffers, names))

    def reshaped(self, shape: Callable[[str, torch.Size], Sequence[int] | None]) -> "FlatLayout":
        """The layout of parts of these tensors, in the same order.

        Args:
            shape: (name, shape) -> that of the part; None: there is none.
        """
        return FlatLayout(_reshaped(self.parameters, shape), _reshaped(self.buffers, shape))

    def new(self, allocate: Allocate | None = None) -> "FlatState":
        """An uninitialised state, from ordinary memory where no allocator is given."""
        make = allocate or (lambda n, dtype: torch.empty(n, dtype=dtype))
        return FlatState(
            self,
            [make(b.elements, b.dtype) for b in self.parameters],
            [make(b.elements, b.dtype) for b in self.buffers],
        )

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
    """One set of vectors in the form of a layout."""

    layout: FlatLayout
    parameters: list[Tensor]
    buffers: list[Tensor]
    _views: "Views | None" = field(default=None, repr=False, compare=False)

    @property
    def vectors(self) -> list[Tensor]:
        """All vectors: those of parameters, then those of buffers."""
        return [*self.parameters, *self.buffers]

    @property
    def views(self) -> "Views":
        """Each tensor as a view; made once."""
        if self._views is None:
            self._views = Views(
                [v for b, flat in zip(self.layout.parameters, self.parameters, strict=True) for v in b.views(flat)],
                [v for b, flat in zip(self.layout.buffers, self.buffers, strict=True) for v in b.views(flat)],
            )
        return self._views

    def copy_(self, other: "FlatState") -> "FlatState":
        """Take another state's values."""
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            mine.copy_(theirs)
        return self

    def clone(self) -> "FlatState":
        """A copy in ordinary memory."""
        return FlatState(self.layout, [v.clone() for v in self.parameters], [v.clone() for v in self.buffers])

    def take(self, other: "FlatState") -> "FlatState":
        """Copy the tensors that both have, by name."""
        mine = dict(self.named())
        for name, view in other.named():
            if name in mine:
                mine[name].copy_(view)
        return self

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, view) of every tensor, parameters first."""
        names = (e.name for b in (*self.layout.parameters, *self.layout.buffers) for e in b.entries)
        return zip(names, (*self.views.parameters, *self.views.buffers), strict=True)

    def digest(self) -> str:
        """SHA-256 over all bytes."""
        return digest(self.vectors)


@dataclass(frozen=True)
class Views:
    """A state's tensors in their shapes, in layout order."""

    parameters: list[Tensor]
    buffers: list[Tensor]


def read(module: nn.Module, state: FlatState) -> FlatState:
    """Copy a module's present values into ``state``."""
    here = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, view in state.named():
            view.copy_(here[name])
    return state


def write(module: nn.Module, state: FlatState) -> nn.Module:
    """Copy ``state`` into a module."""
    here = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, view in state.named():
            here[name].copy_(view)
    return module


def digest_of(module: nn.Module, layout: FlatLayout) -> str:
    """That of the state that :func:`read` would make, without making it."""
    here = dict(module.named_parameters()) | dict(module.named_buffers())
    return digest(here[e.name] for block in (*layout.parameters, *layout.buffers) for e in block.entries)


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over all bytes of tensors on the CPU, one after the other."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _blocks(tensors: Iterable[tuple[str, Tensor]]) -> tuple[DtypeBuffer, ...]:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Size]]] = {}
    for name, tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor.shape))
    return tuple(DtypeBuffer(dtype, _entries(group)) for dtype, group in by_dtype.items())


def _chosen(blocks: Iterable[DtypeBuffer], names: Collection[str]) -> tuple[DtypeBuffer, ...]:
    found = ((b.dtype, [(e.name, e.shape) for e in b.entries if e.name in names]) for b in blocks)
    return tuple(DtypeBuffer(dtype, _entries(shapes)) for dtype, shapes in found if shapes)


def _reshaped(
    blocks: Iterable[DtypeBuffer], shape: Callable[[str, torch.Size], Sequence[int] | None]
) -> tuple[DtypeBuffer, ...]:
    parts = ((b.dtype, [(e.name, shape(e.name, e.shape)) for e in b.entries]) for b in blocks)
    there = ((dtype, [(name, torch.Size(size)) for name, size in found if size is not None]) for dtype, found in parts)
    return tuple(DtypeBuffer(dtype, _entries(found)) for dtype, found in there if found)


def _entries(shapes: Iterable[tuple[str, torch.Size]]) -> tuple[TensorEntry, ...]:
    entries, start = [], 0
    for name, shape in shapes:
        entries.append(TensorEntry(name, shape, start, start + shape.numel()))
        start += shape.numel()
    return tuple(entries)
