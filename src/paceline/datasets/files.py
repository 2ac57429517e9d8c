"""Finding and reading a data set's standard files."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


def find_files(program: str, data: Path | None, names: Sequence[str], folders: Sequence[str]) -> list[Path]:
    """The paths of ``names``, each plain or with ``.gz``, all from one folder.

    Args:
        program: who asks, for the message.
        data: the folder that the user gave.
        names: the files that must be there.
        folders: below ``data``, in the order in which they are tried; "." is ``data`` itself. The first that holds any
            of the files is the one: two sets may use the same names, and must not be mixed.

    Raises:
        InputError: naming every missing file and where it was looked for.
    """
    if data is None:
        raise InputError(
            f"{program} is read from files; write --data DIR (in Python data=Path('DIR')), where DIR holds "
            f"{_listing(names)}{_below(folders)}"
        )
    data = data.expanduser()
    if not data.is_dir():
        raise InputError(f"data={str(data)!r} is no folder; write --data DIR, the folder with {_listing(names)}")
    found = [[_plain_or_gz(data / folder / name) for name in names] for folder in folders]
    best = next((paths for paths in found if any(paths)), None)
    if best is None:
        raise InputError(
            f"{program} needs {_listing(names)}, and none is in {_places(data, folders)}; "
            "write --data DIR, the folder that holds them"
        )
    return _complete(program, names, best)


def no_files(program: str, data: Path | None) -> None:
    """Raises InputError where ``data`` was given to a program that reads no files."""
    if data is not None:
        raise InputError(f"{program} reads no files, so data={str(data)!r} would do nothing; leave it out")


def read_bytes(path: Path) -> bytes:
    """What the file holds, unpacked where its first bytes say that it is gzip's.

    Raises:
        InputError: where it can't be read or unpacked.
    """
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if packed.startswith(_GZIP_MAGIC) else packed
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} can't be read: {error or type(error).__name__}; put the original file there"
        ) from error


def _complete(program: str, names: Sequence[str], paths: Sequence[Path | None]) -> list[Path]:
    present = [path for path in paths if path is not None]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise InputError(
            f"{program} also needs {_listing(missing)} in {present[0].parent}, beside {present[0].name}; put it there"
        )
    return present


def _plain_or_gz(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} (.gz or not)"


def _below(folders: Sequence[str]) -> str:
    return "".join(f" or {folder}/ with them" for folder in folders if folder != ".")


def _places(data: Path, folders: Sequence[str]) -> str:
    return " or ".join(str(data / folder) for folder in folders)
