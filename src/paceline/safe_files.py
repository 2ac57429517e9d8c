"""Files that others can read: folders that appear whole or not at all, tensors without pickle."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing

State: TypeAlias = Mapping[str, Tensor]
"""Parameters and buffers by full name."""


def check_out(path: str | Path) -> Path:
    """The path of a folder that is to be written later; raises InputError where that can't work."""
    target = Path(path).absolute()
    if os.path.lexists(target):
        raise InputError(f"{path} exists, and nothing is overwritten; write another folder, {path}-2 for instance")
    ancestor = next(parent for parent in target.parents if os.path.lexists(parent))
    if not ancestor.is_dir():
        raise InputError(f"{path} can't be made: {ancestor} is no folder; write a path below a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise InputError(f"{path} can't be made: {ancestor} is not writable; write a path below a folder of yours")
    return target


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into that takes its place at ``path`` when the block ends, and is gone where it fails.

    Raises:
        InputError: ``path`` exists or can't be made.
    """
    target = check_out(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside, not in a temporary place: only within one file system is a rename atomic.
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    partial.mkdir()
    try:
        yield partial
        check_out(path)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong while ``path`` is read into an InputError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a folder that save() wrote") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        why = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} can't be read: {why}") from error


def write_json(path: Path, value: Any) -> None:
    """``value`` as indented JSON, keys in their order; the file is whole at every moment."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write(text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises InputError, naming the file, where there is none."""
    with reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        return value


def save_state(state: State, path: Path) -> None:
    """Write tensors as safetensors; tied ones once, with their other names in the metadata under ``tied``."""
    kept: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        owner = first.setdefault(_place(tensor), name) if tensor.numel() else name
        if owner == name:
            kept[name] = tensor.detach().cpu()
        else:
            tied[name] = owner
    save_file(_apart(kept), path, metadata={"tied": json.dumps(tied)})


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _apart(tensors: State) -> dict[str, Tensor]:
    """Contiguous tensors, no two in one piece of memory: safetensors refuses others."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if storage in seen else tensor.contiguous()
        seen.add(storage)
    return apart


def load_state(path: Path) -> dict[str, Tensor]:
    """What :func:`save_state` wrote; tied names share one tensor again."""
    with reading(path), safe_open(path, framework="pt", device="cpu") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        tied = json.loads((file.metadata() or {}).get("tied", "{}"))
        return state | {name: state[other] for name, other in tied.items()}


def load_into(module: nn.Module, state: State, path: Path) -> nn.Module:
    """The module with a saved state; raises InputError, naming the file and the names, where they don't fit."""
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise InputError(f"{path} does not fit the program's model: {error}") from error
    return module
