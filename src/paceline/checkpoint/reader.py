"""Checkpoints that are read: found, verified, and read into any split.

Reading intersects the rectangles that are wanted with those that are stored::

    stored by 2 shards      wanted by ZeRO-1 of 3 replicas
    | part 0 | part 1 |     | w[0:2, :]      |    read from part 0 and from part 1
    |        |        |     | w[2:4, :]      |
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.base import STEP_OPTIONS, TensorChunk, dtype_name
from paceline.checkpoint.manifest import DTYPES, MANIFEST, ChunkEntry, Manifest, checkpoint_folders
from paceline.core.errors import InputError, PacelineError
from paceline.core.safe_files import check_safetensors, reading


class CheckpointStatus(NamedTuple):
    """One line of ``paceline checkpoints``.

    Args:
        folder: of the checkpoint.
        version: of A, as the folder's name says.
        created: UTC, ISO 8601; None if the manifest is damaged.
        size_bytes: of all its files.
        error: what is damaged; None if it is sound.
    """

    folder: Path
    version: int
    created: str | None
    size_bytes: int
    error: str | None


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, whose manifest has been read."""

    folder: Path
    manifest: Manifest
    _verified: set[str] = field(default_factory=set[str], init=False, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the manifest of a checkpoint; its other files are verified when they are read.

        Raises:
            InputError: the manifest is missing or damaged; names it.
        """
        return cls(folder, Manifest.read(folder))

    def verify(self) -> None:
        """Compare size, SHA-256 and header of every file with the manifest.

        Raises:
            InputError: a file is damaged or missing; names it.
        """
        for name in self.manifest.files:
            self._verify_file(name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of its tensors that begin with ``prefix``."""
        return [name for name in self.manifest.tensors if name.startswith(prefix)]

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a full tensor; None if there is none of this name."""
        info = self.manifest.tensors.get(name)
        return None if info is None else (info.shape, getattr(torch, info.dtype))

    def under(self, prefix: str) -> "Checkpoint":
        """Return the tensors whose names begin with ``prefix``, by the rest of their names."""
        own = {
            name.removeprefix(prefix): info for name, info in self.manifest.tensors.items() if name.startswith(prefix)
        }
        return _Part(self.folder, replace(self.manifest, tensors=own), whole=self)

    def read(self, name: str) -> Tensor:
        """Return a full tensor.

        Raises:
            InputError: there is none of this name, or its file is damaged.
        """
        if name not in self.manifest.tensors:
            raise self._absent(name)
        info = self.manifest.tensors[name]
        for chunk in info.chunks:
            self._verify_file(chunk.file)  # before so much memory is allocated
        tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        self.read_into([TensorChunk.whole(name, tensor)])
        return tensor

    def read_into(self, chunks: Iterable[TensorChunk]) -> None:
        """Fill chunks with what is stored, however it was split; each file that is needed is verified first.

        Raises:
            InputError: a name is absent, a shape or dtype differs, or a file is damaged.
        """
        wanted = defaultdict[str, list[tuple[TensorChunk, ChunkEntry]]](list)
        for chunk in chunks:
            for stored in self._stored(chunk):
                wanted[stored.file].append((chunk, stored))
        for name, pairs in wanted.items():
            self._verify_file(name)
            with reading(self.folder / name), safe_open(self.folder / name, framework="pt", device="cpu") as file:
                for chunk, stored in pairs:
                    _copy_common(chunk, stored, file.get_tensor(stored.key))

    def _stored(self, chunk: TensorChunk) -> list[ChunkEntry]:
        """Return the stored chunks that have elements of this one."""
        if chunk.tensor.numel() == 0:
            return []
        info = self.manifest.tensors.get(chunk.name)
        if info is None and chunk.name == STEP_OPTIONS:  # of a run whose steps no loop made: it stays as it is
            return []
        if info is None:
            raise self._absent(chunk.name)
        dtype = dtype_name(chunk.name, chunk.tensor)
        if (info.shape, info.dtype) != (chunk.shape, dtype):
            raise InputError(
                f"{chunk.name} has shape {list(info.shape)} and dtype {info.dtype} in {self.folder}, but "
                f"{list(chunk.shape)} and {dtype} here; write the program that the checkpoint was made with"
            )
        return [stored for stored in info.chunks if all(extent > 0 for _, extent in _common(chunk, stored))]

    def _verify_file(self, name: str) -> None:
        if name in self._verified:
            return
        path = self.folder / name
        self.manifest.files[name].check(path)
        with reading(path):
            expected = self._headers.get(name, {})
            check_safetensors(path, _most_header_bytes(expected))
            if _header(path) != expected:
                raise ValueError("its header is not what the manifest says")
        self._verified.add(name)

    @cached_property
    def _headers(self) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """By file and key: dtype and shape, as they should be."""
        headers = defaultdict[str, dict[str, tuple[str, list[int]]]](dict)
        for info in self.manifest.tensors.values():
            for chunk in info.chunks:
                headers[chunk.file][chunk.key] = DTYPES[info.dtype][0], list(chunk.shape)
        return headers

    def _absent(self, name: str) -> InputError:
        return InputError(f"{self.folder} has no {name}; write the program that the checkpoint was made with")


@dataclass(frozen=True)
class _Part(Checkpoint):
    """Some tensors of a checkpoint, by other names; its files are verified as those of the whole."""

    whole: Checkpoint = field(kw_only=True)

    def _verify_file(self, name: str) -> None:
        self.whole._verify_file(name)


class TensorSource(Protocol):
    """Tensors by full name that can be read into any split: a checkpoint, or memory."""

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with ``prefix``."""

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a full tensor; None if there is none of this name."""

    def read_into(self, chunks: Iterable[TensorChunk]) -> None:
        """Fill chunks."""


@dataclass(frozen=True)
class ChunksInMemory:
    """Tensors of which other processes have left chunks; together they have all of each."""

    chunks: Sequence[TensorChunk]

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with ``prefix``."""
        return sorted({chunk.name for chunk in self.chunks if chunk.name.startswith(prefix)})

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a full tensor; None if there is none of this name."""
        return next(((chunk.shape, chunk.tensor.dtype) for chunk in self.chunks if chunk.name == name), None)

    def read_into(self, chunks: Iterable[TensorChunk]) -> None:
        """Fill chunks, however the tensors are cut here; raises PacelineError where some of one is nowhere."""
        by_name = defaultdict[str, list[tuple[ChunkEntry, Tensor]]](list)
        for left in self.chunks:
            entry = ChunkEntry("", left.key, left.offset, tuple(left.tensor.shape))
            by_name[left.name].append((entry, left.tensor))
        for chunk in chunks:
            missing = chunk.tensor.numel()
            for entry, values in by_name[chunk.name]:
                extents = [extent for _, extent in _common(chunk, entry)]
                if all(extent > 0 for extent in extents):
                    _copy_common(chunk, entry, values)
                    missing -= prod(extents)
            if missing:
                raise PacelineError(f"{missing} elements of {chunk.key} were left by no process; a paceline defect")


def find(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that a path names, ``ckpt/step-1200``, or else the :func:`newest` sound one in it.

    Raises:
        InputError: the path names a checkpoint that is damaged.
    """
    path = path.absolute()
    return (_verified(path), []) if path in checkpoint_folders(path.parent) else newest(path)


def nothing_in(folder: Path) -> InputError:
    """Return the error for a folder, of which a run is to go on, without a sound checkpoint."""
    if not folder.exists():
        return InputError(f"there is no folder {folder.absolute()}; write the folder that checkpoint= named")
    return InputError(f"{folder} has no sound checkpoint; write the folder that checkpoint= named")


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest sound checkpoint in a folder.

    Returns:
        It, verified, or None; and a sentence about each damaged one that is newer, the newest first.
    """
    damaged: list[str] = []
    for folder in checkpoint_folders(directory):
        try:
            return _verified(folder), damaged
        except InputError as error:
            damaged.append(str(error))
    return None, damaged


def statuses(directory: Path) -> list[CheckpointStatus]:
    """Verify all checkpoints in a folder, the newest first; raise InputError if it is none."""
    if not directory.is_dir():
        raise InputError(f"{directory} is no folder; write the path that checkpoint= named")
    found: list[CheckpointStatus] = []
    for folder in checkpoint_folders(directory):
        created, error = None, None
        try:
            created = str(_verified(folder).manifest.head.get("created"))
        except InputError as failure:
            error = str(failure)
        size = sum(file.lstat().st_size for file in folder.rglob("*"))
        found.append(CheckpointStatus(folder, int(folder.name.removeprefix("step-")), created, size, error))
    return found


def _verified(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    version = checkpoint.manifest.head.get("version")
    if f"step-{version}" != folder.name:
        raise InputError(
            f"{folder / MANIFEST} is of version {version}, not of that of its folder's name; remove {folder}"
        )
    checkpoint.verify()
    return checkpoint


def _most_header_bytes(expected: dict[str, tuple[str, list[int]]]) -> int:
    """Return more bytes than a header of these chunks has, however it was written."""
    return 4096 + sum(6 * len(key) + 256 + 24 * len(shape) for key, (_, shape) in expected.items())


def _header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape by key."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            return {key: (each.get_dtype(), each.get_shape()) for key, each in slices.items()}
    except (SafetensorError, RuntimeError) as error:  # the latter where so much memory can't be mapped
        raise ValueError(str(error)) from error


def _common(chunk: TensorChunk, stored: ChunkEntry) -> list[tuple[int, int]]:
    """Return for each dim where the rectangle begins that both have, in the full tensor, and its extent."""
    spans = zip(chunk.offset, chunk.tensor.shape, stored.offset, stored.shape, strict=True)
    return [(max(a, b), min(a + m, b + n) - max(a, b)) for a, m, b, n in spans]


def _copy_common(chunk: TensorChunk, stored: ChunkEntry, values: Tensor) -> None:
    target = chunk.tensor.detach()
    for dim, (start, extent) in enumerate(_common(chunk, stored)):
        target = target.narrow(dim, start - chunk.offset[dim], extent)
        values = values.narrow(dim, start - stored.offset[dim], extent)
    target.copy_(values)
