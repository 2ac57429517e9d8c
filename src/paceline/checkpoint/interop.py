"""What all exports and imports do: find a sound checkpoint, take A out of it, write tensors as they are read.

::

    ckpt/step-1200 --- export ---> hf/model-00001-of-00002.safetensors …, model.safetensors.index.json
                                   dcp/.metadata, __0_0.distcp
    hf/ or dcp/ ------ import ---> ckpt/step-0: parameters, no state of a run

Both formats are in modules of their own, ``interop_safetensors`` and ``interop_dcp``.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.checkpoint.base import RESERVED, TensorChunk, dtype_name
from paceline.checkpoint.manifest import DTYPES, MANIFEST, ChunkEntry, FileInfo, Manifest, TensorInfo, chunk_key
from paceline.checkpoint.reader import Checkpoint, newest
from paceline.checkpoint.writer import new_head
from paceline.core.errors import InputError
from paceline.core.safe_files import naming, new_folder

# Bytes of tensors in one file, unless a single tensor has more.
FILE_BYTES = 5e9
# Bytes of tensors that are read at once, unless a single tensor has more.
_BATCH_BYTES = 1 << 28

# (what is being written, completed fraction of all).
Report: TypeAlias = Callable[[str, float], None]


class TensorSpec(NamedTuple):
    """A full tensor that is to be written; ``dtype`` as torch names it without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, shape: Iterable[int], dtype: torch.dtype) -> "TensorSpec":
        """Return the spec of a tensor; raise InputError if no checkpoint can hold its dtype."""
        return cls(name, tuple(shape), dtype_name(name, torch.empty(0, dtype=dtype)))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]

    def empty(self) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


# Returns the tensors of these specs, in order.
Read: TypeAlias = Callable[[Sequence[TensorSpec]], Iterable[Tensor]]


class Transfer(NamedTuple):
    """What an export or an import has written.

    Args:
        source: the checkpoint that was read.
        target: the folder that was written.
        tensors: how many there are in it.
        size_bytes: of these tensors.
        notes: sentences on what was left out.
    """

    source: Path
    target: Path
    tensors: int
    size_bytes: int
    notes: tuple[str, ...] = ()


def no_report(_what: str, _fraction: float) -> None:
    """Report nothing."""


