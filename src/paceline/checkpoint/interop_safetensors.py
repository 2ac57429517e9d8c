"""Weights as Hugging Face keeps them: ``model.safetensors``, or several files and an index.

::

    model-00001-of-00002.safetensors    names of A as keys
    model-00002-of-00002.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {name: file, …}}

What is imported may come from anywhere, so nothing of it is taken on trust: files of the index must be in its folder,
each name in one file only, and each file a regular one with a header of its own size.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.base import RESERVED
from paceline.checkpoint.interop import (
    FILE_BYTES,
    Report,
    TensorSpec,
    Transfer,
    divided,
    no_report,
    open_sound,
    read_specs,
    state_specs,
    write_checkpoint,
    write_files,
)
from paceline.checkpoint.manifest import DTYPES
from paceline.core.errors import InputError, check_positive
from paceline.core.safe_files import check_out, check_safetensors, new_folder, read_json, reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {code: name for name, (code, _) in DTYPES.items()}


def export_safetensors(
    checkpoint_folder: str | Path,
    out: str | Path,
    max_file_bytes: float = FILE_BYTES,
    *,
    report: Report = no_report,
) -> Transfer:
    """Write the parameters and buffers of a checkpoint as a folder that Hugging Face's ``from_pretrained`` reads.

    Args:
        checkpoint_folder: ``step-<n>``, or the folder of a run's checkpoints, of which the newest sound one counts.
        out: a new folder, which appears whole or not at all.
        max_file_bytes: of tensors in one file, unless a single tensor has more.
        report: is told of progress.

    Raises:
        InputError: no checkpoint is sound, or ``out`` exists or can't be written.
    """
    check_positive("max_file_bytes", max_file_bytes, instead=FILE_BYTES)
    target = check_out(out)
    if target.suffix == ".safetensors":
        raise InputError(f"{out} would be a folder; write {target.with_suffix('').name}, and {SINGLE} will be in it")
    checkpoint, notes = open_sound(Path(checkpoint_folder))
    specs = state_specs(checkpoint)
    parts = list(divided(specs, max_file_bytes))
    names = [SINGLE] if len(parts) == 1 else [_file_name(i, len(parts)) for i in range(len(parts))]
    files, size = dict(zip(names, parts, strict=True)), sum(spec.nbytes for spec in specs)
    with new_folder(target) as folder:
        # transformers refuses files that don't say which library's tensors they hold.
        write_files(folder, files, partial(read_specs, checkpoint), report, metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {spec.name: file for file, part in files.items() for spec in part}
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Transfer(checkpoint.folder, target, len(specs), size, notes)


def import_safetensors(path: str | Path, out: str | Path, *, report: Report = no_report) -> Transfer:
    """Write weights as a checkpoint, ``out/step-0``.

    Args:
        path: a folder with ``model.safetensors`` or with an index and its files; or one file.
        out: a new folder of checkpoints, which appears whole or not at all.
        report: is told of progress.

    Raises:
        InputError: a file is missing or damaged or outside the folder, a name is in two of them, a dtype is none of
            torch's, or ``out`` exists or can't be written.
    """
    source, target = Path(path), check_out(out)
    weight_map = _weight_map(source)
    if weight_map is None:
        file = source / SINGLE if source.is_dir() else source
        found = dict.fromkeys(_specs(file), file)
    else:
        found = {
            spec: source / name
            for name in dict.fromkeys(weight_map.values())
            for spec in _specs(source / name)
            if _is_mapped(spec.name, name, weight_map, source)
        }
        if missing := weight_map.keys() - {spec.name for spec in found}:
            raise InputError(f"{source / INDEX} names {min(missing)}, but {weight_map[min(missing)]} does not have it")

    def read(batch: Sequence[TensorSpec]) -> Iterator[Tensor]:
        names = defaultdict[Path, list[str]](list)
        for spec in batch:
            names[found[spec]].append(spec.name)
        tensors: dict[str, Tensor] = {}
        for file, keys in names.items():
            with reading(file), safe_open(file, framework="pt", device="cpu") as opened:
                tensors |= {key: opened.get_tensor(key) for key in keys}
        return (tensors[spec.name] for spec in batch)

    folder = write_checkpoint(target, list(found), read, report)
    return Transfer(source, folder, len(found), sum(spec.nbytes for spec in found))


def _file_name(i: int, files: int) -> str:
    return f"model-{i + 1:05d}-of-{files:05d}.safetensors"


def _weight_map(source: Path) -> dict[str, str] | None:
    """Return the file of each name, as an index says; None if all names are in one file."""
    if not source.is_dir() or os.path.lexists(source / SINGLE):
        return None
    if not os.path.lexists(source / INDEX):
        others = ", ".join(sorted(file.name for file in source.glob("*.safetensors"))[:3])
        instead = f"write the path of one file: {others}" if others else "write a folder of safetensors"
        raise InputError(f"{source} has neither {SINGLE} nor {INDEX}; {instead}")
    weight_map: Any = read_json(source / INDEX).get("weight_map")
    with reading(source / INDEX):
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("its weight_map should be an object of names and files")
        for file in weight_map.values():
            if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
                raise ValueError(f"{file!r} is no name of a file in its folder")
    return weight_map


def _is_mapped(name: str, file: str, weight_map: Mapping[str, str], source: Path) -> bool:
    """Return True; raise InputError if a name is in another file than the index says, or not in it."""
    if name not in weight_map:
        raise InputError(f"{source / file} has {name}, which is not in {INDEX}; write the folder of one model")
    if weight_map[name] != file:
        raise InputError(f"{name} is in two files of {source}, {weight_map[name]} and {file}; leave it in one of them")
    return True


def _specs(path: Path) -> list[TensorSpec]:
    """Return the tensors of a file, whose header has been checked."""
    with reading(path):
        check_safetensors(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
                return [_spec(key, each.get_shape(), each.get_dtype()) for key, each in slices.items()]
        except (SafetensorError, RuntimeError) as error:  # the latter where so much memory can't be mapped
            raise ValueError(str(error)) from error


def _spec(name: str, shape: Sequence[int], code: str) -> TensorSpec:
    if name.startswith(RESERVED):
        raise ValueError(f"{name} begins like the optimizer's state in a checkpoint; write the tensor by another name")
    if code not in _DTYPES:
        raise ValueError(f"{name} has dtype {code}, which torch has not; write one of: {', '.join(_DTYPES)}")
    return TensorSpec(name, tuple(shape), _DTYPES[code])
