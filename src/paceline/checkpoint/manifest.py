"""The manifest of a checkpoint: which tensors it holds, in which files, and the SHA-256 of each; no torch.

``manifest.json`` is one JSON object, the commit record of its folder::

    {"format": 1, "version": 1200, "strategy": …, "run": …,                                         the head
     "tensors": {name: {"shape": […], "dtype": "float32", "chunks": [[file, key, offset, shape], …]}, …},
     "files": {file: {"size_bytes": …, "sha256": …}, …},
     "sha256": …}                                             of all bytes before the comma in front of "sha256"

Whatever is read from disk is checked before it is used: the hash, then types and ranges, then that the chunks of each
tensor cover it exactly once.
"""

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import InputError
from paceline.core.safe_files import bound_values, open_regular, parse_json, read_bytes, reading

FORMAT = 1
MANIFEST = "manifest.json"

# Name of a dtype in torch -> its name in safetensors, and the bytes of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}

# Corners of all chunks of one tensor; a tensor that is cut along d dims has 2^d for each chunk.
_MOST_CORNERS = 1 << 20
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_SEAL = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\}\n')
_SEAL_BYTES = len(',\n"sha256": ""}\n') + 64


def chunk_key(name: str, offset: Iterable[int]) -> str:
    """Return the name of a chunk within a file.

    >>> chunk_key("head.weight", (2, 0))
    'head.weight@2,0'
    """
    return f"{name}@{','.join(map(str, offset))}"


class ChunkEntry(NamedTuple):
    """Where a chunk is stored, and which rectangle of its tensor it is."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorInfo(NamedTuple):
    """Shape and dtype of a full tensor, as torch names it without "torch.", and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkEntry, ...]


class FileInfo(NamedTuple):
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileInfo":
        """Read a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(file.tell(), digest.hexdigest())

    def check(self, path: Path) -> None:
        """Compare a file with what was recorded of it.

        Raises:
            InputError: it is missing, no regular file, of another size or has another SHA-256.
        """
        with reading(path), open_regular(path) as file:
            size = file.seek(0, 2)
            if size != self.size_bytes:
                raise ValueError(f"it has {size:,} bytes, but {self.size_bytes:,} were written")
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise ValueError("its SHA-256 is not the one that was recorded when it was written")


@dataclass(frozen=True)
class Manifest:
    """What a folder of files holds.

    Args:
        head: JSON by key: "format", and whatever else is no tensor.
        tensors: by full name.
        files: by name within the folder.
    """

    head: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]

    def to_json(self) -> str:
        """Return the text of ``manifest.json``: one line per key of the head, per tensor and per file."""
        tensors = {
            name: {"shape": info.shape, "dtype": info.dtype, "chunks": info.chunks}
            for name, info in self.tensors.items()
        }
        files = {name: info._asdict() for name, info in self.files.items()}
        text = f'{{\n{_lines(self.head)},\n"tensors": {{\n{_lines(tensors)}\n}},\n"files": {{\n{_lines(files)}\n}}'
        return f'{text},\n"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'

    @classmethod
    def parse(cls, text: bytes, path: Path) -> "Manifest":
        """Read the text of a manifest, and check all of it.

        Args:
            text: as :meth:`to_json` returns it, in UTF-8.
            path: of the file, for messages.

        Raises:
            InputError: its hash is wrong, or it has values that no manifest has; names the file.
        """
        manifest = cls.parse_part(text, path)
        with reading(path):
            for name, info in manifest.tensors.items():
                _check_cover(name, info)
        return manifest

    @classmethod
    def parse_part(cls, text: bytes, path: Path) -> "Manifest":
        """Read the manifest of one part of a checkpoint, whose chunks need not cover their tensors."""
        with reading(path):
            seal = _SEAL.fullmatch(text, max(0, len(text) - _SEAL_BYTES))
            if seal is None or hashlib.sha256(text[: seal.start()]).hexdigest() != seal[1].decode():
                raise ValueError("its SHA-256 is not the one that it ends with")
            head = parse_json(text)
            if type(head.get("format")) is not int or head["format"] != FORMAT:
                raise ValueError(f"it has format {head.get('format')!r}, but this version of Paceline reads {FORMAT}")
            tensors, files = head.pop("tensors"), head.pop("files")
            del head["sha256"]
            files = {_file_name(name): _file_info(value) for name, value in files.items()}
            manifest = cls(head, {name: _tensor_info(name, value) for name, value in tensors.items()}, files)
            manifest._check_files()
            return manifest

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of a folder.

        Raises:
            InputError: it is missing or damaged; names the file.
        """
        path = folder / MANIFEST
        with reading(path):
            text = read_bytes(path)
            bound_values(text, len(text) + sum(_stored_bytes(file) for file in folder.iterdir()))
        return cls.parse(text, path)

    @classmethod
    def of_files(cls, head: Mapping[str, Any], folder: Path) -> "Manifest":
        """Return a manifest, without tensors, of all files in a folder."""
        return cls({"format": FORMAT, **head}, {}, {file.name: FileInfo.of(file) for file in sorted(folder.iterdir())})

    @classmethod
    def merge(cls, head: Mapping[str, Any], parts: Iterable["Manifest"]) -> "Manifest":
        """Return the manifest of all parts of a checkpoint; raise InputError if they contradict each other."""
        tensors, files = dict[str, TensorInfo](), dict[str, FileInfo]()
        for part in parts:
            files |= part.files
            for name, info in part.tensors.items():
                known = tensors.setdefault(name, info._replace(chunks=()))
                if known[:2] != info[:2]:
                    raise InputError(
                        f"{name} has shape {known.shape} and dtype {known.dtype} in one part of the checkpoint, but "
                        f"{info.shape} and {info.dtype} in {', '.join(part.files)}"
                    )
                tensors[name] = known._replace(chunks=known.chunks + info.chunks)
        return cls(dict(head), tensors, files)

    def check_files(self, folder: Path) -> None:
        """Compare size and SHA-256 of every file in a folder with this manifest; raise InputError, naming the file."""
        for name, info in self.files.items():
            info.check(folder / name)

    def _check_files(self) -> None:
        """Require that every chunk is in a file of this manifest, which is large enough for all of its chunks."""
        used, keys = Counter[str](), set[tuple[str, str]]()
        for name, info in self.tensors.items():
            for chunk in info.chunks:
                if chunk.file not in self.files:
                    raise ValueError(f"{name} is in {chunk.file!r}, which is none of its files")
                if (chunk.file, chunk.key) in keys:
                    raise ValueError(f"the key {chunk.key!r} of {chunk.file} is used twice")
                keys.add((chunk.file, chunk.key))
                used[chunk.file] += prod(chunk.shape) * DTYPES[info.dtype][1]
        for name, size in used.items():
            if size > self.files[name].size_bytes:
                raise ValueError(f"{name} has {self.files[name].size_bytes} bytes, but its chunks have {size}")