def open_sound(folder: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """Open a checkpoint, and verify all of it.

    Args:
        folder: ``step-<n>``, or the folder of a run's checkpoints, of which the newest sound one counts.

    Returns:
        The checkpoint, and a sentence about each newer one that is damaged.

    Raises:
        InputError: it is damaged, or there is none, or it has no parameters.
    """
    if os.path.lexists(folder / MANIFEST):
        checkpoint, damaged = Checkpoint.open(folder), list[str]()
        checkpoint.verify()
    else:
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; write the path that checkpoint= named, or a step-<n> in it")
        found, damaged = newest(folder)
        if found is None:
            raise InputError("; ".join(damaged) or f"{folder} has no checkpoint; write the path that checkpoint= named")
        checkpoint = found
    if not state_specs(checkpoint):
        raise InputError(f"{checkpoint.folder} has no parameters; write the path of a checkpoint")
    return checkpoint, tuple(damaged)


def state_specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    """Return the parameters and buffers of A, without an optimizer's state, Δs and what replicas keep."""
    tensors = checkpoint.manifest.tensors.items()
    return [TensorSpec(name, info.shape, info.dtype) for name, info in tensors if not name.startswith(RESERVED)]


def read_specs(checkpoint: Checkpoint, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Read full tensors of a checkpoint at once."""
    tensors = [spec.empty() for spec in specs]
    checkpoint.read_into(TensorChunk.whole(spec.name, tensor) for spec, tensor in zip(specs, tensors, strict=True))
    return tensors


def read_state(folder: str | Path) -> dict[str, Tensor]:
    """Return the parameters and buffers in a checkpoint, by full name, as ``load_state_dict`` takes them.

    What training does not change (frozen parameters, constant buffers, further names of tied parameters) is in no
    checkpoint of a run: ``model.load_state_dict(read_state("ckpt"), strict=False)`` leaves it as it is.

    Args:
        folder: ``step-<n>``, or the folder of a run's checkpoints, of which the newest sound one is read.

    Raises:
        InputError: it is damaged, or there is none.
    """
    checkpoint, _ = open_sound(Path(folder))
    specs = state_specs(checkpoint)
    return dict(zip((spec.name for spec in specs), read_specs(checkpoint, specs), strict=True))


def divided(specs: Iterable[TensorSpec], most_bytes: float) -> Iterator[list[TensorSpec]]:
    """Yield tensors, in order, in lists of at most so many bytes each; a larger tensor is alone.

    >>> [len(part) for part in divided([TensorSpec("w", (n,), "int8") for n in (3, 3, 9, 1)], 6)]
    [2, 1, 1]
    """
    part, size = list[TensorSpec](), 0
    for spec in specs:
        if part and size + spec.nbytes > most_bytes:
            yield part
            part, size = [], 0
        part.append(spec)
        size += spec.nbytes
    if part:
        yield part


def write_files(
    folder: Path,
    files: Mapping[str, Sequence[TensorSpec]],
    read: Read,
    report: Report,
    *,
    key: Callable[[TensorSpec], str] = lambda spec: spec.name,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write safetensors files, a few tensors in memory at a time.

    Args:
        folder: of the files.
        files: the tensors of each, by name.
        read: returns tensors.
        report: is told the file's name and the fraction that is done.
        key: returns the name of a tensor within its file.
        metadata: texts in the header of each file.

    Raises:
        OSError: a file can't be written; has a path.
    """
    total, done = sum(spec.nbytes for specs in files.values() for spec in specs), 0
    for name, specs in files.items():
        specs = sorted(specs, key=lambda spec: -DTYPES[spec.dtype][1])  # so that each lies at a multiple of its own
        with naming(folder / name), (folder / name).open("xb") as file:
            file.write(_header([(key(spec), spec) for spec in specs], metadata))
            for batch in divided(specs, _BATCH_BYTES):
                for tensor in read(batch):
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                done += sum(spec.nbytes for spec in batch)
                report(name, done / max(total, 1))


def write_checkpoint(
    out: Path, specs: Sequence[TensorSpec], read: Read, report: Report, head: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint of version 0, which holds no state of a run.

    Args:
        out: the folder of checkpoints; it must not exist.
        specs: its tensors.
        read: returns them.
        report: is told of progress.
        head: JSON by key, for the manifest.

    Returns:
        ``out/step-0``.

    Raises:
        InputError: ``out`` exists or can't be written.
    """
    if not specs:
        raise InputError("there are no tensors to import; write the path of a model")
    parts = {f"part-{i}.safetensors": part for i, part in enumerate(divided(specs, FILE_BYTES))}
    with new_folder(out) as partial:
        folder = partial / "step-0"
        folder.mkdir()
        write_files(folder, parts, read, report, key=lambda spec: chunk_key(spec.name, [0] * len(spec.shape)))
        tensors = {spec.name: _whole(spec, file) for file, part in parts.items() for spec in part}
        files = {file: FileInfo.of(folder / file) for file in parts}
        manifest = Manifest(new_head(0, head), tensors, files)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        Manifest.read(folder)
    return out / "step-0"


def _whole(spec: TensorSpec, file: str) -> TensorInfo:
    offset = (0,) * len(spec.shape)
    return TensorInfo(spec.shape, spec.dtype, (ChunkEntry(file, chunk_key(spec.name, offset), offset, spec.shape),))


def _header(keyed: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, spec in keyed:
        begin, end = end, end + spec.nbytes
        header[key] = {"dtype": DTYPES[spec.dtype][0], "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the values begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
