"""Files and folders that appear whole or not at all, and JSON in them; no torch."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from paceline.core.errors import InputError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file that replaces ``path`` when the block ends, and is removed if the block fails."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_out(path: str | Path) -> Path:
    """Return the absolute path of a folder that is to be written later; raise InputError if that can't work."""
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
    """Make a folder to write into, which is renamed to ``path`` when the block ends, and removed if the block fails.

    Raises:
        InputError: ``path`` exists or can't be made.
    """
    target = check_out(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, not in a temporary folder: only within one file system is a rename atomic.
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    partial.mkdir()
    try:
        yield partial
        check_out(path)  # once more, since a rename would replace an empty folder that has appeared meanwhile
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of the block, which reads ``path``, into an InputError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a folder that save() wrote") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        # The text of a KeyError is the key alone.
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} can't be read: {reason}") from error


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, keys in their order; readers see the old file or the new one, never a part."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write(text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise InputError, naming the file, if there is none."""
    with reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        return value