def checkpoint_folders(directory: Path) -> list[Path]:
    """Return the folders of complete checkpoints in a folder, sound or not, the newest first."""
    if not directory.is_dir():
        return []
    with reading(directory):
        names = os.listdir(directory)
    return [
        directory / f"step-{n}" for n in sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)
    ]


def _stored_bytes(path: Path) -> int:
    """Return what a file takes on the disk, so that holes don't count."""
    found = path.lstat()
    return min(found.st_size, found.st_blocks * 512)


def _lines(values: Mapping[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in its folder")
    return name


def _file_info(value: Any) -> FileInfo:
    info = FileInfo(**value)
    if not isinstance(info.sha256, str) or not re.fullmatch("[0-9a-f]{64}", info.sha256):
        raise ValueError(f"{info.sha256!r} is no SHA-256")
    return info._replace(size_bytes=_sizes([info.size_bytes])[0])


def _tensor_info(name: str, value: Any) -> TensorInfo:
    shape, dtype = _sizes(value["shape"]), value["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    chunks = tuple(ChunkEntry(file, key, _sizes(offset), _sizes(size)) for file, key, offset, size in value["chunks"])
    for chunk in chunks:
        if not isinstance(chunk.file, str) or not isinstance(chunk.key, str):
            raise ValueError(f"{name} has a chunk in {chunk.file!r}, {chunk.key!r}, which are no names")
        if not len(shape) == len(chunk.offset) == len(chunk.shape) or any(
            start + extent > size for start, extent, size in zip(chunk.offset, chunk.shape, shape, strict=True)
        ):
            raise ValueError(f"the chunk {chunk.key!r} at {chunk.offset} of shape {chunk.shape} is not within {shape}")
    return TensorInfo(shape, dtype, chunks)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in values):
        raise ValueError(f"{str(values)[:100]} should be a list of sizes")
    return tuple(values)


def _check_cover(name: str, info: TensorInfo) -> None:
    """Require that chunks cover a tensor exactly once.

    For each chunk count +1 at its first corner and, with the opposite sign for each dim in which a corner is at the
    chunk's end, ±1 at the others. These counts are the differences of "how many chunks hold this element" along all
    dims, so they are those of the whole tensor exactly if every element is in one chunk.
    """
    whole = ChunkEntry("", "", (0,) * len(info.shape), info.shape)
    cut = [d for d, size in enumerate(info.shape) if any(chunk.shape[d] != size for chunk in info.chunks)]
    if len(info.chunks) << len(cut) > _MOST_CORNERS:
        raise ValueError(f"{name} is cut into {len(info.chunks)} chunks along {len(cut)} dims, which is too many")
    counts = Counter[tuple[int, ...]]()
    for sign, chunk in ((-1, whole), *((1, chunk) for chunk in info.chunks)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(chunk.offset[d] + end * chunk.shape[d] for d, end in zip(cut, ends, strict=True))
            counts[corner] += sign * (-1) ** sum(ends)
    if prod(info.shape) and any(counts.values()):
        raise ValueError(f"the chunks of {name} do not cover it exactly once")
