"""Find and read the standard files of data sets: IDX files, and pickles of arrays.

IDX is the format of MNIST and the sets made after it (yann.lecun.com/exdb/mnist)::

    byte   0  1  2     3           4 .. 4+4n-1        then
           0  0  0x08  n           n sizes            the unsigned bytes, last axis fastest
                 |     dimensions  big-endian uint32
                 unsigned byte

A pickle is a program: it may import any name and call it. Only byte arrays, bytes, numbers, lists and dicts are read
here: the few names that a pickled array needs are replaced by classes of this file, every other name is refused, and
not even numpy's own unpickling runs on values from the file.
"""

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


def damaged(path: Path, reason: str) -> InputError:
    """Return the error to raise for a file that is not the original one."""
    return InputError(f"{path} {reason}; put the original file there")


def find_files(program: str, data: Path | None, names: Sequence[str], folders: Sequence[str]) -> list[Path]:
    """Return the paths of ``names``, each plain or with ``.gz``, all from one folder.

    Args:
        program: name of the program, for the message.
        data: the folder that the user gave.
        names: the required files.
        folders: folders below ``data``, in the order in which they are tried; "." is ``data`` itself. The first that
            holds any of the files is the one: two sets may use the same names, and must not be mixed.

    Raises:
        InputError: names every missing file and the folders that were searched.
    """
    listing = f"{', '.join(names)} (.gz or not)"
    if data is None:
        below = "".join(f" or {folder}/ with them" for folder in folders if folder != ".")
        raise InputError(
            f"{program} is read from files; write --data DIR (in Python data=Path('DIR')), where DIR holds "
            f"{listing}{below}"
        )
    data = data.expanduser()
    if not data.is_dir():
        raise InputError(f"data={str(data)!r} is no folder; write --data DIR, the folder with {listing}")
    for folder in folders:
        paths = [
            next((p for p in (data / folder / name, data / folder / f"{name}.gz") if p.is_file()), None)
            for name in names
        ]
        present = [path for path in paths if path is not None]
        if len(present) == len(names):
            return present
        if present:
            missing = [name for name, path in zip(names, paths, strict=True) if path is None]
            raise InputError(
                f"{program} also needs {', '.join(missing)} (.gz or not) in {present[0].parent}, next to "
                f"{present[0].name}; put it there"
            )
    raise InputError(
        f"{program} needs {listing}, and none is in {' or '.join(str(data / folder) for folder in folders)}; "
        "write --data DIR, the folder that holds them"
    )


def no_files(program: str, data: Path | None) -> None:
    """Raise InputError if ``data`` was given to a program that reads no files."""
    if data is not None:
        raise InputError(f"{program} reads no files, so data={str(data)!r} would do nothing; leave it out")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if its first bytes are those of gzip.

    Raises:
        InputError: it can't be read or unpacked.
    """
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if packed.startswith(_GZIP_MAGIC) else packed
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"can't be read: {error or type(error).__name__}") from error


_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the samples of one IDX file, [n, *item], read-only.

    Args:
        path: the file, packed by gzip or not.
        item: shape of one sample: (28, 28) for images, () for labels.

    Raises:
        InputError: it is no IDX file of unsigned bytes with samples of this shape, or is empty, too short or too long.
    """
    content, dims = read_bytes(path), 1 + len(item)
    if len(content) < 4 + 4 * dims:
        raise damaged(path, f"is truncated: {len(content)} bytes, fewer than an IDX header of {4 + 4 * dims}")
    magic, expected = int.from_bytes(content[:4], "big"), _UNSIGNED_BYTE << 8 | dims
    if magic != expected:
        kind = f"an IDX file of unsigned bytes with {dims} dimension{'s' * (dims > 1)}"
        raise damaged(path, f"begins with 0x{magic:08x}, but {kind} begins with 0x{expected:08x}")
    shape: tuple[int, ...] = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    if shape[1:] != item:
        raise damaged(path, f"holds samples of shape {shape[1:]}, not {item}")
    if shape[0] == 0:
        raise damaged(path, "holds no samples")
    header, size = 4 + 4 * len(shape), math.prod(shape)
    if len(content) != header + size:
        state = "truncated" if len(content) < header + size else "too long"
        expectation = f"its header says {shape}, so {header} + {size} bytes, but it has {len(content)}"
        raise damaged(path, f"is {state}: {expectation}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_pickle(path: Path) -> Any:
    """Return the content of a pickle; a numpy array in it becomes a :class:`ByteArray`.

    Raises:
        InputError: it asks for a name that no plain data needs (which is not run), or is damaged.
    """
    content = read_bytes(path)
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except Exception as error:
        # Damaged opcodes raise nearly anything: IndexError, KeyError, UnicodeDecodeError, MemoryError, ...
        raise damaged(path, f"is no readable pickle: {type(error).__name__}: {error}") from error


class ByteArray:
    """A pickled numpy array of unsigned bytes; ``value`` is the array, read-only."""

    value: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_DType", bool, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: bytes, dtype: Any, shape: tuple[int, ...], order: str) -> "ByteArray":
        """Take the values from the bytes in the file."""
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1"):
            raise InputError("holds an array that is not of unsigned bytes; put the original file there")
        if not isinstance(raw, (bytes, bytearray)) or math.prod(shape) != len(raw):
            raise InputError(f"holds an array of shape {shape} without as many bytes; put the original file there")
        self.value = np.frombuffer(bytes(raw), np.uint8).reshape(shape, order="F" if order == "F" else "C")
        return self


class _DType:
    """Replacement of numpy.dtype; only its code matters, since the unsigned byte has no byte order."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order, alignment and the like."""


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise InputError(f"asks for the text encoding {encoding!r}; put the original file there")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _DType,
    # Python 3 writes bytes so under protocol 2, and empty ones as a call without arguments.
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",
    # numpy 1 and numpy 2; _frombuffer is protocol 5's.
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: ByteArray(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: ByteArray(),
    ("numpy.core.numeric", "_frombuffer"): lambda *arguments: ByteArray().fill(*arguments),
    ("numpy._core.numeric", "_frombuffer"): lambda *arguments: ByteArray().fill(*arguments),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise InputError(
                f"asks for {module_name}.{global_name}, which no plain array needs: it was refused and not run; "
                "put the original file there"
            )
        return _ALLOWED[module_name, global_name]
